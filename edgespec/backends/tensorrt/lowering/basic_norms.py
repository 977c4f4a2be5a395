"""RMSNormalization as basic operators, which TensorRT 10.13 has no other way to read.

x / sqrt(mean(x^2) + epsilon) * w over the last axis, in float32 whatever the compute type: squares
of a residual stream overflow float16. Knows the operator. Knows no layer.
"""

from __future__ import annotations

import onnx_ir as ir

from edgespec.backends.rewriting import Constants, require, required
from edgespec.backends.tensorrt.lowering.float32_nodes import Float32Nodes, replace_node
from edgespec.backends.tensorrt.target import Target

FLOAT = int(ir.DataType.FLOAT)


def apply(model: ir.Model, target: Target) -> None:
    """Replace every RMSNormalization. ContractError where one normalizes other axes than the last,
    or not in float32."""
    constant = Constants(model.graph)
    for node in [n for n in model.graph.all_nodes() if n.op_type == "RMSNormalization"]:
        replace_norm(node, constant)
    left = [n.name for n in model.graph.all_nodes() if n.op_type == "RMSNormalization"]
    assert not left, left


def replace_norm(node: ir.Node, constant: Constants) -> None:
    """Let the readers of an RMSNormalization read its parts instead."""
    check_norm(node)
    x, weight = (required(value) for value in node.inputs)
    make = Float32Nodes(node, constant, "norm")
    square = make("Mul", x, x, label="square")
    mean = make("ReduceMean", square, constant.int64(-1), label="mean", keepdims=1)
    floor = make("Add", mean, node.attributes["epsilon"].as_float(), label="floor")
    unit = make("Div", x, make("Sqrt", floor, label="length"), label="unit")
    scaled = make("Mul", unit, weight, label="scaled")
    replace_node(node, scaled)


def check_norm(node: ir.Node) -> None:
    """ContractError unless it is over the last axis, with a weight, and computes in float32."""
    require(len(node.inputs) == 2, node, "x and a weight")
    require(set(node.attributes) == {"axis", "epsilon", "stash_type"}, node, "axis and epsilon")
    require(node.attributes["axis"].as_int() == -1, node, "the last axis")
    require(node.attributes["stash_type"].as_int() == FLOAT, node, "float32 inside")
