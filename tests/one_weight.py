"""One quantized weight as the table of weights that a graph is built from."""

from __future__ import annotations

from edgespec.graphs.packing import Packing, PackingSource, without_numbers
from edgespec.graphs.weights import WeightTable
from edgespec.quantization.quantized_weight import QuantizedWeight

NAME = "model.layers.0.mlp.up_proj"


class OneWeight(PackingSource):
    """A source that has one weight at hand."""

    def __init__(self, stored: QuantizedWeight) -> None:
        self.last = (NAME, Packing(stored))
        self.known = {NAME: Packing(without_numbers(stored))}


def table_of(stored: QuantizedWeight) -> WeightTable:
    table = WeightTable(None, {f"{NAME}.weight": f"{NAME}.weight"})  # type: ignore[arg-type]
    source = OneWeight(stored)
    source.quantization = object()  # type: ignore[assignment]
    object.__setattr__(table, "packed", source)
    return table
