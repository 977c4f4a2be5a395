"""Joins nodes that ONNX Runtime would run one after the other: each costs microseconds beside a product of as many.

- residuals: Add + RMSNormalization -> SkipSimplifiedLayerNormalization, which gives the sum as well

Knows the operators of both sides. Knows no model.
"""

from __future__ import annotations

import onnx_ir as ir

from edgespec.backends.ort.nbits import MICROSOFT

SUM, NUM_OUTPUTS = 3, 4  # of SkipSimplifiedLayerNormalization: normed, two that are not asked for, and the sum


def join_residuals(graph: ir.Graph) -> None:
    """Where a sum of two computed values is normed over its last axis."""
    for norm in [node for node in graph if node.op_type == "RMSNormalization" and node.domain == ""]:
        total = norm.inputs[0].producer() if norm.inputs[0] is not None else None
        if total is None or not is_residual(total, graph) or not is_over_rows(norm):
            continue
        epsilon = norm.attributes["epsilon"].as_float()
        joined = ir.node(
            "SkipSimplifiedLayerNormalization", [*total.inputs, norm.inputs[1]], {"epsilon": epsilon},
            domain=MICROSOFT, num_outputs=NUM_OUTPUTS, name=norm.name,
        )  # fmt: skip
        for output in joined.outputs:
            output.name = ""
        for output, old in ((joined.outputs[0], norm.outputs[0]), (joined.outputs[SUM], total.outputs[0])):
            output.name, output.shape, output.type = old.name, old.shape, old.type
            old.name = f"{old.name}/apart"
        graph.insert_before(total, joined)
        norm.outputs[0].replace_all_uses_with(joined.outputs[0])
        total.outputs[0].replace_all_uses_with(joined.outputs[SUM])
        graph.remove((norm, total), safe=True)


def is_residual(node: ir.Node, graph: ir.Graph) -> bool:
    """An Add of two values that nodes make (so neither is a bias), which is no output of the graph."""
    computed = all(value is not None and not value.is_initializer() for value in node.inputs)
    return node.op_type == "Add" and node.graph is graph and computed and not node.outputs[0].is_graph_output()


def is_over_rows(norm: ir.Node) -> bool:
    axis = norm.attributes.get("axis")
    return "epsilon" in norm.attributes and (axis is None or axis.as_int() == -1)
