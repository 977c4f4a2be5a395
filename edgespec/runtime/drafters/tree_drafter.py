"""Drafts level by level: dynamic trees (arXiv 2406.16858), and chains as their narrowest form, from
an engine that goes on with its own hidden states (arXiv 2503.01840).

Knows the draft's engine, its vocabulary map and its pairs of (aux hidden state, next token). The
draft's cache holds only rows made from the base's own hidden states; the rows of a tree are dropped
when the tree is done. The trees of several sequences grow level by level together, one call a
level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LaneRows
from edgespec.backends.engine_config import EngineConfig
from edgespec.runtime.decoder import CachedDecoder, LaneResult, Rows
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.candidates import top_log_probs
from edgespec.runtime.drafters.engine_drafter import EngineDrafter
from edgespec.runtime.drafters.row import DraftEngine
from edgespec.runtime.tree import DraftTree, TreePool

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass
class LaneState:
    """Where a sequence's drafts begin."""

    last_logits: Floats | None = None  # [Vd], at the last observed position
    last_hidden: Floats | None = None  # [Hd]
    # the cache could not take all pairs, or they held NaN or Inf: no drafts from there on
    full: bool = False


@dataclass
class Growth:
    """A tree in the making. The beam's states and what it sees are those of its parents."""

    request: DraftRequest
    pool: TreePool
    steps: int
    beam: list[int]  # pool entries
    hidden: Floats  # [K, Hd]
    ancestors: NDArray[np.bool_]  # [K, scratch]


