"""Keeps the KV rows of prompts' heads, so that the next prompt with the same head need not compute
them again.

Knows tokens, rows and a memory budget. Knows no engine: rows are what somebody took and somebody
puts back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LaneRows


@dataclass(frozen=True, slots=True)
class Prefix:
    """`base` rows hold as many positions as there are tokens. A row of `draft` pairs a position
    with the token after it, so there is at least one fewer of them; none where the request did not
    draft. Where the base keeps a state, the prefix is of use whole or not at all, and `feature`
    [k*H] is the last position's, for the pair that lacks.
    """

    tokens: NDArray[np.int64]
    base: LaneRows
    draft: LaneRows | None
    feature: NDArray[np.float32] | None = None

    @property
    def size_bytes(self) -> int:
        return self.base.nbytes + (0 if self.draft is None else self.draft.nbytes)

    def reusable(self, prompt: NDArray[np.int64], *, drafting: bool) -> int:
        """Positions that a prompt need not compute; its last token always is, for its logits."""
        common = common_length(self.tokens, prompt)
        if not self.base.can_crop:
            drafts = (
                self.draft is not None
                and self.feature is not None
                and len(self.draft) == len(self.tokens) - 1
            )
            return (
                common
                if len(self.tokens) == common < len(prompt) and (drafts or not drafting)
                else 0
            )
        if drafting:
            common = 0 if self.draft is None else min(common - 1, len(self.draft))
        return max(0, min(common, len(prompt) - 1))


@dataclass
class PrefixCache:
    """The most recently used prefixes that fit into `budget_bytes`; 0 keeps none."""

    budget_bytes: int
    entries: list[Prefix] = field(default_factory=list)  # the least recently used first

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)

    def clear(self) -> None:
        self.entries = []

    def find(self, prompt: Sequence[int], *, drafting: bool) -> tuple[Prefix, int] | None:
        """The entry with the longest reusable head of `prompt`, and that length."""
        tokens = np.asarray(prompt, np.int64)
        lengths = [entry.reusable(tokens, drafting=drafting) for entry in self.entries]
        if not any(lengths):
            return None
        best = int(np.argmax(lengths))
        entry = self.entries.pop(best)
        self.entries.append(entry)
        return entry, lengths[best]

    def holds(self, tokens: Sequence[int], *, drafting: bool) -> bool:
        """Whether all of `tokens` is there already."""
        wanted = np.asarray(tokens, np.int64)
        return any(
            serves(entry, wanted) and (entry.draft is not None or not drafting)
            for entry in self.entries
        )

    def keep(self, new: Prefix) -> None:
        """Add a prefix; what it covers goes, and the least recently used go until it fits."""
        if new.size_bytes > self.budget_bytes:
            return
        self.entries = [old for old in self.entries if not covers(new, old)]
        while self.size_bytes + new.size_bytes > self.budget_bytes:
            self.entries.pop(0)
        self.entries.append(new)


def covers(new: Prefix, old: Prefix) -> bool:
    return serves(new, old.tokens) and (new.draft is not None or old.draft is None)


def serves(entry: Prefix, tokens: NDArray[np.int64]) -> bool:
    """Whether all of `tokens` can be taken from an entry; a state is of use whole or not at all."""
    whole = entry.base.can_crop or len(entry.tokens) == len(tokens)
    return whole and common_length(entry.tokens, tokens) == len(tokens)


def common_length(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Tokens that two sequences have in common at their heads."""
    count = min(len(one), len(other))
    differing = np.flatnonzero(one[:count] != other[:count])
    return int(differing[0]) if len(differing) else count
