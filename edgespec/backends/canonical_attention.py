"""The attention of a canonical graph, found and taken apart for a lowering.

Knows the form that export writes: rotated queries and keys, a cache that is written row by row, and
a mask. Knows no engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgespec.backends.rewriting import only_user, producer, require, required, scalar
from edgespec.contract import Kind, inputs_named


def canonical_attentions(graph: ir.Graph) -> list[ir.Node]:
    """The Attention nodes. ContractError where one does not read what every lowering relies on:
    the mask, and a cache written row by row."""
    inputs = {value.name: value for value in graph.inputs}
    nodes = [n for n in graph if n.op_type == "Attention" and n.domain == ""]
    for node in nodes:
        check_attention(node, inputs)
        for value in node.inputs[1:3]:
            check_cache(producer(required(value), "TensorScatter", node))
    return nodes


def check_attention(node: ir.Node, inputs: dict[str | None, ir.Value]) -> None:
    """ContractError for what a lowering has no input for: another mask, softcap, a second
    output."""
    masks = [inputs[name] for name in inputs_named(Kind.MASK) if name in inputs]
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


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """The nodes around a canonical Attention."""

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
