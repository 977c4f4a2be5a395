"""One step of a sample: the tree that was drafted, how probable the draft held each node, and what
was accepted.

Knows trees as lists, and their form in a journal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from edgespec.runtime.trees.tree import DraftTree

LEAST_PROB = 1e-9


@dataclass(frozen=True)
class SampledStep:
    """`parents` [N] come before their children, the root's is -1; `probs` [N] are after the parent,
    None where the drafter gives none. `path` are the accepted nodes, the root first; `context` is
    the number of tokens before the step."""

    parents: tuple[int, ...]
    probs: tuple[float, ...] | None
    path: tuple[int, ...]
    context: int

    @classmethod
    def of(cls, tree: DraftTree, path: list[int], context: int) -> SampledStep:
        """The step of a verified tree."""
        probs = None
        if tree.probs is not None:
            probs = tuple(round(prob, 6) for prob in tree.probs.tolist())
        return cls(tuple(tree.parents.tolist()), probs, tuple(path), context)

    @cached_property
    def children(self) -> list[list[int]]:
        """Of each node, the best rank first."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(node)
        return children

    @cached_property
    def scores(self) -> list[float]:
        """Of each node the sum of log-probabilities on its way; without probabilities minus its
        depth."""
        scores: list[float] = []
        for node, parent in enumerate(self.parents):
            own = -1.0 if self.probs is None else math.log(max(self.probs[node], LEAST_PROB))
            scores.append(0.0 if parent < 0 else scores[parent] + own)
        return scores

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the accepted nodes, without the root."""
        pairs = zip(self.path, self.path[1:], strict=False)
        return tuple(self.children[parent].index(node) for parent, node in pairs)

    def to_list(self) -> list[Any]:
        """As a journal has it."""
        probs = None if self.probs is None else [*self.probs]
        return [[*self.parents], probs, [*self.path], self.context]

    @classmethod
    def of_list(cls, raw: list[Any]) -> SampledStep:
        """The step of `to_list`."""
        parents, probs, path, context = raw
        return cls(tuple(parents), None if probs is None else tuple(probs), tuple(path), context)
