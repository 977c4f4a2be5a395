"""Head norms + RotaryEmbedding + TensorScatter + Attention -> TreeAttention, an operator of our
own: one node norms, rotates, writes the cache in place and attends, for one sequence, for many, and
for blocks.

Knows the operators of both sides. Knows no model.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgespec.backends.canonical_attention import AttentionParts, head_shape
from edgespec.backends.ort.contract import SCALE_BYTES, CacheType, attention_inputs
from edgespec.backends.ort.fusion import is_over_rows
from edgespec.backends.ort.native.library import DOMAIN
from edgespec.backends.rewriting import (
    Constants,
    Nodes,
    described,
    drop_input,
    producer,
    replace_output,
    require,
    required,
)
from edgespec.contract import Kind, inputs_named

OPERATORS: dict[CacheType, str] = {
    "float32": "TreeAttention",
    "float16": "TreeAttentionFloat16",
    "int8": "TreeAttentionInt8",
}


def attend_trees(graph: ir.Graph, attentions: list[ir.Node], cache: CacheType) -> None:
    """Replace each Attention by TreeAttention over a cache of a type, and the masks by what it
    reads instead."""
    graph.opset_imports[DOMAIN] = 1
    inputs = {value.name: value for value in graph.inputs}
    masks = {mask: new_inputs(graph, mask) for mask in inputs_named(Kind.MASK) if mask in inputs}
    for node in attentions:
        replace_attention(graph, node, masks[str(required(node.inputs[3]).name)], cache)


def drop_masks(graph: ir.Graph) -> None:
    """Remove the masks, which no node reads any more."""
    for mask in {*inputs_named(Kind.MASK)} & {value.name for value in graph.inputs}:
        drop_input(graph, mask)


def new_inputs(graph: ir.Graph, mask: str) -> list[ir.Value]:
    """The graph's inputs that stand for a mask."""
    values = [described(ir.Value(), spec) for spec in attention_inputs(mask)]
    graph.inputs.extend(values)
    return values


def replace_attention(
    graph: ir.Graph, node: ir.Node, seen: list[ir.Value], cache: CacheType
) -> None:
    """Replace an Attention, its rotations and its caches by one TreeAttention on rows with flat
    heads. Keys have the rotations of the queries in their last rows."""
    parts, make = AttentionParts.of(node), Nodes(node, Constants(graph), part="")
    by_head = [
        producer(required(rope.inputs[0]), "Transpose", node)
        for rope in (parts.q_rope, parts.k_rope)
    ]
    norms = head_norms(*by_head)
    (q, num_heads), (k, num_kv_heads) = (
        merged_heads(make, transpose, label, before_norm=bool(norms))
        for label, transpose in zip("qk", by_head, strict=True)
    )
    v, _ = merged_heads(make, parts.v_transpose, "v")
    past = [required(parts.k_scatter.inputs[0]), required(parts.v_scatter.inputs[0])]
    lengths, visible, first = seen
    write_indices = parts.k_scatter.inputs[2]
    inputs = [q, k, v, *past, write_indices, lengths, visible, first, *rotations(parts, node)]
    sizes = {"num_heads": num_heads, "kv_num_heads": num_kv_heads, "scale": parts.scale}
    epsilon = {"norm_epsilon": norms[0].attributes["epsilon"].as_float()} if norms else {}
    attention = make.node(
        OPERATORS[cache],
        [*inputs, *(norm.inputs[1] for norm in norms)],
        {**sizes, **epsilon},
        domain=DOMAIN,
        num_outputs=3,
    )
    output, *present = attention.outputs
    parts.flat.outputs[0].replace_all_uses_with(output)
    for scatter, written in zip((parts.k_scatter, parts.v_scatter), present, strict=True):
        replace_output(graph, scatter.outputs[0], written)
    for value in (*past, *present):
        retype(value, cache)


def merged_heads(
    make: Nodes, transpose: ir.Node, label: str, *, before_norm: bool = False
) -> tuple[ir.Value, int]:
    """[B, S, N, D] before the transpose, or before the norm of heads in front of it -> ([B, S,
    N*D], N)."""
    source = required(transpose.inputs[0])
    if before_norm:
        source = required(producer(source, "RMSNormalization", make.before).inputs[0])
    split = producer(source, None, make.before)
    heads, dim = head_shape(split, make.before)
    if split.op_type == "Reshape":  # no head norm between: what was split is flat
        return required(split.inputs[0]), heads
    sizes = np.array([0, 0, heads * dim], np.int64)
    shape = make.constant(f"lowered/flat{heads * dim}", sizes)
    return make("Reshape", source, shape, label=f"{label}/flat"), heads


def head_norms(q_transpose: ir.Node, k_transpose: ir.Node) -> list[ir.Node]:
    """The norms of the heads of queries and keys, which the kernel computes; none where there is
    one alone, or where they are not alike."""
    norms = [required(transpose.inputs[0]).producer() for transpose in (q_transpose, k_transpose)]
    both = [norm for norm in norms if norm is not None and norm.op_type == "RMSNormalization"]
    alike = len({norm.attributes["epsilon"].as_float() for norm in both if is_over_rows(norm)})
    return both if len(both) == 2 and alike == 1 and all(map(is_over_rows, both)) else []


def rotations(parts: AttentionParts, node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """The cosines and sines of the keys. ContractError unless they rotate halves of as many
    elements as the queries' do."""
    for rope in (parts.q_rope, parts.k_rope):
        require(len(rope.inputs) == 3, rope, "cos and sin of each row")
        require(set(rope.attributes) <= {"rotary_embedding_dim"}, rope, "rotated halves")
    widths = [dict(rope.attributes) for rope in (parts.q_rope, parts.k_rope)]
    require(repr(widths[0]) == repr(widths[1]), node, "queries and keys rotated alike")
    return required(parts.k_rope.inputs[1]), required(parts.k_rope.inputs[2])


def retype(value: ir.Value, cache: CacheType) -> None:
    """Let a cache that the graph reads or gives have another type."""
    assert value.shape is not None
    *dims, dim = value.shape.dims
    assert isinstance(dim, int)
    value.shape = ir.Shape([*dims, dim + (SCALE_BYTES if cache == "int8" else 0)])
    value.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(cache)))
