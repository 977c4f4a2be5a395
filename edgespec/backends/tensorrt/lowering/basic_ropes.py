"""RotaryEmbedding as basic operators, which TensorRT 10.13 has no other way to read.

Of a head's first r elements x1 is the first half and x2 the second, and

    rope(x) = (x1, x2) * (cos, cos) + (x2, x1) * (-sin, sin)

What stands behind them stays as it is. Both tables are made once for all layers that read the same
rotations. Knows the operator. Knows no layer.
"""

from __future__ import annotations

import onnx_ir as ir

from edgespec.backends.rewriting import Constants, Nodes, producer, require, required
from edgespec.backends.tensorrt.lowering.float32_nodes import Float32Nodes, replace_node
from edgespec.backends.tensorrt.target import Target

END = 2**31 - 1  # of a slice, whatever the length
Tables = tuple[ir.Value, ir.Value]  # [B, 1, S, r]: (cos, cos) and (-sin, sin)


def apply(model: ir.Model, target: Target) -> None:
    """Replace every RotaryEmbedding. ContractError where one does not rotate halves by the rows of
    two tables."""
    graph, constant = model.graph, Constants(model.graph)
    tables: dict[tuple[ir.Value, ir.Value], Tables] = {}
    for node in [n for n in graph if n.op_type == "RotaryEmbedding"]:
        check_rope(node)
        x, cos, sin = (required(value) for value in node.inputs)
        make = Float32Nodes(node, constant, "rotate")
        if (cos, sin) not in tables:
            tables[cos, sin] = wide_tables(make, cos, sin)
        half = last_dim(cos, node)
        partial = "rotary_embedding_dim" in node.attributes
        rotated = rotate(make, x, half, tables[cos, sin], partial=partial)
        replace_node(node, rotated)
    left = [n.name for n in model.graph.all_nodes() if n.op_type == "RotaryEmbedding"]
    assert not left, left


def wide_tables(make: Nodes, cos: ir.Value, sin: ir.Value) -> Tables:
    """The tables of whole heads, of cos and sin [B, S, r/2]."""
    both = make("Concat", cos, cos, label="cos/halves", axis=2)
    signed = make("Concat", make("Neg", sin, label="sin/neg"), sin, label="sin/halves", axis=2)
    axis = make.constant.int64(1)
    return make("Unsqueeze", both, axis, label="cos"), make("Unsqueeze", signed, axis, label="sin")


def rotate(make: Nodes, x: ir.Value, half: int, tables: Tables, *, partial: bool) -> ir.Value:
    """x [B, N, S, D] with its first 2 * `half` elements rotated; they are all of them unless
    `partial`."""
    cos, sin = tables
    first = elements(make, x, 0, half, "first")
    second = elements(make, x, half, 2 * half, "second")
    swapped = make("Concat", second, first, label="swapped", axis=3)
    whole = elements(make, x, 0, 2 * half, "whole") if partial else x
    kept = make("Mul", whole, cos, label="by_cos")
    crossed = make("Mul", swapped, sin, label="by_sin")
    rotated = make("Add", kept, crossed, label="rotated")
    if not partial:
        return rotated
    rest = elements(make, x, 2 * half, END, "rest")
    return make("Concat", rotated, rest, label="joined", axis=3)


def elements(make: Nodes, x: ir.Value, start: int, end: int, label: str) -> ir.Value:
    """The elements of the last axis of x [B, N, S, D] from `start` to before `end`."""
    numbers = (make.constant.int64(number) for number in (start, end, 3))
    return make("Slice", x, *numbers, label=label)


def last_dim(table: ir.Value, where: ir.Node) -> int:
    """Columns of a table: an input of the graph, or several of them one after the other."""
    value = table
    while value.shape is None:
        value = required(producer(value, None, where).inputs[0])
    size = value.shape[-1]
    require(isinstance(size, int), where, "tables of a fixed width")
    assert isinstance(size, int)
    return size


def check_rope(node: ir.Node) -> None:
    """ContractError unless it rotates halves, by a row of cos and sin for each row of x."""
    require(len(node.inputs) == 3, node, "cos and sin of each row")
    require(set(node.attributes) <= {"rotary_embedding_dim"}, node, "rotated halves")
    if "rotary_embedding_dim" in node.attributes:
        width = node.attributes["rotary_embedding_dim"].as_int()
        half = last_dim(required(node.inputs[1]), node)
        require(width == 2 * half, node, "tables as wide as half of what is rotated")
