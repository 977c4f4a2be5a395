"""In which order measured runs go: plain decoding and each plan in turn, so that a machine that
becomes faster or slower meanwhile is so for all alike.

Knows numbers of prompts and variants. Knows no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgespec.benchmark.cases import PLAIN_VARIANT, DecodingVariant

MOST_BESIDE_PLAIN = 4  # plans between two plain runs


@dataclass(frozen=True, slots=True)
class Turn:
    """One measured run. Those of the same `pair`, (repeat, group, block), are next to each other,
    and one of them is plain: the speed over plain is the quotient of two of one pair."""

    repeat: int
    group: int  # of the prompts
    block: int  # of the variants
    variant: DecodingVariant

    @property
    def pair(self) -> tuple[int, int, int]:
        """What a run and its plain one have in common."""
        return self.repeat, self.group, self.block


def turns(repeats: int, groups: int, variants: Sequence[DecodingVariant]) -> Iterator[Turn]:
    """Each repeat of each group of prompts: blocks of up to 4 variants with a plain run each,
    forward and backward by turns. `variants` are without the plain one."""
    blocks = [
        (PLAIN_VARIANT, *variants[start : start + MOST_BESIDE_PLAIN])
        for start in range(0, max(1, len(variants)), MOST_BESIDE_PLAIN)
    ]
    backward = False
    for repeat in range(repeats):
        for group in range(groups):
            for number, block in enumerate(blocks):
                for variant in reversed(block) if backward else block:
                    yield Turn(repeat, group, number, variant)
            backward = not backward
