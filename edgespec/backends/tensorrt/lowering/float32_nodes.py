"""New nodes that compute in float32 whatever the compute type, and how they take a place."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from edgespec.backends.rewriting import Nodes, replace_output
from edgespec.backends.tensorrt.lowering.precision import keep_float32


class Float32Nodes(Nodes):
    """`Nodes` of which `precision` rounds none."""

    def __call__(
        self, op_type: str, *inputs: ir.Value | float, label: str, **attributes: Any
    ) -> ir.Value:
        """The output of a new node, in float32."""
        value = super().__call__(op_type, *inputs, label=label, **attributes)
        node = value.producer()
        assert node is not None
        keep_float32(node)
        return value


def replace_node(node: ir.Node, new: ir.Value) -> None:
    """Let `new` be what the one output of a node was, to its readers and as an output of the
    graph, and remove the node."""
    old, graph = node.outputs[0], node.graph
    assert graph is not None
    if old.is_graph_output():
        assert isinstance(graph, ir.Graph)
        replace_output(graph, old, new)
    old.replace_all_uses_with(new)
    graph.remove(node, safe=True)
