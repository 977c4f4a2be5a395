"""Rows with flat heads, as the operators of ONNX Runtime and our own take them, in front of an
Attention that is about to be replaced.

Knows the form that export writes. Knows no operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from edgespec.backends.canonical_attention import head_shape
from edgespec.backends.rewriting import Constants, name_outputs, producer, required


class NodesBefore:
    """New nodes in front of an Attention; their names begin with its name."""

    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        self.graph, self.node, self.constant = graph, node, Constants(graph)

    def __call__(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, int | float | ir.Attr] | None = None,
        *,
        label: str = "",
        domain: str = "",
        num_outputs: int = 1,
    ) -> ir.Node:
        """A node with named outputs; without a label it has the Attention's own name."""
        name = f"{self.node.name}/{label}" if label else str(self.node.name)
        new = ir.node(
            op_type,
            inputs,
            dict(attributes or {}),
            domain=domain,
            num_outputs=num_outputs,
            name=name,
        )
        name_outputs([new])
        self.graph.insert_before(self.node, new)
        return new


def with_flat_heads(
    make: NodesBefore, transpose: ir.Node, label: str, *, before_norm: bool = False
) -> tuple[ir.Value, int]:
    """[B, S, N, D] before the transpose, or before the norm of heads in front of it -> ([B, S,
    N*D], N)."""
    source = required(transpose.inputs[0])
    if before_norm:
        source = required(producer(source, "RMSNormalization", make.node).inputs[0])
    split = producer(source, None, make.node)
    heads, dim = head_shape(split, make.node)
    if split.op_type == "Reshape":  # no head norm between: what was split is flat
        return required(split.inputs[0]), heads
    sizes = np.array([0, 0, heads * dim], np.int64)
    shape = make.constant(f"lowered/flat{heads * dim}", sizes)
    return make("Reshape", [source, shape], label=f"{label}/flat").outputs[0], heads
