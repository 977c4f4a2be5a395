"""What is bound to an engine for a call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bound:
    """A tensor of a call: where it is, and its shape where that varies."""

    name: str
    address: int
    shape: tuple[int, ...] | None = None
