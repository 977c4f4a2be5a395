"""Lowers a canonical graph to ONNX Runtime's CPU kernels: small rewrites, each with its
precondition.

- attention: RotaryEmbedding + TensorScatter + Attention -> GroupQueryAttention over a shared cache,
  for batch 1; in larger batches it stays as it is, over a cache that the runner keeps as wide as
  what is written
- weights: stored halves -> float32 in the [in, out] layout that MatMul reads, or 4 or 8 bits for
  MatMulNBits (`weights`)
- nodes that can be one (`fusion`)

Knows the operators of both sides. Knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgespec.backends.ort.data_layout import AnyWeight
from edgespec.backends.ort.fusion import fuse_residuals
from edgespec.backends.ort.matmul_nbits import MICROSOFT
from edgespec.backends.ort.nodes import Constants, name_outputs
from edgespec.backends.ort.options import FP32, WeightFormat
from edgespec.backends.ort.weights import lower_weights
from edgespec.errors import ContractError


@dataclass(frozen=True)
class Lowered:
    """The lowered graph, and the weights that its data file must hold in this order."""

    model: ir.Model
    weights: list[AnyWeight]


def lower(
    model: ir.Model, data_name: str, batched: bool = False, weight_format: WeightFormat = FP32
) -> Lowered:
    """Rewrite `model` in place; external weights will stand in `data_name` beside it.

    Raises ContractError if a node does not have the form that the rewrite needs.
    """
    graph = model.graph
    inputs = {value.name for value in graph.inputs}
    attentions = canonical_attentions(graph)
    cached = "write_indices" in inputs or bool(attentions)
    # Blocks see later slots
    batched = batched or "target_hidden" in inputs
    if cached and not batched:
        group_attention(graph, attentions)
    weights = lower_weights(model, data_name, weight_format)
    fuse_residuals(graph)
    RemoveUnusedNodesPass()(model)
    graph.opset_imports[MICROSOFT] = 1
    if not cached:
        return Lowered(model, weights)
    if batched:
        check_kept(graph, len(attentions))
    else:
        drop_input(graph, "write_indices")
        check_grouped(graph, len(attentions))
    return Lowered(model, weights)


# ---- attention


def canonical_attentions(graph: ir.Graph) -> list[ir.Node]:
    """The Attention nodes. ContractError where one does not read what both forms rely on: the mask,
    and a cache written row by row."""
    inputs = {value.name: value for value in graph.inputs}
    nodes = [n for n in graph if n.op_type == "Attention" and n.domain == ""]
    for node in nodes:
        check_attention(node, inputs)
        for value in node.inputs[1:3]:
            check_cache(producer(required(value), "TensorScatter", node))
    return nodes


def check_attention(node: ir.Node, inputs: dict[str | None, ir.Value]) -> None:
    """ContractError for what GroupQueryAttention has no input for: another mask, softcap, a second
    output."""
    masks = (inputs["attention_mask"], inputs.get("sliding_attention_mask"))
    require(len(node.inputs) == 4 and node.inputs[3] in masks, node, "attention_mask as its mask")
    require(set(node.attributes) == {"scale"}, node, "no attribute but scale")
    require(node.attributes["scale"].as_float() == 1.0, node, "scale 1.0")
    require(len(node.outputs) == 1, node, "one output")


def check_cache(node: ir.Node) -> None:
    """ContractError unless rows go in one after the other from write_indices on."""
    write = node.inputs[2] if len(node.inputs) == 3 else None
    require(write is not None and write.name == "write_indices", node, "write_indices as its index")
    require(
        "axis" not in node.attributes or node.attributes["axis"].as_int() == -2, node, "axis -2"
    )
    require(
        "mode" not in node.attributes or node.attributes["mode"].as_string() == "linear",
        node,
        "mode linear",
    )


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


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """The nodes around a canonical Attention that GroupQueryAttention takes the place of."""

    node: ir.Node
    scale: float  # of the queries
    q_rope: ir.Node
    k_rope: ir.Node
    v_transpose: ir.Node  # [B, S, N, D] -> [B, N, S, D]
    k_scatter: ir.Node
    v_scatter: ir.Node
    flat: ir.Node  # the Reshape of the output to [B, S, N*D]

    @classmethod
    def of(cls, node: ir.Node) -> AttentionParts:
        """The parts around an Attention in the form that export writes. ContractError otherwise."""
        q, key, value, _ = (required(v) for v in node.inputs[:4])
        scaled = producer(q, "Mul", node)
        k_scatter = producer(key, "TensorScatter", node)
        v_scatter = producer(value, "TensorScatter", node)
        transposed = only_user(node.outputs[0], "Transpose", node)
        return cls(
            node=node,
            scale=scalar(scaled.inputs[1], node),
            q_rope=producer(required(scaled.inputs[0]), "RotaryEmbedding", node),
            k_rope=producer(required(k_scatter.inputs[1]), "RotaryEmbedding", node),
            v_transpose=producer(required(v_scatter.inputs[1]), "Transpose", node),
            k_scatter=k_scatter,
            v_scatter=v_scatter,
            flat=only_user(transposed.outputs[0], "Reshape", node),
        )


def replace_attention(graph: ir.Graph, node: ir.Node, shared: Shared) -> None:
    """Replace an Attention and its caches by one GroupQueryAttention on rows with flat heads."""
    parts, make = AttentionParts.of(node), NodesBefore(graph, node)
    q, num_heads = rotated(make, parts.q_rope, "q")
    k, num_kv_heads = rotated(make, parts.k_rope, "k")
    v, _ = with_flat_heads(make, parts.v_transpose, "v")
    past = (parts.k_scatter.inputs[0], parts.v_scatter.inputs[0])
    lengths = (shared.seqlens_k, shared.total)
    attention = make(
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


class NodesBefore:
    """New nodes in front of an Attention; their names begin with its name."""

    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        self.graph, self.node, self.constant = graph, node, Constants(graph)

    def __call__(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, int | float | ir.Attr] | None = None,
        *,
        label: str = "",
        domain: str = "",
        num_outputs: int = 1,
    ) -> ir.Node:
        """A node with named outputs; without a label it has the Attention's own name."""
        name = f"{self.node.name}/{label}" if label else str(self.node.name)
        new = ir.node(
            op_type,
            inputs,
            dict(attributes or {}),
            domain=domain,
            num_outputs=num_outputs,
            name=name,
        )
        name_outputs([new])
        self.graph.insert_before(self.node, new)
        return new


