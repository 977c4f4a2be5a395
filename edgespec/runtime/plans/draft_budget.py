"""Which drafts of a step pay: each by how likely it is to be accepted, beside what it costs.

Knows probabilities, the costs of a step and the rate at which the sequence gets tokens. A drafter
asks it level by level (see `Budgeted`); it knows no drafter. A draft pays where it brings more
tokens than its time brings otherwise (renewal-reward: the ratio of tokens to time is largest where
no part of a step brings less than the ratio).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edgespec.runtime.costs.cost_model import StepCosts
from edgespec.runtime.plans.acceptance_estimate import AcceptanceEstimate
from edgespec.runtime.trees.tree import DraftTree, TreePool

LOOK_AHEAD = 4  # levels that are looked at together: one alone may not pay where two do


class Budgeted:
    """A Drafter that asks a request's budget which drafts pay, and says how probable it holds each
    (`DraftTree.probs`)."""


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """For one request of one step. `rate` is in tokens a second; at most `levels` are drafted."""

    estimate: AcceptanceEstimate
    costs: StepCosts
    rate: float
    levels: int
    rates: list[float] = field(init=False)  # the acceptance by depth

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", self.estimate.rates(self.levels))

    def survival(self, parents: Sequence[int], probs: Sequence[float]) -> list[float]:
        """How likely each node is to be accepted, from the probability that the draft gave it after
        its parent; parents come first, -1 is the root."""
        survival: list[float] = []
        self.extend(survival, parents, probs)
        return survival

    def extend(self, survival: list[float], parents: Sequence[int], probs: Sequence[float]) -> None:
        """Append the `survival` of further nodes, whose probabilities `probs` are."""
        of_prob = self.estimate.of_prob
        for parent, prob in zip(parents[len(survival) :], probs, strict=True):
            above = 1.0 if parent < 0 else survival[parent]
            survival.append(above * of_prob(prob))

    def goes_on(self, reached: float, level: int, nodes: int, width: int) -> bool:
        """Whether drafting further levels behind `level` pays: the drafts there are accepted with
        the probability `reached`, all in all; so many nodes are verified up to them, the root
        included, and a level adds `width`."""
        propose, passes, rates, tokens = self.costs.propose, self.costs.passes, self.rates, 0.0
        most = len(passes) - 1
        spent = propose[level] + passes[min(nodes, most)]
        for depth in range(level + 1, min(self.levels, level + LOOK_AHEAD) + 1):
            reached *= rates[depth - 1]
            tokens += reached
            nodes += width
            if tokens > self.rate * (propose[depth] + passes[min(nodes, most)] - spent):
                return True
        return False

    def num_nodes(self, survival: Sequence[float]) -> int:
        """How many nodes to verify, the root included, of those that survive with these
        probabilities, in the order in which they are taken."""
        passes, value, best, kept = self.costs.passes, 0.0, 0.0, 1
        for nodes, chance in enumerate(survival[: len(passes) - 2], start=2):
            value += chance
            gain = value - self.rate * (passes[nodes] - passes[1])
            if gain > best:
                best, kept = gain, nodes
        return kept

    def select(
        self, pool: TreePool, pending: int, size: int, survival: list[float] | None = None
    ) -> DraftTree:
        """The tree of the root and of those of a pool's `size` - 1 best entries that pay, with
        their probabilities. `survival` is that of the first entries, where it is known."""
        survival = [] if survival is None else survival
        self.extend(survival, pool.parents, pool.probs(len(survival)))
        best = pool.best([*range(len(survival))], size - 1, survival)
        kept = sorted(best[: self.num_nodes([survival[entry] for entry in best]) - 1])
        own = np.array([1.0, *(pool.prob(entry) for entry in kept)], np.float32)
        tree = pool.tree(pending, kept)
        return DraftTree(tree.tokens, tree.parents, own, levels=pool.depths[-1])

    def cut(self, tree: DraftTree, probs: Sequence[float]) -> DraftTree:
        """The first nodes of a tree, as many as pay, with their probabilities: those of its nodes
        but the root, each after its parent."""
        parents = [parent - 1 for parent in tree.parents[1:].tolist()]
        size = self.num_nodes(self.survival(parents, probs))
        own = np.array([1.0, *probs[: size - 1]], np.float32)
        levels = tree.drafted_levels
        return DraftTree(tree.tokens[:size], tree.parents[:size], own, levels=levels)
