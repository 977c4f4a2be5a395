"""Which stored tensor serves which weight of a graph.

Knows names and shapes. A graph asks by its own names; the table knows under which name, and in which checkpoint, the
tensor stands (a draft may borrow its head from the base). A tensor that nobody asks for is an error elsewhere, in
`checkpoint.detect.check_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from edgespec.checkpoint.files import Checkpoint
from edgespec.graphs.builder import GraphBuilder, Weight


@dataclass(frozen=True)
class WeightTable:
    """Own name -> stored name in `checkpoint`; `borrowed` -> (another checkpoint, stored name there)."""

    checkpoint: Checkpoint
    stored: Mapping[str, str]
    borrowed: Mapping[str, tuple[Checkpoint, str]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return name in self.stored or name in self.borrowed

    def source(self, name: str) -> tuple[Checkpoint, str]:
        return self.borrowed[name] if name in self.borrowed else (self.checkpoint, self.stored[name])

    def value(self, builder: GraphBuilder, name: str) -> ir.Value:
        """The weight as a graph value in its stored dtype, placed in the builder's plan."""
        checkpoint, stored = self.source(name)
        return builder.weight(self.place(builder, name, checkpoint, stored), name)

    @staticmethod
    def place(builder: GraphBuilder, name: str, checkpoint: Checkpoint, stored: str) -> Weight:
        return builder.plan.place(name, checkpoint, checkpoint.tensors[stored])
