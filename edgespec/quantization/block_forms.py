"""Forms of 4, 6 and 8 bits in blocks whose scales are bytes with a factor per super-block.

Knows sizes. `super_blocks` and `gptq` round to them, `bit_budget` chooses among them.
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
        return self.bits_of(self.block * self.super_block)

    def bits_of(self, columns: int) -> float:
        """The same in rows of so many weights, whose last block and super-block are whole."""
        blocks = -(-columns // self.block)
        factors = -(-blocks // self.super_block)
        kinds = 2 if self.has_minimums else 1
        return (blocks * (self.bits * self.block + 8 * kinds) + 16 * kinds * factors) / columns


# Blocks of one size: products that read the same rows round them alike. 6 bits in blocks of 16, as
# Q6_K has them, err by 0.021 of the root mean square instead of 0.026, and cost 0.25 bits more
FOUR_BITS = BlockForm(SCHEMES["q4_k"], 4, 32, 8, has_minimums=True)  # 4.625 bits a weight
SIX_BITS = BlockForm(SCHEMES["q6_k"], 6, 32, 8, has_minimums=False)  # 6.3125
EIGHT_BITS = BlockForm(SCHEMES["q8_0"], 8, 32, 8, has_minimums=False)  # 8.3125
FORMS = {form.bits: form for form in (FOUR_BITS, SIX_BITS, EIGHT_BITS)}
