"""A drafting method that test code alone brings along: a row in METHODS, a row in DRAFTERS, no
engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edgespec.methods import Method
from edgespec.runtime.drafters.base import DraftRequest, Observation, Snapshot
from edgespec.runtime.drafters.row import DrafterRow
from edgespec.runtime.plans.plan import TreeLimits
from edgespec.runtime.trees.tree import DraftTree

NAME = "repeat"


@dataclass
class Repeating:
    """Drafts what followed the pending token when it last occurred."""

    needs_hidden_states = False
    capacity: int | None = None
    num_lanes: int | None = None
    engine_s = 0.0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    num_proposed: int = 0
    closed: bool = False

    def begin(self, lane: int, tokens: Sequence[int], num_reused: int) -> None:
        self.tokens[lane] = [*tokens]

    def observe(self, observations: Sequence[Observation]) -> None:
        for item in observations:
            assert item.hidden_states is None
            self.tokens[item.lane] += item.tokens.tolist()

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [self.proposed(request) for request in requests]

    def proposed(self, request: DraftRequest) -> DraftTree:
        *before, pending = self.tokens[request.lane]
        assert pending == request.pending
        count = min(request.plan.steps, request.plan.verify_size - 1)
        if pending not in before or not count:
            return DraftTree.root_only(pending)
        last = len(before) - 1 - before[::-1].index(pending)
        draft = [*before, pending][last + 1 : last + 1 + count]
        self.num_proposed += len(draft)
        tokens = np.array([pending, *draft], np.int64)
        return DraftTree(tokens, np.arange(-1, len(draft)))

    def reset(self, lane: int) -> None:
        self.tokens.pop(lane, None)

    def move(self, source: int, target: int) -> None:
        self.tokens[target] = self.tokens.pop(source)

    def snapshot(self, lane: int, count: int) -> Snapshot | None:
        return None

    def restore(self, lane: int, snapshot: Snapshot) -> None:
        raise AssertionError("it gave none")

    def close(self) -> None:
        self.closed = True


METHOD = Method(
    name=NAME,
    title="repetition",
    draft_title="repetition",
    aliases=("echo",),
    weights_in="nowhere",
    needs_engine=False,
)
ROW = DrafterRow(
    open=lambda sources: Repeating(num_lanes=sources.num_lanes),
    limits=lambda base, draft: TreeLimits(base.limits.verify_tree_size),
    words=" of what was said before",
)
