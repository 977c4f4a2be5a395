"""Which stored tensor serves which weight of a graph.

Knows names and shapes. A graph asks by its own names; the table knows under which name, and in
which checkpoint, the tensor stands (a draft may borrow its head from the base). A tensor that
nobody asks for is an error elsewhere, in `checkpoint.detect.check_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.quantization import Quantization
from edgespec.graphs.builder import GraphBuilder
from edgespec.graphs.packing import Packing, PackingSource, Part


@dataclass(frozen=True)
class WeightTable:
    """Own name -> stored name in `checkpoint`; what is in `borrowed` stands in another table under
    the same name."""

    checkpoint: Checkpoint
    stored: Mapping[str, str]
    borrowed: Mapping[str, WeightTable] = field(default_factory=dict)
    quantization: Quantization | None = None
    packed: PackingSource = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "packed", PackingSource(self.checkpoint, self.quantization))

    def has(self, name: str) -> bool:
        return name in self.stored or name in self.borrowed

    def source(self, name: str) -> tuple[Checkpoint, str]:
        return (
            self.borrowed[name].source(name)
            if name in self.borrowed
            else (self.checkpoint, self.stored[name])
        )

    def value(self, builder: GraphBuilder, name: str) -> ir.Value:
        """The weight as a graph value in its stored dtype, placed in the builder's plan."""
        checkpoint, stored = self.source(name)
        return builder.weight(
            builder.plan.place(name, checkpoint, checkpoint.tensors[stored]), name
        )

    def packing(self, linear: str) -> Packing | None:
        """The weight of a Linear as the graph is to hold it; None where it is not quantized. Reads
        it."""
        name = f"{linear}.weight"
        if name in self.borrowed:
            return self.borrowed[name].packing(linear)
        return self.packed.packing(self.stored[name].removesuffix(".weight"))

    def part(self, builder: GraphBuilder, linear: str, packing: Packing, part: Part) -> ir.Value:
        """One tensor of a quantized weight as a graph value, placed in the builder's plan."""
        name = f"{linear}.{part}"
        source = (
            self.borrowed[f"{linear}.weight"].packed
            if f"{linear}.weight" in self.borrowed
            else self.packed
        )
        return builder.weight(builder.plan.place(name, source, packing.info(part)), name)
