"""Dialled acceptance: a drafter that does all of its work, and whose drafts are then right with a
chosen probability by position.

What is right comes from plain answers that were decoded before. Whether the draft of a position is
right is drawn by (seed, request, position) alone, so that all plans and runs have the same draws.
Knows drafters and trees. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import OptionError
from edgespec.runtime.drafters.base import (
    Drafter,
    DraftRequest,
    EndObserver,
    Observation,
    PromptReader,
    Reserving,
    Snapshot,
)
from edgespec.runtime.plans.draft_budget import Budgeted, DraftBudget
from edgespec.runtime.text.prompt_value import PromptValue
from edgespec.runtime.trees.tree import BlockPlan, DraftPlan, DraftTree

SEPARATOR = ":"
FORM = "Write a probability, 0.7, or one for each position, 0.8:0.6:0.5; the last one goes on."


@dataclass(frozen=True, slots=True)
class Dial:
    """The probability that a draft is right, by its position in a draft, where all before it are;
    the last one holds for all further positions."""

    by_position: tuple[float, ...]

    @classmethod
    def read(cls, text: str) -> Dial:
        """The dial of `0.7` or `0.8:0.6:0.5`. Raises OptionError."""
        try:
            rates = tuple(float(part) for part in text.split(SEPARATOR))
        except ValueError:
            raise OptionError(f"{text!r:.60} is not an acceptance", FORM) from None
        if not all(0 <= value <= 1 for value in rates):
            raise OptionError(f"{text!r:.60} is not an acceptance: 0 to 1", FORM)
        return cls(rates)

    def at(self, depth: int) -> float:
        """Of a draft `depth` levels below the root, 1 for the first."""
        return self.by_position[min(depth, len(self.by_position)) - 1]

    def __str__(self) -> str:
        return SEPARATOR.join(f"{value:g}" for value in self.by_position)


@dataclass(frozen=True, slots=True)
class Truth:
    """What a request's plain answer is, and its draws, one a token of it, uniform in [0, 1)."""

    tokens: Sequence[int]
    draws: NDArray[np.float64]

    @classmethod
    def of(cls, tokens: Sequence[int], seed: int, request: int) -> Truth:
        """The draws of a request, by the number that it has among the prompts."""
        raw = np.random.Philox(key=np.array([seed, request], np.uint64)).random_raw(len(tokens))
        return cls(tokens, (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53)


Truths = Mapping[tuple[int, ...], Truth]  # by the cache key of the prompt


@dataclass
class Following:
    """The sequence of a lane: what it should become, and the pairs that its drafter observed."""

    truth: Truth | None
    unread: int  # pairs of the prompt that are still to be observed, but for the last one
    num_emitted: int = 0

    def observe(self, count: int) -> None:
        """So many pairs more."""
        of_prompt = min(self.unread, count)
        self.unread -= of_prompt
        self.num_emitted += count - of_prompt


@dataclass
class SyntheticDrafter(Reserving, PromptReader):
    """`real` does what it always does; then each of its drafts is replaced: on the path of the
    first children of each node by the right token as often as `dial` says, all others by wrong
    ones. Sequences whose prompt is not among `truths` keep their drafts.

    Only for the exact accept rule: what a draft was drawn from means nothing for its replacement.
    """

    real: Drafter
    dial: Dial
    truths: Truths
    vocab_size: int
    lanes: dict[int, Following] = field(default_factory=dict)

    @property
    def needs_hidden_states(self) -> bool:
        """That of the real one, as all that follows."""
        return self.real.needs_hidden_states

    @property
    def capacity(self) -> int | None:
        """Tokens of a sequence that it can follow."""
        return self.real.capacity

    @property
    def num_lanes(self) -> int | None:
        """Sequences at a time."""
        return self.real.num_lanes

    @property
    def engine_s(self) -> float:
        """Seconds inside engines."""
        return self.real.engine_s

    def begin(self, lane: int, tokens: Sequence[int], num_reused: int) -> None:
        """A sequence begins: its prompt says what is right."""
        unread = len(tokens) - num_reused - 1 if self.needs_hidden_states else 0
        self.lanes[lane] = Following(self.truths.get(PromptValue.of(tokens).cache_key), unread)
        self.real.begin(lane, tokens, num_reused)

    def reserve(self, lane: int, tokens: int) -> None:
        """Passed on to one that asks for it."""
        if isinstance(self.real, Reserving):
            self.real.reserve(lane, tokens)

    def read_prompt(self, lane: int, count: int) -> None:
        """Passed on to one that reads prompts by itself."""
        if isinstance(self.real, PromptReader):
            self.real.read_prompt(lane, count)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Passed on, and counted."""
        for item in observations:
            if item.lane in self.lanes:
                self.lanes[item.lane].observe(len(item.tokens))
        self.real.observe(observations)

    def reset(self, lane: int) -> None:
        """Forget a lane's sequence."""
        self.lanes.pop(lane, None)
        self.real.reset(lane)

    def move(self, source: int, target: int) -> None:
        """A sequence goes on in another lane."""
        if source in self.lanes:
            self.lanes[target] = self.lanes.pop(source)
        self.real.move(source, target)

    def snapshot(self, lane: int, count: int) -> Snapshot | None:
        """That of the real one."""
        return self.real.snapshot(lane, count)

    def restore(self, lane: int, snapshot: Snapshot) -> None:
        """Passed on."""
        self.real.restore(lane, snapshot)

    def close(self) -> None:
        """The real one is not its own: whoever opened it closes it."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """The real one's trees, with other tokens."""
        trees = self.real.propose(requests)
        return [self.replaced(request, tree) for request, tree in zip(requests, trees, strict=True)]

    def replaced(self, request: DraftRequest, tree: DraftTree) -> DraftTree:
        """A tree of the same shape whose drafts are right as often as the dial says."""
        following = self.lanes.get(request.lane)
        if following is None or following.truth is None or len(tree) == 1:
            return tree
        truth, position = following.truth, following.num_emitted
        tokens, parents = tree.tokens.copy(), tree.parents.tolist()
        node, depth = 0, 1
        while position < len(truth.tokens):
            children = [child for child in range(node + 1, len(tokens)) if parents[child] == node]
            if not children:
                break
            right = truth.tokens[position]
            self.make_wrong(tokens, children, right)
            if truth.draws[position] >= self.dial.at(depth):
                break
            node = children[0]
            tokens[node] = right
            position, depth = position + 1, depth + 1
        return replace(tree, tokens=tokens, probs=None, drawn_from=None)

    def make_wrong(self, tokens: NDArray[np.int64], children: list[int], right: int) -> None:
        """Let no child of a node have the right token; siblings stay different."""
        taken = {int(tokens[child]) for child in children}
        if right not in taken:
            return
        child = next(child for child in children if tokens[child] == right)
        free = ((right + step) % self.vocab_size for step in range(1, self.vocab_size))
        tokens[child] = next(token for token in free if token not in taken)


class SyntheticEndObserver(SyntheticDrafter, EndObserver):
    """The same of a drafter that observes the last step of a sequence as well."""


class SyntheticBudgeted(SyntheticDrafter, Budgeted):
    """The same of a drafter of chains that asks a budget which drafts pay. How sure it is of a
    draft is the dial itself: what the real one says of its own tokens means nothing for others."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Chains as long as their budgets let them become."""
        trees = super().propose([self.paced(request) for request in requests])
        return [self.cut(request, tree) for request, tree in zip(requests, trees, strict=True)]

    def probs(self, levels: int) -> list[float]:
        """How likely each draft of a chain is to be right."""
        return [self.dial.at(depth) for depth in range(1, levels + 1)]

    def paced(self, request: DraftRequest) -> DraftRequest:
        """A request for as many levels as pay, each asked for when the one before it is there. A
        block is drafted at once, and then cut."""
        plan, budget = request.plan, request.budget
        if budget is not None and not isinstance(plan, BlockPlan):
            levels = self.levels(plan, budget)
            plan = plan.within(levels=levels, nodes=levels + 1)
        return replace(request, plan=plan, budget=None)

    def levels(self, plan: DraftPlan, budget: DraftBudget) -> int:
        """How many levels pay, as a chain grows."""
        level = min(1, plan.steps)
        while level < plan.steps:
            (*_, reached) = budget.survival(range(-1, level - 1), self.probs(level))
            if not budget.goes_on(reached, level, min(1 + level, plan.verify_size), 1):
                break
            level += 1
        return level

    def cut(self, request: DraftRequest, tree: DraftTree) -> DraftTree:
        """The drafts of a chain that pay."""
        if request.budget is None:
            return tree
        return request.budget.cut(tree, self.probs(len(tree) - 1))


def synthetic(
    real: Drafter, dial: Dial, truths: Truths, vocab_size: int, *, chains: bool = True
) -> SyntheticDrafter:
    """A drafter whose drafts are right as often as `dial` says. Of trees, where not `chains`, it
    does not say how probable a draft is."""
    kind = SyntheticDrafter
    if isinstance(real, EndObserver):
        kind = SyntheticEndObserver
    elif isinstance(real, Budgeted) and chains:
        kind = SyntheticBudgeted
    return kind(real, dial, truths, vocab_size)
