"""Lowers the graph of an image encoder to a dialect of TensorRT, by the passes of decoders and two
of its own: masks of windows are added, and in the portable dialect attention is products.

Knows operators. Knows no layer and no file.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgespec.backends.rewriting import (
    Constants,
    Nodes,
    count,
    producer,
    require,
    required,
)
from edgespec.backends.tensorrt.contract import lowered_contract
from edgespec.backends.tensorrt.lowering import (
    basic_norms,
    basic_ropes,
    declare,
    gated_products,
    opset,
    precision,
    quantization,
)
from edgespec.backends.tensorrt.lowering.masks import additive_mask
from edgespec.backends.tensorrt.lowering.precision import keep_float32
from edgespec.backends.tensorrt.target import Dialect, Target
from edgespec.contract import Contract


def lower_vision(model: ir.Model, contract: Contract, target: Target) -> ir.Model:
    """Rewrite `model`, a canonical graph that keeps `contract`, in place; returns it.

    Its external weights stay where they are. ContractError where the graph is not one that export
    writes.
    """
    declare(model.graph, lowered_contract(contract, target))
    keep_rotations(model.graph)
    add_masks(model.graph)
    if target.dialect is Dialect.PORTABLE:
        attend_by_products(model.graph)
        basic_ropes.apply(model, target)
        basic_norms.apply(model, target)
    quantization.apply(model, target)
    gated_products.apply(model, target)
    precision.apply(model, target)
    if target.dialect is Dialect.PORTABLE:
        opset.apply(model, target)
    RemoveUnusedNodesPass()(model)
    return model


def keep_rotations(graph: ir.Graph) -> None:
    """Rotate queries and keys in float32, and scale the queries before they are rounded."""
    for node in [node for node in graph if node.op_type == "Attention"]:
        require(set(node.attributes) == {"scale"}, node, "no attribute but scale")
        require(node.attributes["scale"].as_float() == 1.0, node, "scale 1.0")
        scaled = producer(required(node.inputs[0]), "Mul", node)
        keep_float32(scaled)
        for value in (scaled.inputs[0], node.inputs[1]):
            keep_float32(producer(required(value), "RotaryEmbedding", node))


def add_masks(graph: ir.Graph) -> None:
    """Let each Attention add `Where(mask, 0, NEVER)` instead of reading a boolean mask."""
    additive = dict[ir.Value, ir.Value]()
    for node in [node for node in graph if node.op_type == "Attention"]:
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        if mask is None:
            continue
        if mask not in additive:
            additive[mask] = additive_mask(graph, mask)
        node.replace_input_with(3, additive[mask])


def attend_by_products(graph: ir.Graph) -> None:
    """Replace each Attention by two products and a softmax, which is float32."""
    for node in [node for node in graph if node.op_type == "Attention"]:
        make = Nodes(node, Constants(graph), "products")
        q, k, v = (required(value) for value in node.inputs[:3])
        transposed = make("Transpose", k, label="k/t", perm=(0, 1, 3, 2))
        scores = make("MatMul", q, transposed, label="scores")
        if len(node.inputs) > 3 and node.inputs[3] is not None:
            scores = make("Add", scores, node.inputs[3], label="seen")
        shares = make("Softmax", scores, label="shares", axis=-1)
        node.outputs[0].replace_all_uses_with(make("MatMul", shares, v, label="mixed"))
        graph.remove(node, safe=True)
    require(not count(graph, "Attention"), graph[0], "no Attention left after the rewrites")
