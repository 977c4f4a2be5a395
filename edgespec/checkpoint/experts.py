"""Experts that stand in one tensor, as the matrices of which it is made.

Hugging Face's files have experts matrix by matrix (`experts.3.up_proj.weight`) or all of a layer in
two tensors: `experts.gate_up_proj` [experts, gate and up, in] and `experts.down_proj` [experts,
out, in]. Both are read as the first, so that a checkpoint has one identity in either form. Knows
names and shapes. Knows no files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_FUSED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix [out, in] of a tensor, and which of its elements it is."""

    name: str
    shape: tuple[int, int]
    index: int
    count: int  # of the tensor's matrices, which are of one size


def matrices(name: str, shape: tuple[int, ...]) -> Iterator[Matrix]:
    """The matrices of a tensor of fused experts, in the order of their bytes; none for another
    tensor."""
    match = _FUSED.fullmatch(name)
    parts = _PARTS[match[2]] if match else ()
    if match is None or len(shape) != 3 or 0 in shape or shape[1] % len(parts):
        return
    experts, rows, width = shape
    for e in range(experts):
        for p, part in enumerate(parts):
            one = f"{match[1]}.{e}.{part}.weight"
            size = rows // len(parts), width
            yield Matrix(one, size, e * len(parts) + p, experts * len(parts))