def with_flat_heads(make: NodesBefore, transpose: ir.Node, label: str) -> tuple[ir.Value, int]:
    """[B, S, N, D] before the transpose -> ([B, S, N*D], N)."""
    source = required(transpose.inputs[0])
    split = producer(source, None, make.node)
    heads, dim = head_shape(split, make.node)
    if split.op_type == "Reshape":  # no head norm between: what was split is flat
        return required(split.inputs[0]), heads
    sizes = np.array([0, 0, heads * dim], np.int64)
    shape = make.constant(f"lowered/flat{heads * dim}", sizes)
    return make("Reshape", [source, shape], label=f"{label}/flat").outputs[0], heads


def rotated(make: NodesBefore, rope: ir.Node, label: str) -> tuple[ir.Value, int]:
    """The rotary embedding of rows with flat heads, [B, S, N*D], and N."""
    require(len(rope.inputs) == 3, rope, "cos and sin of each row")
    require(set(rope.attributes) <= {"rotary_embedding_dim"}, rope, "rotated halves")
    transpose = producer(required(rope.inputs[0]), "Transpose", make.node)
    x, heads = with_flat_heads(make, transpose, label)
    attributes: dict[str, int | ir.Attr] = {"num_heads": heads, **dict(rope.attributes)}
    node = make("RotaryEmbedding", [x, *rope.inputs[1:]], attributes, label=f"{label}/rope")
    return node.outputs[0], heads


