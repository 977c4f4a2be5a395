"""Forms of 4 and 6 bits in blocks whose scales are bytes with a factor per super-block.

Knows sizes. `super_blocks` and `gptq` round to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.quantization.schemes import SCHEMES, Scheme


@dataclass(frozen=True, slots=True)
class BlockForm:
    """How many bits a value has, how many of them share a scale, and how many blocks its factor."""

    scheme: Scheme
    bits: int
    block: int
    super_block: int
    has_minimums: bool

    @property
    def lowest(self) -> int:
        """The smallest value; the largest is `highest`."""
        return 0 if self.has_minimums else -(1 << (self.bits - 1))

    @property
    def highest(self) -> int:
        """The largest value."""
        return self.lowest + (1 << self.bits) - 1

    @property
    def bits_per_weight(self) -> float:
        """The bits of a weight with its share of scales, minimums and factors."""
        kinds = 2 if self.has_minimums else 1
        return self.bits + kinds * (8 + 16 / self.super_block) / self.block


FOUR_BITS = BlockForm(SCHEMES["q4_k"], 4, 32, 8, has_minimums=True)  # 4.625 bits a weight
SIX_BITS = BlockForm(SCHEMES["q6_k"], 6, 16, 16, has_minimums=False)  # 6.5625