class TreeDrafter(EngineDrafter[CachedDecoder, LaneState]):
    """`d2t` [Vd] are offsets: base id = draft id + d2t[draft id]."""

    def __init__(
        self, decoder: CachedDecoder, d2t: Ids, empty: Callable[[], LaneState] = LaneState
    ) -> None:
        super().__init__(decoder, empty)
        self.d2t = d2t

    def observe(self, observations: Sequence[Observation]) -> None:
        """Extend the cache by the base's hidden states, each paired with its next token."""
        taken = [item for item in observations if self.can_take(item)]
        if not taken:
            return
        parts = [
            self.decoder.causal(
                item.lane, item.tokens, np.array([len(item.tokens) - 1]), item.hidden_states
            )
            for item in taken
        ]
        for item, result in zip(taken, self.decoder.extend(parts), strict=True):
            assert result.hidden_states is not None
            state = self.lanes[item.lane]
            state.last_logits = result.logits[0].copy()
            state.last_hidden = result.hidden_states[-1].copy()
            if not np.isfinite(state.last_logits).all():
                self.stop_drafting(item.lane)

    def can_take(self, item: Observation) -> bool:
        """Whether a lane goes on with an observation; one that cannot drafts no more."""
        assert item.hidden_states is not None
        state = self.lanes[item.lane]
        state.full = state.full or len(item.tokens) > self.decoder.room(item.lane)
        state.full = state.full or not np.isfinite(item.hidden_states).all()
        return not state.full

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Grow K candidates a level, keep the K best of K*K as the next level, verify the best of
        all."""
        growing = [self.first_level(request) for request in requests]
        most = max((growth.steps for growth in growing if growth), default=0)
        for level in range(1, most):
            if deeper := [growth for growth in growing if growth and growth.steps > level]:
                self.grow(deeper, level)
        return [
            self.finish(growth) if growth else DraftTree.root_only(request.pending)
            for growth, request in zip(growing, requests, strict=True)
        ]

    def first_level(self, request: DraftRequest) -> Growth | None:
        """The first level: the best continuations of the last observed position. None where
        nothing can be drafted."""
        state, plan = self.lanes[request.lane], request.plan
        steps = self.affordable_steps(request)
        if state.full or steps == 0 or plan.verify_size == 1:
            return None
        assert state.last_logits is not None
        assert state.last_hidden is not None
        pool = TreePool()
        ids, log_probs = top_log_probs(state.last_logits[None], plan.top_k)
        beam = pool.add_children(-1, self.to_base(ids[0]), log_probs[0])
        hidden = np.repeat(state.last_hidden[None], len(beam), 0)
        return Growth(request, pool, steps, beam, hidden, np.zeros((len(beam), 0), bool))

    def grow(self, growing: Sequence[Growth], level: int) -> None:
        """Run the beams one level on: their children join the pools, the best of them are the next
        beams."""
        parts = [self.beam_rows(growth, level) for growth in growing]
        for growth, part, result in zip(growing, parts, self.decoder.run(parts), strict=True):
            logits, states = self.said(result)
            pool, top_k = growth.pool, growth.request.plan.top_k
            if not np.isfinite(logits).all():
                growth.steps, self.lanes[growth.request.lane].full = 0, True
                continue
            ids, log_probs = top_log_probs(logits, top_k)
            children: list[int] = []
            row_of: dict[int, int] = {}
            for row, parent in enumerate(growth.beam):
                born = pool.add_children(parent, self.to_base(ids[row]), log_probs[row])
                row_of |= dict.fromkeys(born, row)
                children += born
            growth.beam = pool.best(children, top_k)
            parents = [row_of[i] for i in growth.beam]
            growth.hidden, growth.ancestors = states[parents], part.visible[parents]

    def said(self, result: LaneResult) -> tuple[Floats, Floats]:
        """The logits [R, Vd] of what may be proposed behind each row, and the states to go on
        with."""
        assert result.hidden_states is not None
        return result.logits, result.hidden_states

    def beam_rows(self, growth: Growth, level: int) -> Rows:
        """A lane's part of a call: the beam at one depth, each node seeing its ancestors."""
        lane, count = growth.request.lane, len(growth.beam)
        visible = np.concatenate([growth.ancestors, np.eye(count, dtype=bool)], 1)
        tokens = np.array([growth.pool.tokens[i] for i in growth.beam], np.int64)
        positions = np.full(count, self.decoder.lanes[lane].length + level - 1)
        return Rows(lane, tokens, positions, visible, np.arange(count), draft_hidden=growth.hidden)

    def stop_drafting(self, lane: int) -> None:
        """No drafts from here on: the rows may hold NaN or Inf."""
        self.lanes[lane].full = True
        self.decoder.zero(lane)

    def finish(self, growth: Growth) -> DraftTree:
        """The tree of the best nodes (EAGLE-2, arXiv 2406.16858)."""
        lane = growth.request.lane
        self.leave(growth)
        if self.lanes[lane].full:
            self.stop_drafting(lane)
        size = min(growth.request.plan.verify_size, 1 + len(growth.pool.tokens))
        return growth.pool.select(growth.request.pending, size)

    def leave(self, growth: Growth) -> None:
        """A tree is done: its scratch rows are dropped."""
        self.decoder.drop_scratch(growth.request.lane)

    def room(self, lane: int) -> int:
        """Rows of a tree that a lane has room for."""
        return self.decoder.room(lane)

    def affordable_steps(self, request: DraftRequest) -> int:
        """Levels that fit into the cache: each but the first writes top_k rows."""
        return min(request.plan.steps, 1 + self.room(request.lane) // request.plan.top_k)

    def to_base(self, ids: Ids) -> Ids:
        """The base's ids of the draft's own, by the offsets of d2t."""
        return ids + self.d2t[ids]

    def snapshot(self, lane: int, count: int) -> LaneRows | None:
        """Copies of the first `count` KV rows, or of as many as there are."""
        return self.decoder.snapshot(lane, min(count, self.decoder.lanes[lane].length))


# ---- for the rows of methods that draft so


def cached_decoder(draft: DraftEngine) -> CachedDecoder:
    """A draft's engine with its memory."""
    return CachedDecoder.of(draft.runner, draft.table, draft.config.component)


def draft_sizes(base: EngineConfig, draft: EngineConfig | None) -> tuple[int, int, int]:
    """Nodes that the base verifies, nodes that the draft makes, and the draft's vocabulary."""
    assert draft is not None
    nodes, rows = draft.limits.max_draft_tree_size, draft.component.draft_vocab_size
    assert nodes is not None
    assert rows is not None
    return base.limits.verify_tree_size, nodes, rows
