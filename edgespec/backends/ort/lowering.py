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

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgespec.backends.ort.fusion import join_residuals
from edgespec.backends.ort.matmul_nbits import MICROSOFT
from edgespec.backends.ort.nodes import Constants, name_outputs
from edgespec.backends.ort.weights import AnyWeight, lower_weights
from edgespec.backends.weights import FP32, WeightFormat
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
    attentions = canonical_attentions(graph)
    batched = batched or "target_hidden" in {
        value.name for value in graph.inputs
    }  # blocks see later slots
    if not batched:
        group_attention(graph, attentions)
    weights = lower_weights(model, data_name, weight_format)
    join_residuals(graph)
    RemoveUnusedNodesPass()(model)
    graph.opset_imports[MICROSOFT] = 1
    if batched:
        check_kept(graph, len(attentions))
    else:
        drop_input(graph, "write_indices")
        check_grouped(graph, len(attentions))
    return Lowered(model, weights)


# ---- attention


def canonical_attentions(graph: ir.Graph) -> list[ir.Node]:
    """The Attention nodes, each checked to read what both forms rely on: the mask, and a cache
    written row by row."""
    inputs = {value.name: value for value in graph.inputs}
    nodes = [n for n in graph if n.op_type == "Attention" and n.domain == ""]
    for node in nodes:
        check_attention(node, inputs)
        for value in node.inputs[1:3]:
            check_cache(producer(required(value), "TensorScatter", node))
    return nodes


def check_attention(node: ir.Node, inputs: dict[str | None, ir.Value]) -> None:
    """What GroupQueryAttention is not told of must not be there: another mask, softcap, a second
    output."""
    masks = (inputs["attention_mask"], inputs.get("sliding_attention_mask"))
    require(len(node.inputs) == 4 and node.inputs[3] in masks, node, "attention_mask as its mask")
    require(set(node.attributes) == {"scale"}, node, "no attribute but scale")
    require(node.attributes["scale"].as_float() == 1.0, node, "scale 1.0")
    require(len(node.outputs) == 1, node, "one output")


def check_cache(node: ir.Node) -> None:
    """Rows go in one after the other from write_indices on."""
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
    """GroupQueryAttention is causal in slot order and takes batch 1 when a past is given: the
    runtime keeps parents before children, and engines for more sequences keep Attention."""
    masks = dict.fromkeys(required(node.inputs[3]) for node in attentions)
    shared = {mask: shared_inputs(graph, mask) for mask in masks}
    for node in attentions:
        replace_attention(graph, node, shared[required(node.inputs[3])])


@dataclass(frozen=True, slots=True)
class Shared:
    bias: ir.Value  # float [1, 1, S, T], 0 or -inf
    seqlens_k: ir.Value  # int32 [1], T - 1
    total: ir.Value  # int32 scalar, T


