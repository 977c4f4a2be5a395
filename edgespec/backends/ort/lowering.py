"""Lowers a canonical graph to ONNX Runtime's CPU kernels: small rewrites, each with its
precondition.

- attention: RotaryEmbedding + TensorScatter + Attention -> TreeAttention of our own; or, without
  it, -> GroupQueryAttention over a shared cache, for batch 1; in larger batches it stays as it is,
  over a cache that the runner keeps as wide as what is written
- recurrent layers -> GatedDeltaNet of our own, or as they are (`delta_net`)
- weights: stored halves -> float32 in the [in, out] layout that MatMul reads, or 4 or 8 bits for
  MatMulNBits (`weights`)
- mixtures of experts of 4 or 8 bits -> Experts of our own, which computes the chosen ones
  (`experts`)
- nodes that can be one (`fusion`); with kernels of our own norms and gates too (`norm_matmul`)

Knows the operators of both sides. Knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgespec.backends.canonical_attention import AttentionParts, canonical_attentions
from edgespec.backends.ort.contract import CacheType
from edgespec.backends.ort.data_file import AnyWeight, PackedWeight
from edgespec.backends.ort.delta_net import take_delta_nets
from edgespec.backends.ort.fusion import fuse_residuals
from edgespec.backends.ort.low_bit_head import search_logits
from edgespec.backends.ort.matmul_nbits import MICROSOFT
from edgespec.backends.ort.native.library import DOMAIN
from edgespec.backends.ort.norm_matmul import fuse_norms
from edgespec.backends.ort.options import FP32, WeightFormat
from edgespec.backends.ort.tree_attention import attend_trees, drop_masks, merged_heads
from edgespec.backends.ort.weights import lower_weights
from edgespec.backends.rewriting import (
    Constants,
    Nodes,
    drop_input,
    name_outputs,
    producer,
    replace_output,
    require,
    required,
)


@dataclass(frozen=True)
class Lowered:
    """The lowered graph, and the weights that its data file must hold in this order. `head` is that
    of an lm_head that searches its logits."""

    model: ir.Model
    weights: list[AnyWeight]
    head: ir.Value | None = None


def lower(
    model: ir.Model,
    data_name: str,
    batched: bool = False,
    weight_format: WeightFormat = FP32,
    tree_cache: CacheType | None = None,
    bits: Mapping[str, int] | None = None,
) -> Lowered:
    """Rewrite `model` in place; external weights will stand in `data_name` beside it. With
    `tree_cache` attention is our own kernel's, over a cache of that type, and so are recurrent
    layers. `bits` says of weights that are rounded with minimums which get more than 4.

    Raises ContractError if a node does not have the form that the rewrite needs.
    """
    graph = model.graph
    inputs = {value.name for value in graph.inputs}
    attentions = canonical_attentions(graph)
    cached = "write_indices" in inputs or bool(attentions)
    # Blocks see later slots
    batched = batched or "target_hidden" in inputs
    if tree_cache is not None:
        attend_trees(graph, attentions, tree_cache)
        take_delta_nets(graph)
    elif cached and not batched:
        group_attention(graph, attentions)
    weights = lower_weights(model, data_name, weight_format, bits)
    head = search_logits(graph)
    fuse(model, weights, native=tree_cache is not None)
    if tree_cache is not None:
        drop_masks(graph)
    elif cached and not batched:
        drop_input(graph, "write_indices")
    return Lowered(model, weights, head)


def fuse(model: ir.Model, weights: list[AnyWeight], *, native: bool = False) -> None:
    """Fuse what can be one, by operators of our own where it is `native` or has weights of
    theirs."""
    if native or any(isinstance(weight, PackedWeight) for weight in weights):
        fuse_norms(model)
        model.graph.opset_imports[DOMAIN] = 1
    else:
        fuse_residuals(model.graph)
    RemoveUnusedNodesPass()(model)
    model.graph.opset_imports[MICROSOFT] = 1


# ---- attention


def group_attention(graph: ir.Graph, attentions: list[ir.Node]) -> None:
    """Replace each Attention by GroupQueryAttention.

    It is causal in slot order and takes batch 1 when a past is given: the runtime keeps parents
    before children, and engines for more sequences keep Attention.
    """
    masks = dict.fromkeys(required(node.inputs[3]) for node in attentions)
    shared = {mask: shared_inputs(graph, mask) for mask in masks}
    for node in attentions:
        replace_attention(graph, node, shared[required(node.inputs[3])])


@dataclass(frozen=True, slots=True)
class Shared:
    """The inputs of GroupQueryAttention that all layers with one mask share."""

    bias: ir.Value  # float [1, 1, S, T], 0 or -inf
    seqlens_k: ir.Value  # int32 [1], T - 1
    total: ir.Value  # int32 scalar, T


def shared_inputs(graph: ir.Graph, mask: ir.Value) -> Shared:
    """The mask as an additive bias, and the length of the cache that it implies."""
    constant, prefix = Constants(graph), "lowered"
    if mask.name != "attention_mask":
        prefix = f"lowered/{mask.name}"
    width = ir.node("Shape", [mask], {"start": 3, "end": 4}, name=f"{prefix}/width")
    total64 = ir.node("Squeeze", [width.outputs[0]], name=f"{prefix}/total64")
    total = ir.node(
        "Cast", [total64.outputs[0]], {"to": int(ir.DataType.INT32)}, name=f"{prefix}/total"
    )
    last64 = ir.node(
        "Sub",
        [width.outputs[0], constant("lowered/one", np.array([1], np.int64))],
        name=f"{prefix}/last64",
    )
    last = ir.node(
        "Cast", [last64.outputs[0]], {"to": int(ir.DataType.INT32)}, name=f"{prefix}/seqlens_k"
    )
    zero = constant("lowered/zero", np.array(0, np.float32))
    never = constant("lowered/never", np.array(-np.inf, np.float32))
    bias = ir.node("Where", [mask, zero, never], name=f"{prefix}/bias")
    nodes = [width, total64, total, last64, last, bias]
    name_outputs(nodes)
    first = graph[0]
    graph.insert_before(first, nodes)
    return Shared(bias.outputs[0], last.outputs[0], total.outputs[0])


def replace_attention(graph: ir.Graph, node: ir.Node, shared: Shared) -> None:
    """Replace an Attention and its caches by one GroupQueryAttention on rows with flat heads."""
    parts, make = AttentionParts.of(node), Nodes(node, Constants(graph), part="")
    q, num_heads = rotated(make, parts.q_rope, "q")
    k, num_kv_heads = rotated(make, parts.k_rope, "k")
    v, _ = merged_heads(make, parts.v_transpose, "v")
    past = (parts.k_scatter.inputs[0], parts.v_scatter.inputs[0])
    lengths = (shared.seqlens_k, shared.total)
    attention = make.node(
        "GroupQueryAttention",
        [q, k, v, *past, *lengths, None, None, None, shared.bias],
        {"num_heads": num_heads, "kv_num_heads": num_kv_heads, "scale": parts.scale},
        domain=MICROSOFT,
        num_outputs=3,
    )
    output, *present = attention.outputs
    parts.flat.outputs[0].replace_all_uses_with(output)
    for scatter, cache in zip((parts.k_scatter, parts.v_scatter), present, strict=True):
        replace_output(graph, scatter.outputs[0], cache)


def rotated(make: Nodes, rope: ir.Node, label: str) -> tuple[ir.Value, int]:
    """The rotary embedding of rows with flat heads, [B, S, N*D], and N."""
    require(len(rope.inputs) == 3, rope, "cos and sin of each row")
    require(set(rope.attributes) <= {"rotary_embedding_dim"}, rope, "rotated halves")
    transpose = producer(required(rope.inputs[0]), "Transpose", make.before)
    x, heads = merged_heads(make, transpose, label)
    attributes: dict[str, int | ir.Attr] = {"num_heads": heads, **dict(rope.attributes)}
    node = make.node("RotaryEmbedding", [x, *rope.inputs[1:]], attributes, label=f"{label}/rope")
    return node.outputs[0], heads
