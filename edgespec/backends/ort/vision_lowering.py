"""Lowers the graph of an image encoder to ONNX Runtime's CPU kernels.

- RotaryEmbedding + Attention by heads -> the same on rows with flat heads, and MultiHeadAttention,
  which keeps no P x P products where nothing is masked
- weights as in decoders (`weights`)

Knows the operators of both sides. Knows no model.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgespec.backends.canonical_attention import head_shape
from edgespec.backends.ort.lowering import Lowered, fuse
from edgespec.backends.ort.matmul_nbits import MICROSOFT
from edgespec.backends.ort.options import FP32, WeightFormat
from edgespec.backends.ort.weights import lower_weights
from edgespec.backends.rewriting import (
    Constants,
    Nodes,
    count,
    name_outputs,
    only_user,
    producer,
    require,
    required,
    scalar,
)


def lower_vision(model: ir.Model, data_name: str, weight_format: WeightFormat = FP32) -> Lowered:
    """Rewrite `model` in place; external weights will stand in `data_name` beside it. ContractError
    where a node does not have the form that the rewrite needs."""
    graph = model.graph
    attentions = [node for node in graph if node.op_type == "Attention"]
    biases: dict[ir.Value, ir.Value] = {}
    for node in attentions:
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        if mask is not None and mask not in biases:
            biases[mask] = bias_of(graph, mask)
        attend_flat(graph, node, None if mask is None else biases[mask])
    weights = lower_weights(model, data_name, weight_format)
    fuse(model, weights)
    require(
        count(graph, "MultiHeadAttention") == len(attentions),
        graph[0],
        f"{len(attentions)} MultiHeadAttention nodes",
    )
    return Lowered(model, weights)


def bias_of(graph: ir.Graph, mask: ir.Value) -> ir.Value:
    """A mask as what is added to products: 0, or minus infinity where nothing may be seen."""
    constant = Constants(graph)
    zero = constant("lowered/zero", np.array(0, np.float32))
    never = constant("lowered/never", np.array(-np.inf, np.float32))
    bias = ir.node("Where", [mask, zero, never], name=f"lowered/{mask.name}/bias")
    name_outputs([bias])
    made = mask.producer()
    assert made is not None
    graph.insert_after(made, bias)
    return bias.outputs[0]


def attend_flat(graph: ir.Graph, node: ir.Node, bias: ir.Value | None) -> None:
    """Replace an Attention over [W, heads, N, D] by one over rows [W, N, heads*D]."""
    require(set(node.attributes) == {"scale"}, node, "no attribute but scale")
    require(node.attributes["scale"].as_float() == 1.0, node, "scale 1.0")
    make = Nodes(node, Constants(graph), part="")
    scaled = producer(required(node.inputs[0]), "Mul", node)
    q_rope = producer(required(scaled.inputs[0]), "RotaryEmbedding", node)
    k_rope = producer(required(node.inputs[1]), "RotaryEmbedding", node)
    heads, _ = head_shape(reshape_of(required(q_rope.inputs[0]), node), node)
    parts = [rotated(make, rope, label) for rope, label in ((q_rope, "q"), (k_rope, "k"))]
    v = required(reshape_of(required(node.inputs[2]), node).inputs[0])
    attributes: dict[str, int | float | ir.Attr] = {
        "num_heads": heads,
        "scale": scalar(scaled.inputs[1], node),
    }
    flat = make.node(
        "MultiHeadAttention",
        [*parts, v, None, None, bias],
        attributes,
        domain=MICROSOFT,
    )
    by_row = only_user(node.outputs[0], "Transpose", node)
    by_row.outputs[0].replace_all_uses_with(flat.outputs[0])


def reshape_of(by_head: ir.Value, node: ir.Node) -> ir.Node:
    """The Reshape that parts rows into heads, in front of the Transpose that makes `by_head`."""
    transpose = producer(by_head, "Transpose", node)
    return producer(required(transpose.inputs[0]), "Reshape", node)


def rotated(make: Nodes, rope: ir.Node, label: str) -> ir.Value:
    """The rotary embedding of rows with flat heads."""
    require(not rope.attributes, rope, "rotated halves of whole heads")
    split = reshape_of(required(rope.inputs[0]), make.before)
    heads, _ = head_shape(split, make.before)
    inputs = [split.inputs[0], *rope.inputs[1:]]
    node = make.node("RotaryEmbedding", inputs, {"num_heads": heads}, label=f"{label}/rope")
    return node.outputs[0]
