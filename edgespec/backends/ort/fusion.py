"""Fuses nodes that ONNX Runtime would run one after the other: each costs microseconds beside a
product of as many.

- projections: MatMulNBits of the same rows -> one, and a Split behind it
- residuals: Add + RMSNormalization -> SkipSimplifiedLayerNormalization, which gives the sum as well

Knows the operators of both sides. Knows no model.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgespec.backends.ort import matmul_nbits
from edgespec.backends.rewriting import Constants, replace_value

# Of SkipSimplifiedLayerNormalization: normed, two that are not asked for, and the sum
SUM, NUM_OUTPUTS = 3, 4


def fuse_projections(
    nodes: list[ir.Node],
    sizes: list[int],
    kernel: matmul_nbits.NBitsKernel,
    weights: list[ir.Value],
) -> None:
    """Replace MatMuls of one input by one MatMulNBits and a Split; `sizes` are their outputs,
    `kernel` is that of all their weights, one below the other."""
    graph, names = nodes[0].graph, [str(node.name) for node in nodes]
    name = "+".join((names[0], *(other.rpartition("/")[2] for other in names[1:])))
    assert isinstance(graph, ir.Graph)
    assert sum(sizes) == kernel.out_features
    fused = ir.node("MatMul", [nodes[0].inputs[0], weights[0]], name=name)
    fused.outputs[0].name = f"{name}:0"
    matmul_nbits.replace_matmul(fused, kernel, weights)
    counts = Constants(graph)(
        f"lowered/sizes/{','.join(map(str, sizes))}", np.array(sizes, np.int64)
    )
    parts = ir.node(
        "Split",
        [fused.outputs[0], counts],
        {"axis": -1},
        num_outputs=len(nodes),
        name=f"{name}/split",
    )
    graph.insert_before(next(node for node in graph if node in nodes), (fused, parts))
    for node, part in zip(nodes, parts.outputs, strict=True):
        replace_value(part, node.outputs[0])
    graph.remove(nodes, safe=True)


def fuse_residuals(graph: ir.Graph) -> None:
    """Replace each sum of two computed values that is normed over its last axis by
    SkipSimplifiedLayerNormalization."""
    for norm in [
        node for node in graph if node.op_type == "RMSNormalization" and node.domain == ""
    ]:
        total = norm.inputs[0].producer() if norm.inputs[0] is not None else None
        if norm.outputs[0].is_graph_output():  # the state that some drafts recycle
            continue
        if total is None or not is_residual(total, graph) or not is_over_rows(norm):
            continue
        epsilon = norm.attributes["epsilon"].as_float()
        fused = ir.node(
            "SkipSimplifiedLayerNormalization",
            [*total.inputs, norm.inputs[1]],
            {"epsilon": epsilon},
            domain=matmul_nbits.MICROSOFT,
            num_outputs=NUM_OUTPUTS,
            name=norm.name,
        )
        for output in fused.outputs:
            output.name = ""
        graph.insert_before(total, fused)
        replace_value(fused.outputs[0], norm.outputs[0])
        replace_value(fused.outputs[SUM], total.outputs[0])
        graph.remove((norm, total), safe=True)


def is_residual(node: ir.Node, graph: ir.Graph) -> bool:
    """Whether a node is an Add of two computed values, so that neither is a bias, and no output of
    the graph."""
    computed = all(value is not None and not value.is_initializer() for value in node.inputs)
    return (
        node.op_type == "Add"
        and node.graph is graph
        and computed
        and not node.outputs[0].is_graph_output()
    )


def is_over_rows(norm: ir.Node) -> bool:
    """Whether an RMSNormalization norms the last axis alone and has its own epsilon."""
    axis = norm.attributes.get("axis")
    return "epsilon" in norm.attributes and (axis is None or axis.as_int() == -1)
