"""If -> Where: both sides are computed, and a flag chooses.

TensorRT's parsers warn of control flow, which keeps a call from being captured as a CUDA graph.
Knows that each branch makes one value. Knows no draft.
"""

from __future__ import annotations

import onnx_ir as ir

from edgespec.backends.rewriting import count, name_outputs, require, required
from edgespec.backends.tensorrt.target import Target


def apply(model: ir.Model, target: Target) -> None:
    """Replace each If by both its branches and a Where over their results, which have one shape.

    ContractError for a branch with several results, with inputs or with constants of its own.
    """
    del target  # the same for each
    for node in [node for node in model.graph if node.op_type == "If"]:
        replace_if(model.graph, node)
    require(not count(model.graph, "If"), model.graph[0], "no If left after the rewrites")


def replace_if(graph: ir.Graph, node: ir.Node) -> None:
    """One If, whose branches' nodes move in front of it."""
    require(len(node.outputs) == 1, node, "one output")
    sides = [inlined(graph, node, name) for name in ("then_branch", "else_branch")]
    where = ir.node("Where", [required(node.inputs[0]), *sides], name=f"{node.name}/where")
    name_outputs([where])
    graph.insert_before(node, where)
    node.outputs[0].replace_all_uses_with(where.outputs[0], replace_graph_outputs=True)
    graph.remove(node, safe=True)


def inlined(graph: ir.Graph, node: ir.Node, branch_name: str) -> ir.Value:
    """The value of a branch whose nodes have been moved in front of `node`."""
    branch = node.attributes[branch_name].as_graph()
    plain = not branch.inputs and not branch.initializers and len(branch.outputs) == 1
    require(plain, node, f"one result and no inputs or constants in {branch_name}")
    value, nodes = branch.outputs[0], list(branch)
    require(value.producer() is not None, node, f"a node that makes the result of {branch_name}")
    branch.outputs.clear()
    for inner in nodes:
        require(inner.op_type != "If", node, "no If within an If")
        branch.remove(inner)
        graph.insert_before(node, inner)
    made = value.producer()
    assert made is not None
    if made.op_type != "Identity":
        return value
    source = required(made.inputs[0])
    graph.remove(made, safe=True)
    return source
