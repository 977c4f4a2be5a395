"""How likely a sequence's next drafts are to be accepted, learnt from its own steps.

Knows trees, the path that was accepted and the probabilities that a draft gave its tokens. Knows no
cost and no clock: the same steps give the same estimates. Old steps count less and less.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from edgespec.runtime.trees.tree import DraftTree

PRIOR = 0.6  # of a first draft, before any was judged
PRIOR_WEIGHT = 2.0  # drafts that an estimate without samples counts for
DECAY = 0.95  # of what was seen, a sample
MAX_DEPTH = 64
# Probabilities of a draft within which its tokens are accepted alike
EDGES = (0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
BIN_WEIGHT = 4.0
RATIO_WEIGHT = 6.0
MIN_RATE, MAX_RATE = 0.001, 0.995


class AcceptanceEstimate:
    """The acceptance of drafts by their depth, and by the probability that the draft gave them,
    each where their parent was accepted."""

    def __init__(self, prior: Sequence[float] = ()) -> None:
        """`prior` is the acceptance that is expected at depths 1, 2, ... before drafts were judged;
        PRIOR where it is empty, its last rate beyond its end."""
        known = [min(max(rate, MIN_RATE), MAX_RATE) for rate in prior[:MAX_DEPTH]] or [PRIOR]
        self.prior = known + [known[-1]] * (MAX_DEPTH - len(known))
        self.hits, self.tries = [0.0] * (MAX_DEPTH + 1), [0.0] * (MAX_DEPTH + 1)
        self.bin_hits, self.bin_tries = [0.0] * (len(EDGES) + 1), [0.0] * (len(EDGES) + 1)
        self.accepted = self.expected = RATIO_WEIGHT  # over all probabilities

    def rates(self, levels: int) -> list[float]:
        """The acceptance at depths 1 to `levels`; one with few samples is taken to be as much above
        or below its prior as the depth before."""
        rates, likely = list[float](), self.prior[0]
        for depth in range(1, min(levels, MAX_DEPTH) + 1):
            weight = self.tries[depth] + PRIOR_WEIGHT
            rate = min((self.hits[depth] + PRIOR_WEIGHT * likely) / weight, MAX_RATE)
            rates.append(rate)
            likely = rate * self.prior[min(depth, MAX_DEPTH - 1)] / self.prior[depth - 1]
        return rates + rates[-1:] * (levels - len(rates))

    @property
    def has_seen(self) -> bool:
        """Whether any draft was judged."""
        return self.tries[1] > 0

    def of_prob(self, prob: float) -> float:
        """The acceptance of a token to which the draft gave this probability after its parent."""
        place = bisect_right(EDGES, prob)
        likely = prob * self.accepted / self.expected
        rate = (self.bin_hits[place] + BIN_WEIGHT * likely) / (self.bin_tries[place] + BIN_WEIGHT)
        return min(max(rate, MIN_RATE), MAX_RATE)

    def learn(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Take in what was verified, and the nodes that were accepted, the root first.

        Drafts whose parent was not accepted say nothing, nor do forced ones.
        """
        if len(tree) == 1:
            return
        parents = tree.parents.tolist()
        asked = set(parents)
        for depth, node in enumerate(path[: MAX_DEPTH - 1], start=1):
            if node in asked and node >= tree.num_forced:
                self.count(depth, hit=depth < len(path))
        if tree.probs is None:
            return
        on_path = set(path)
        for node, (parent, prob) in enumerate(zip(parents, tree.probs.tolist(), strict=True)):
            if parent in on_path and parent >= tree.num_forced:
                self.count_prob(prob, hit=node in on_path)

    def count(self, depth: int, *, hit: bool) -> None:
        """One step's drafts at a depth: whether one of them was accepted."""
        self.hits[depth] = DECAY * self.hits[depth] + hit
        self.tries[depth] = DECAY * self.tries[depth] + 1

    def count_prob(self, prob: float, *, hit: bool) -> None:
        """A draft of this probability, and whether it was accepted."""
        place = bisect_right(EDGES, prob)
        self.bin_hits[place] = DECAY * self.bin_hits[place] + hit
        self.bin_tries[place] = DECAY * self.bin_tries[place] + 1
        self.accepted = DECAY * (self.accepted - RATIO_WEIGHT) + hit + RATIO_WEIGHT
        self.expected = DECAY * (self.expected - RATIO_WEIGHT) + prob + RATIO_WEIGHT
