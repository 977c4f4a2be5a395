"""A drafter of your own with all methods of Drafter, behind a guard.

Knows lanes and the form of trees. A call that fails costs the drafts of its lanes: of one step
where it was to propose, else until the next sequence begins there, as what the drafter knows of a
lane is then not what was committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from edgespec.backends.host import HostStates
from edgespec.runtime.drafters.attributes import flag, limit
from edgespec.runtime.drafters.base import Drafter, DraftRequest, Observation, Snapshot
from edgespec.runtime.drafters.guard import BOOKKEEPING, INVALID, PAUSED, DraftFailed, Guard
from edgespec.runtime.sampling.draft_sampler import Distribution
from edgespec.runtime.trees.tree import DraftTree

T = TypeVar("T")
MAX_SECONDS = 1e9  # that an engine may say it took
EPSILON = 1e-3  # how far probabilities may be from adding up to 1


@dataclass(frozen=True, slots=True)
class GuardedSnapshot:
    """A snapshot of which `count` pairs are to be used; it is cut in the guarded call."""

    whole: Snapshot
    count: int
    nbytes: int

    def __len__(self) -> int:
        return self.count

    def prefix(self, count: int) -> GuardedSnapshot:
        """The same of the first `count` pairs."""
        return replace(self, count=count)


class GuardedDrafter:
    """A Drafter whose calls are guarded. Raises OptionError for one that says nothing useful of
    itself."""

    def __init__(self, drafter: Drafter, guard: Guard, vocab_size: int) -> None:
        self.drafter, self.guard, self.vocab_size = drafter, guard, vocab_size
        self.needs_hidden_states = flag(drafter, "needs_hidden_states")
        self.capacity = limit(drafter, "capacity")
        self.num_lanes = limit(drafter, "num_lanes")
        self.lost_lanes: set[int] = set()

    @property
    def engine_s(self) -> float:
        """Seconds spent inside engines so far, as the drafter says it."""
        try:
            seconds = self.drafter.engine_s
        except Exception:  # what it says of its time decides nothing
            return 0.0
        is_time = isinstance(seconds, int | float) and 0 <= seconds < MAX_SECONDS
        return float(seconds) if is_time else 0.0

    # ---- what it is given

    def begin(self, lane: int, tokens: Sequence[int], num_reused: int) -> None:
        """A sequence begins in a lane."""
        given = [*tokens]
        self.notify([lane], lambda: self.drafter.begin(lane, given, num_reused))

    def observe(self, observations: Sequence[Observation]) -> None:
        """What was committed in lanes that are not lost."""
        kept = [copied(item) for item in observations if item.lane not in self.lost_lanes]
        if kept:
            self.notify([item.lane for item in kept], lambda: self.drafter.observe(kept))

    def reset(self, lane: int) -> None:
        """Forget a lane's sequence: what was lost of it is of no matter any more."""
        self.lost_lanes.discard(lane)
        self.notify([lane], lambda: self.drafter.reset(lane))

    def move(self, source: int, target: int) -> None:
        """A sequence goes on in another lane, lost or not."""
        if source in self.lost_lanes:
            self.lost_lanes.discard(source)
            self.notify([target], lambda: self.drafter.reset(target))
            self.lost_lanes.add(target)
        else:
            self.lost_lanes.discard(target)
            self.notify([target], lambda: self.drafter.move(source, target))

    def notify(self, lanes: Sequence[int], function: Callable[[], object]) -> None:
        """Run a call that proposes nothing; where it fails the lanes are lost."""
        try:
            self.guard.call(function, share=BOOKKEEPING)
        except DraftFailed as lost:
            self.guard.failed(lost)
            self.lost_lanes.update(lanes)

    # ---- what it proposes

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """One tree per request; the root alone where the lane is lost or the call failed."""
        trees = {r.lane: DraftTree.root_only(r.pending) for r in requests}
        asked = [r for r in requests if r.lane not in self.lost_lanes]
        trees |= {
            r.lane: DraftTree.root_only(r.pending, PAUSED)
            for r in requests
            if r.lane in self.lost_lanes
        }
        try:
            self.guard.check_ready()
            drafted = self.guard.call(lambda: self.checked(asked)) if asked else []
        except DraftFailed as lost:
            why = self.guard.failed(lost)
            drafted = [DraftTree.root_only(r.pending, why) for r in asked]
        else:
            self.guard.succeeded()
        trees |= {r.lane: tree for r, tree in zip(asked, drafted, strict=True)}
        return [trees[r.lane] for r in requests]

    def checked(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """The drafter's trees. Raises DraftFailed for what is none."""
        proposed = self.drafter.propose(requests)
        if not isinstance(proposed, list | tuple) or len(proposed) != len(requests):
            raise DraftFailed(
                INVALID, f"propose gave {proposed!r:.80} for {len(requests)} requests"
            )
        return [
            checked_tree(tree, request, self.vocab_size)
            for tree, request in zip(proposed, requests, strict=True)
        ]

    # ---- prefixes

    def snapshot(self, lane: int, count: int) -> GuardedSnapshot | None:
        """What it remembers of a lane's prefix; None where the lane is lost or the call failed."""
        if lane in self.lost_lanes:
            return None
        try:
            return self.guard.call(lambda: self.taken(lane, count), share=BOOKKEEPING)
        except DraftFailed as lost:
            self.guard.failed(lost)
            return None

    def taken(self, lane: int, count: int) -> GuardedSnapshot | None:
        """The drafter's snapshot. Raises DraftFailed for what is none."""
        whole = self.drafter.snapshot(lane, count)
        if whole is None:
            return None
        length, size = len(whole), whole.nbytes
        if not 0 <= length <= count or not isinstance(size, int) or size < 0:
            raise DraftFailed(
                INVALID, f"a snapshot of {length} pairs in {size!r} bytes, of {count} pairs"
            )
        return GuardedSnapshot(whole, length, size)

    def restore(self, lane: int, snapshot: Snapshot) -> None:
        """Begin a lane with what `snapshot` gave."""
        assert isinstance(snapshot, GuardedSnapshot)
        self.lost_lanes.discard(lane)
        self.notify(
            [lane], lambda: self.drafter.restore(lane, snapshot.whole.prefix(snapshot.count))
        )

    def close(self) -> None:
        """Close the drafter, and end its thread."""
        try:
            self.guard.call(lambda: self.drafter.close(), share=BOOKKEEPING)
        except DraftFailed as lost:
            self.guard.failed(lost)
        self.guard.close()


def copied(item: Observation) -> Observation:
    """An observation on the host whose arrays nothing overwrites: a drafter's thread may read it
    late."""
    states = item.hidden_states
    hidden = None if states is None else HostStates(states.numpy().copy())
    return replace(item, hidden_states=hidden, tokens=item.tokens.copy())


def checked_tree(tree: object, request: DraftRequest, vocab_size: int) -> DraftTree:
    """A tree that the loop can verify. Raises DraftFailed for anything else."""
    if not isinstance(tree, DraftTree):
        raise DraftFailed(INVALID, f"a tree is of type {type(tree).__name__}")
    tokens, parents = ids_of("tokens", tree.tokens), ids_of("parents", tree.parents)
    if not len(tokens) or len(tokens) != len(parents):
        raise DraftFailed(INVALID, f"a tree of {len(tokens)} tokens and {len(parents)} parents")
    if tokens[0] != request.pending or parents[0] != -1:
        raise DraftFailed(INVALID, "a tree whose root is not the pending token")
    if len(tokens) > request.plan.verify_size:
        message = f"a tree of {len(tokens)} nodes, for a plan of {request.plan.verify_size}"
        raise DraftFailed(INVALID, message)
    if (tokens < 0).any() or (tokens >= vocab_size).any():
        raise DraftFailed(INVALID, f"a token id that is not from 0 to {vocab_size - 1}")
    if (parents[1:] < 0).any() or (parents[1:] >= np.arange(1, len(parents))).any():
        raise DraftFailed(INVALID, "a parent that does not come before its child")
    if len(set(zip(parents.tolist(), tokens.tolist(), strict=True))) < len(tokens):
        raise DraftFailed(INVALID, "two tokens with one parent are the same")
    whole = DraftTree(tokens, parents, tree.probs, tree.drawn_from)
    if int(whole.depths.max()) > request.plan.steps:
        raise DraftFailed(
            INVALID, f"a tree deeper than the {request.plan.steps} levels of the plan"
        )
    check_probs(whole)
    check_drawn_from(whole)
    return whole


def ids_of(name: str, value: object) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A copy of an array of ids [N]. Raises DraftFailed for anything else."""
    if not isinstance(value, np.ndarray) or value.ndim != 1:
        raise DraftFailed(INVALID, f"{name} of a tree is no array in one dimension")
    if not np.issubdtype(value.dtype, np.integer):
        raise DraftFailed(INVALID, f"{name} of a tree is an array of {value.dtype}")
    return value.astype(np.int64)


def check_probs(tree: DraftTree) -> None:
    """Raises DraftFailed for probabilities that are none."""
    if tree.probs is None:
        return
    probs = np.asarray(tree.probs)
    if probs.shape != (len(tree),) or not np.issubdtype(probs.dtype, np.floating):
        raise DraftFailed(INVALID, f"probs of shape {probs.shape} for {len(tree)} nodes")
    if not ((probs >= 0) & (probs <= 1)).all():
        raise DraftFailed(INVALID, "a probability outside 0 to 1")


def check_drawn_from(tree: DraftTree) -> None:
    """Raises DraftFailed for distributions that are none, or that their token cannot come from."""
    if tree.drawn_from is None:
        return
    if not isinstance(tree.drawn_from, Sequence) or len(tree.drawn_from) != len(tree):
        raise DraftFailed(
            INVALID, f"drawn_from does not have one entry for each of {len(tree)} nodes"
        )
    for token, distribution in zip(tree.tokens.tolist(), tree.drawn_from, strict=True):
        if distribution is None:
            continue
        if not isinstance(distribution, Distribution):
            raise DraftFailed(INVALID, f"drawn_from holds a {type(distribution).__name__}")
        probs = distribution.probs
        fits = len(distribution.ids) == len(probs) and (np.diff(distribution.ids) > 0).all()
        sums = np.isfinite(probs).all() and (probs >= 0).all() and abs(probs.sum() - 1) < EPSILON
        if not fits or not sums or not distribution.prob(token) > 0:
            raise DraftFailed(INVALID, f"token {token} cannot come from what it was drawn from")
