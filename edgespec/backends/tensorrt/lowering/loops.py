"""Unrolls the loop in which a recurrent layer inverts its coupling, level by level.

The canonical graph goes through as many levels as a call's rows need; here every call goes through
those of the longest one. A level beyond its rows has a mask of zeros and changes nothing, so that
the results are the same bits. `indexing` has made the masks' number a constant before.

Both dialects. Knows the form of that loop. Knows nothing of the layer around it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgespec.backends.rewriting import (
    Constants,
    Nodes,
    count,
    name_outputs,
    producer,
    require,
    required,
)
from edgespec.backends.tensorrt.target import Target


def apply(model: ir.Model, target: Target) -> None:
    """Replaces each Loop. ContractError for a loop that export does not write."""
    graph = model.graph
    masks: dict[ir.Value, list[ir.Value]] = {}
    for node in [node for node in graph if node.op_type == "Loop"]:
        solve = Solve.of(node)
        if solve.merges not in masks:
            masks[solve.merges] = level_masks(graph, solve.merges, num_levels(target.max_rows))
        unroll(graph, solve, masks[solve.merges])
    RemoveUnusedNodesPass()(model)
    require(count(graph, "Loop") == 0, graph[0], "no Loop left after the rewrites")


def num_levels(max_rows: int) -> int:
    """How often blocks are merged until one holds all rows of the longest call."""
    return (max_rows - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Solve:
    """A Loop over the levels, taken apart."""

    node: ir.Node
    start: ir.Value  # [B, Hv, S, S], the unit matrix
    itself: ir.Value  # [S, S], the same before it is expanded
    coupling: ir.Value  # [B, Hv, S, S]
    merges: ir.Value  # [levels, S, S]

    @classmethod
    def of(cls, node: ir.Node) -> Solve:
        """The parts of a Loop in the form that export writes: from the unit matrix on, a level
        subtracts inverse @ (coupling * mask) @ inverse. ContractError otherwise."""
        require(len(node.inputs) == 3 and node.inputs[1] is None, node, "a count and no condition")
        require(len(node.outputs) == 1, node, "one value that is carried")
        body, start = node.attributes["body"].as_graph(), required(node.inputs[2])
        expand = producer(start, "Expand", node)
        require(len(body.inputs) == 3 and len(body.outputs) == 2, node, "one value in its body")
        level, going, inverse = body.inputs
        on = producer(body.outputs[0], "Identity", node)
        require(on.inputs[0] is going, node, "rounds that only the count ends")
        merged = producer(body.outputs[1], "Sub", node)
        corner = producer(required(merged.inputs[1]), "MatMul", node)
        right = producer(required(corner.inputs[1]), "MatMul", node)
        below = producer(required(right.inputs[0]), "Mul", node)
        mask = producer(required(below.inputs[1]), "Gather", node)
        reads = (merged.inputs[0], corner.inputs[0], right.inputs[1])
        require(all(value is inverse for value in reads), node, "the inverse merged with itself")
        require(mask.inputs[1] is level, node, "a mask for each round")
        require(len(body) == 6, node, "nothing else in its body")
        merges = required(mask.inputs[0])
        depth = producer(required(node.inputs[0]), "Squeeze", node)
        shape = producer(required(depth.inputs[0]), "Shape", node)
        require(shape.inputs[0] is merges, node, "as many rounds as there are masks")
        return cls(node, start, required(expand.inputs[0]), required(below.inputs[0]), merges)


def level_masks(graph: ir.Graph, merges: ir.Value, levels: int) -> list[ir.Value]:
    """The masks [S, S] of the levels, which all layers share. ContractError where the masks are
    not of so many levels."""
    after = producer(merges, None, graph[0])
    require(constant_levels(after) == levels, after, f"masks of {levels} levels")
    constant, nodes = Constants(graph), []
    for level in range(levels):
        index = constant.number(level, np.int64)
        nodes.append(ir.node("Gather", [merges, index], {"axis": 0}, name=f"{after.name}/{level}"))
    name_outputs(nodes)
    graph.insert_after(after, nodes)
    return [node.outputs[0] for node in nodes]


def constant_levels(made_by: ir.Node) -> int:
    """The number of masks, read off the constant sizes of blocks that they are made of."""
    both = producer(required(made_by.inputs[0]), "And", made_by)
    later = producer(required(both.inputs[1]), "Greater", made_by)
    block = producer(required(later.inputs[0]), "Unsqueeze", made_by)
    division = producer(required(block.inputs[0]), "Div", made_by)
    size = producer(required(division.inputs[1]), "Unsqueeze", made_by)
    stored = required(size.inputs[0]).const_value
    require(stored is not None, made_by, "constant sizes of blocks")
    assert stored is not None
    return stored.size


def unroll(graph: ir.Graph, solve: Solve, masks: list[ir.Value]) -> None:
    """Replace a Loop by its rounds. The first has no products: the inverse is still the unit
    matrix, which a product with leaves every value as it is."""
    make = Nodes(solve.node, Constants(graph), "level")
    inverse = solve.start
    for level, mask in enumerate(masks):
        corner = make("Mul", solve.coupling, mask, label=f"{level}/below")
        if level:
            right = make("MatMul", corner, inverse, label=f"{level}/right")
            corner = make("MatMul", inverse, right, label=f"{level}/corner")
        before = inverse if level else solve.itself
        inverse = make("Sub", before, corner, label=f"{level}/merged")
    solve.node.outputs[0].replace_all_uses_with(inverse)
    graph.remove(solve.node, safe=True)
