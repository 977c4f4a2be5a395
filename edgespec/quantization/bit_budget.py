"""Spends a budget of bits a weight: which weights of a model get 4, 6 or 8 bits, so that its
outputs change least.

Knows sizes, and what was measured of each group of weights. Knows no arrays and no graph;
`backends.ort.sensitivity` measures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from edgespec.quantization.block_forms import FORMS, FOUR_BITS

LARGEST_SIZE = 8.0
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights that get the same bits, as a kernel reads them together.

    `loss` is the divergence of the model's outputs where these alone are rounded to 4 bits, in nats
    a token; `errors` is the squared error of their own outputs by bits, relative to that of 4.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]  # [out, in] of each
    loss: float
    errors: Mapping[int, float]

    @property
    def num_weights(self) -> int:
        """The weights of all of them."""
        return sum(rows * columns for rows, columns in self.shapes)

    def size(self, bits: int) -> float:
        """The bits that they take together."""
        form = FORMS[bits]
        return sum(rows * columns * form.bits_of(columns) for rows, columns in self.shapes)

    def loss_at(self, bits: int) -> float:
        """The divergence that is to be expected: it goes with the squared error."""
        return self.loss * self.errors[bits]

    def to_dict(self) -> dict[str, Any]:
        """The group as JSON."""
        return asdict(self)

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> WeightGroup:
        """The group that `to_dict` wrote."""
        shapes = tuple((rows, columns) for rows, columns in keys["shapes"])
        errors = {int(bits): error for bits, error in keys["errors"].items()}
        return cls(tuple(keys["names"]), shapes, keys["loss"], errors)


@dataclass(frozen=True, slots=True)
class BitsByWeight:
    """The bits of each weight by its name, and on average with scales and minimums."""

    bits: Mapping[str, int]
    size: float

    @property
    def text(self) -> str:
        """Which weights got more than 4 bits, in one line: "lm_head 6, o and v 6 in 9 of 30
        layers"."""
        layers: dict[tuple[str, int], set[str]] = {}
        every: dict[str, set[str]] = {}
        for name, bits in self.bits.items():
            layer, kind = placed(name)
            layers.setdefault((kind, bits), set()).add(layer)
            every.setdefault(kind, set()).add(layer)
        alike: dict[tuple[int, int, int], list[str]] = {}
        for (kind, bits), some in sorted(layers.items()):
            if bits > FOUR_BITS.bits:
                alike.setdefault((bits, len(some), len(every[kind])), []).append(kind)
        parts = []
        for (bits, some_layers, all_layers), kinds in sorted(alike.items(), key=lambda one: one[1]):
            names = " and ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))
            where = "" if all_layers == 1 else f" in {some_layers} of {all_layers} layers"
            parts.append(f"{names} {bits}{where}")
        parts.append("all else 4" if parts else "all 4")
        return f"{self.size:.2f} bits a weight: {', '.join(parts)}"


def placed(name: str) -> tuple[str, str]:
    """The number of a weight's layer, empty for none, and its kind: "lm_head", "v"."""
    layer = _LAYER.search(name)
    parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdigit()]
    kind = "experts" if "experts" in parts else parts[-1].removesuffix("_proj")
    return (layer[1] if layer else "", kind)


def spend(groups: Sequence[WeightGroup], size: float) -> dict[str, int]:
    """Raises groups from 4 bits while `size` bits a weight allow it: always the one that takes most
    of the divergence away for each bit that it costs, and none whose error would not shrink."""
    total = sum(group.num_weights for group in groups)
    chosen = [FOUR_BITS.bits] * len(groups)
    room = size * total - sum(group.size(FOUR_BITS.bits) for group in groups)
    while True:
        best, raised = 0.0, None
        for number, group in enumerate(groups):
            now = chosen[number]
            for bits in (bits for bits in FORMS if bits > now):
                cost = group.size(bits) - group.size(now)
                gain = (group.loss_at(now) - group.loss_at(bits)) / cost
                if cost <= room and gain > best:
                    best, raised = gain, (number, bits, cost)
        if raised is None:
            break
        number, bits, cost = raised
        chosen[number] = bits
        room -= cost
    pairs = zip(groups, chosen, strict=True)
    return {name: bits for group, bits in pairs for name in group.names}
