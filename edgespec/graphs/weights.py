"""Maps the weights of a graph to stored tensors.

Knows names and shapes. A graph uses its own names; the table knows the checkpoint and the stored
name of each tensor (a draft may share the lm_head of its base). `checkpoint.detect.check_tensors`
reports tensors that no graph uses.
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
    """Own name -> stored name in `checkpoint`, or another table that has the same own name."""

    checkpoint: Checkpoint
    stored: Mapping[str, str]
    shared: Mapping[str, WeightTable] = field(default_factory=dict)  # of another model: its lm_head
    quantization: Quantization | None = None
    packed: PackingSource = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "packed", PackingSource(self.checkpoint, self.quantization))

    def has(self, name: str) -> bool:
        """Returns whether the table has a tensor with this own name."""
        return name in self.stored or name in self.shared

    def source(self, name: str) -> tuple[Checkpoint, str]:
        """Returns the checkpoint and the stored name of a tensor."""
        if name in self.shared:
            return self.shared[name].source(name)
        return self.checkpoint, self.stored[name]

    def value(self, builder: GraphBuilder, name: str) -> ir.Value:
        """Returns a weight as a graph value in its stored dtype and places it in the plan."""
        checkpoint, stored = self.source(name)
        weight = builder.plan.place(name, checkpoint, checkpoint.tensors[stored])
        return builder.weight(weight, name)

    def packing(self, linear: str) -> Packing | None:
        """Reads and returns the packed weight of a Linear; None if it is not quantized.

        Raises UnsupportedModel for a weight that the canonical graph cannot represent.
        """
        name = f"{linear}.weight"
        if name in self.shared:
            return self.shared[name].packing(linear)
        return self.packed.packing(self.stored[name].removesuffix(".weight"))

    def part(self, builder: GraphBuilder, linear: str, packing: Packing, part: Part) -> ir.Value:
        """Returns one tensor of a quantized weight as a graph value and places it in the plan."""
        name = f"{linear}.{part}"
        table = self.shared.get(f"{linear}.weight", self)
        return builder.weight(builder.plan.place(name, table.packed, packing.info(part)), name)
