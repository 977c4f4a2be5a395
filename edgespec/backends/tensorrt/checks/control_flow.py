"""Rules of If, Loop and Scan."""

from __future__ import annotations

from onnx import NodeProto

from edgespec.backends.tensorrt.checks.graph import Scope, View, name_of, subgraphs
from edgespec.backends.tensorrt.checks.operators import Problems, shown


def control_flow(view: View) -> Problems:
    """Nodes with graphs of their own."""
    for _, node in view.nodes("If", "Loop", "Scan"):
        yield name_of(node), node.op_type


def loop_condition(view: View) -> Problems:
    """Loops whose condition is left out."""
    for _, node in view.nodes("Loop"):
        if len(node.input) < 2 or not node.input[1]:
            yield name_of(node), "its condition is left out"


def loop_shape(view: View) -> Problems:
    """Values that a Loop carries and that change their shape in the body."""
    for _, node in view.nodes("Loop"):
        for scope in bodies(view, node):
            carried = list(scope.graph.input)[2:]
            for first, next_ in zip(carried, list(scope.graph.output)[1:], strict=False):
                before, after = scope.tensor(first.name).dims, scope.tensor(next_.name).dims
                if before is not None and after is not None and before != after:
                    yield name_of(node), f"{first.name}: {shown(before)} becomes {shown(after)}"


def if_rank(view: View) -> Problems:
    """Branches whose outputs have different ranks."""
    for _, node in view.nodes("If"):
        branches = list(bodies(view, node))
        for outputs in zip(*(scope.graph.output for scope in branches), strict=False):
            shapes = [s.tensor(o.name).dims for s, o in zip(branches, outputs, strict=True)]
            ranks = {len(dims) for dims in shapes if dims is not None}
            if len(ranks) > 1:
                yield name_of(node), " and ".join(map(shown, shapes))


def attention_in_if(view: View) -> Problems:
    """Attention in a branch."""
    for scope, node in view.nodes("Attention"):
        if scope.owner is not None and scope.owner.op_type == "If":
            yield name_of(node), f"it stands in a branch of {name_of(scope.owner)}"


def bodies(view: View, node: NodeProto) -> list[Scope]:
    """The graphs of a node."""
    graphs = list(subgraphs(node))
    return [scope for scope in view.scopes if any(scope.graph is graph for graph in graphs)]