def shared_inputs(graph: ir.Graph, mask: ir.Value) -> Shared:
    """The mask as an additive bias, and the length that it implies."""
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
    q, key, value, _ = (required(v) for v in node.inputs[:4])
    scaled = producer(q, "Mul", node)
    scale = scalar(scaled.inputs[1], node)
    q_rope = producer(required(scaled.inputs[0]), "RotaryEmbedding", node)
    k_scatter, v_scatter = (
        producer(key, "TensorScatter", node),
        producer(value, "TensorScatter", node),
    )
    k_rope = producer(required(k_scatter.inputs[1]), "RotaryEmbedding", node)
    v_turn = producer(required(v_scatter.inputs[1]), "Transpose", node)
    out_turn = only_user(node.outputs[0], "Transpose", node)
    out_flat = only_user(out_turn.outputs[0], "Reshape", node)

    constant, name = Constants(graph), str(node.name)
    nodes: list[ir.Node] = []

    def flat(turn: ir.Node, label: str) -> tuple[ir.Value, int]:
        """[B, S, N, D] before the transpose -> ([B, S, N*D], N)."""
        source = required(turn.inputs[0])
        split = producer(source, None, node)
        heads, dim = head_shape(split, node)
        if split.op_type == "Reshape":  # no head norm between: what was split is flat
            return required(split.inputs[0]), heads
        shape = constant(f"lowered/flat{heads * dim}", np.array([0, 0, heads * dim], np.int64))
        nodes.append(ir.node("Reshape", [source, shape], name=f"{name}/{label}/flat"))
        return nodes[-1].outputs[0], heads

    def rotated(rope: ir.Node, label: str) -> tuple[ir.Value, int]:
        require(len(rope.inputs) == 3, rope, "cos and sin of each row")
        require(set(rope.attributes) <= {"rotary_embedding_dim"}, rope, "rotated halves")
        x, heads = flat(producer(required(rope.inputs[0]), "Transpose", node), label)
        nodes.append(
            ir.node(
                "RotaryEmbedding",
                [x, *rope.inputs[1:]],
                {"num_heads": heads, **dict(rope.attributes)},
                name=f"{name}/{label}/rope",
            )
        )
        return nodes[-1].outputs[0], heads

    q3, num_heads = rotated(q_rope, "q")
    k3, num_kv_heads = rotated(k_rope, "k")
    v3, _ = flat(v_turn, "v")
    lengths = (shared.seqlens_k, shared.total)
    attention = ir.node(
        "GroupQueryAttention",
        [
            q3,
            k3,
            v3,
            k_scatter.inputs[0],
            v_scatter.inputs[0],
            *lengths,
            None,
            None,
            None,
            shared.bias,
        ],
        {"num_heads": num_heads, "kv_num_heads": num_kv_heads, "scale": scale},
        domain=MICROSOFT,
        num_outputs=3,
        name=name,
    )
    nodes.append(attention)
    name_outputs(nodes)
    graph.insert_before(node, nodes)
    out_flat.outputs[0].replace_all_uses_with(attention.outputs[0])
    for scatter, present in zip((k_scatter, v_scatter), attention.outputs[1:], strict=True):
        replace_output(graph, scatter.outputs[0], present)


def head_shape(node: ir.Node, where: ir.Node) -> tuple[int, int]:
    """(N, D) of a value [B, S, N, D]: told by the Reshape that split the heads, through a head norm
    if there is one, and through the Split of a gated head into query and gate."""
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
    if value is None:
        raise ContractError(
            "a node lacks an input", "Export the checkpoint again with this version."
        )
    return value


def require(holds: bool, node: ir.Node, what: str) -> None:
    if not holds:
        raise ContractError(
            f"{node.name}: lowering needs {what}",
            "The graph was not written by this version: export it again.",
        )


def scalar(value: ir.Value | None, where: ir.Node) -> float:
    """A positive constant: GroupQueryAttention takes a scale of zero for none."""
    constant = required(value).const_value
    require(
        constant is not None and constant.size == 1 and float(constant.numpy()) > 0,
        where,
        "a constant scale",
    )
    assert constant is not None
    return float(constant.numpy())


def producer(value: ir.Value, op_type: str | None, where: ir.Node) -> ir.Node:
    node = value.producer()
    require(
        node is not None and op_type in (None, node.op_type),
        where,
        f"{value.name} made by {op_type or 'a node'}",
    )
    assert node is not None
    return node


def only_user(value: ir.Value, op_type: str, where: ir.Node) -> ir.Node:
    users = [node for node, _ in value.uses()]
    require(
        len(users) == 1 and users[0].op_type == op_type, where, f"its output read by one {op_type}"
    )
    return users[0]


def replace_output(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    index = next(i for i, value in enumerate(graph.outputs) if value is old)
    new.name, old.name = old.name, f"{old.name}/canonical"
    new.shape, new.type = old.shape, old.type
    graph.outputs[index] = new


def drop_input(graph: ir.Graph, name: str) -> None:
    value = next(v for v in graph.inputs if v.name == name)
    require(not value.uses(), graph[0], f"input {name} unused after the rewrites")
    graph.inputs.remove(value)


def check_grouped(graph: ir.Graph, num_layers: int) -> None:
    left = {n.op_type for n in graph if n.op_type in {"Attention", "TensorScatter"}}
    require(not left, graph[0], f"no {', '.join(left)} left after the rewrites")
    require(
        count(graph, "GroupQueryAttention") == num_layers,
        graph[0],
        f"{num_layers} GroupQueryAttention nodes",
    )


def check_kept(graph: ir.Graph, num_layers: int) -> None:
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
    return sum(node.op_type == op_type for node in graph)