def head_shape(node: ir.Node, where: ir.Node) -> tuple[int, int]:
    """(N, D) of a value [B, S, N, D]: read off the Reshape that split the heads, through a head
    norm if there is one, and through the Split of a gated head into query and gate."""
    if node.op_type == "RMSNormalization":
        node = producer(required(node.inputs[0]), None, where)
    parts = 1
    if node.op_type == "Split":
        parts, node = len(node.outputs), producer(required(node.inputs[0]), "Reshape", where)
    require(node.op_type == "Reshape", where, "heads split by a Reshape")
    shape = required(node.inputs[1]).const_value
    require(shape is not None and shape.size == 4, where, "heads split into four dimensions")
    assert shape is not None
    _, _, heads, dim = shape.numpy().tolist()
    return heads, dim // parts


# ---- small things


def required(value: ir.Value | None) -> ir.Value:
    """The value itself; ContractError where it is None."""
    if value is None:
        raise ContractError(
            "a node lacks an input", "Export the checkpoint again with this version."
        )
    return value


def require(holds: bool, node: ir.Node, what: str) -> None:
    """ContractError that lowering needs `what` at this node, unless it holds."""
    if not holds:
        raise ContractError(
            f"{node.name}: lowering needs {what}",
            "The graph was not written by this version: export it again.",
        )


def scalar(value: ir.Value | None, where: ir.Node) -> float:
    """The value of a positive constant. ContractError otherwise: GroupQueryAttention takes a scale
    of zero for none."""
    constant = required(value).const_value
    require(
        constant is not None and constant.size == 1 and float(constant.numpy()) > 0,
        where,
        "a constant scale",
    )
    assert constant is not None
    return float(constant.numpy())


def producer(value: ir.Value, op_type: str | None, where: ir.Node) -> ir.Node:
    """The node that makes a value; ContractError where there is none or of another type."""
    node = value.producer()
    require(
        node is not None and op_type in (None, node.op_type),
        where,
        f"{value.name} made by {op_type or 'a node'}",
    )
    assert node is not None
    return node


def only_user(value: ir.Value, op_type: str, where: ir.Node) -> ir.Node:
    """The one node that reads a value; ContractError where there are more or of another type."""
    users = [node for node, _ in value.uses()]
    require(
        len(users) == 1 and users[0].op_type == op_type, where, f"its output read by one {op_type}"
    )
    return users[0]


def replace_output(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Let `new` be the graph output that `old` was, by name, shape and type."""
    index = next(i for i, value in enumerate(graph.outputs) if value is old)
    new.name, old.name = old.name, f"{old.name}/canonical"
    new.shape, new.type = old.shape, old.type
    graph.outputs[index] = new


def drop_input(graph: ir.Graph, name: str) -> None:
    """Remove a graph input that no node reads; ContractError where one does."""
    value = next(v for v in graph.inputs if v.name == name)
    require(not value.uses(), graph[0], f"input {name} unused after the rewrites")
    graph.inputs.remove(value)


def check_grouped(graph: ir.Graph, num_layers: int) -> None:
    """ContractError where an attention layer was not replaced."""
    left = {n.op_type for n in graph if n.op_type in {"Attention", "TensorScatter"}}
    require(not left, graph[0], f"no {', '.join(left)} left after the rewrites")
    require(
        count(graph, "GroupQueryAttention") == num_layers,
        graph[0],
        f"{num_layers} GroupQueryAttention nodes",
    )


def check_kept(graph: ir.Graph, num_layers: int) -> None:
    """ContractError where an attention layer, its two caches or write_indices are gone."""
    require(
        count(graph, "Attention") == num_layers,
        graph[0],
        f"{num_layers} Attention nodes after the rewrites",
    )
    require(
        count(graph, "TensorScatter") == 2 * num_layers,
        graph[0],
        "two caches a layer after the rewrites",
    )
    require(
        "write_indices" in {v.name for v in graph.inputs},
        graph[0],
        "write_indices after the rewrites",
    )


def count(graph: ir.Graph, op_type: str) -> int:
    """How many nodes of the graph have this type."""
    return sum(node.op_type == op_type for node in graph)
