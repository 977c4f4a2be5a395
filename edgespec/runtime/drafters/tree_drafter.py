"""Drafts level by level: dynamic trees (arXiv 2406.16858), and chains as their narrowest form, from
an engine that goes on with its own hidden states (arXiv 2503.01840).

Knows the draft's engine, its vocabulary map and its pairs of (aux hidden state, next token). The
draft's cache holds only rows made from the base's own hidden states; the rows of a tree are dropped
when the tree is done. The trees of several sequences grow level by level together, one call a
level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LaneRows
from edgespec.backends.engine_config import EngineConfig
from edgespec.runtime.decoder import CachedDecoder, Rows
from edgespec.runtime.draft_sampling import Distribution
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
    """A tree in the making. The beam's states and what it sees are those of its parents. `drawn`
    is what each draft of a chain was drawn from, where they are drawn."""

    request: DraftRequest
    pool: TreePool
    steps: int
    beam: list[int]  # pool entries
    hidden: Floats  # [K, Hd]
    ancestors: NDArray[np.bool_]  # [K, scratch]
    drawn: list[Distribution] = field(default_factory=list)


class TreeDrafter(EngineDrafter[CachedDecoder, LaneState]):
    """`d2t` [Vd] are offsets: base id = draft id + d2t[draft id]."""

    def __init__(self, decoder: CachedDecoder, d2t: Ids) -> None:
        super().__init__(decoder, LaneState)
        self.d2t = d2t
        self.base_ids = self.to_base(np.arange(len(d2t)))

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
            self.grow([growth for growth in growing if growth and growth.steps > level], level)
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
        pool, drawn = TreePool(), list[Distribution]()
        tokens, log_probs = self.candidates(request, pool, drawn, state.last_logits[None])
        beam = pool.add_children(-1, tokens[0], log_probs[0])
        hidden = np.repeat(state.last_hidden[None], len(beam), 0)
        return Growth(request, pool, steps, beam, hidden, np.zeros((len(beam), 0), bool), drawn)

    def candidates(
        self, request: DraftRequest, pool: TreePool, drawn: list[Distribution], logits: Floats
    ) -> tuple[Ids, Floats]:
        """The base's ids with which the drafts go on after each row of logits [R, Vd], and their
        log-probabilities, [R, K] each: the best ones, or for a chain that is drawn the one drawn,
        whose distribution joins `drawn`."""
        if request.sampler is None or request.plan.top_k != 1:
            ids, log_probs = top_log_probs(logits, request.plan.top_k)
            return self.to_base(ids), log_probs
        token, distribution = request.sampler.draw(logits[0], pool.tokens, self.base_ids)
        drawn.append(distribution)
        log_prob = np.log(distribution.prob(token))
        return np.array([[token]], np.int64), np.array([[log_prob]], np.float32)

    def grow(self, growing: Sequence[Growth], level: int) -> None:
        """Run the beams one level on: their children join the pools, the best of them are the next
        beams."""
        parts = [self.beam_rows(growth, level) for growth in growing]
        for growth, part, result in zip(growing, parts, self.decoder.run(parts), strict=True):
            assert result.hidden_states is not None
            request, pool = growth.request, growth.pool
            if not np.isfinite(result.logits).all():
                growth.steps, self.lanes[request.lane].full = 0, True
                continue
            tokens, log_probs = self.candidates(request, pool, growth.drawn, result.logits)
            children: list[int] = []
            row_of: dict[int, int] = {}
            for row, parent in enumerate(growth.beam):
                born = pool.add_children(parent, tokens[row], log_probs[row])
                row_of |= dict.fromkeys(born, row)
                children += born
            growth.beam = pool.best(children, request.plan.top_k)
            parents = [row_of[i] for i in growth.beam]
            growth.hidden, growth.ancestors = result.hidden_states[parents], part.visible[parents]

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
        """The tree of the best nodes (EAGLE-2, arXiv 2406.16858); the scratch rows are dropped."""
        lane = growth.request.lane
        self.decoder.drop_scratch(lane)
        if self.lanes[lane].full:
            self.stop_drafting(lane)
        size = min(growth.request.plan.verify_size, 1 + len(growth.pool.tokens))
        tree = growth.pool.select(growth.request.pending, size)
        if not growth.drawn:
            return tree
        return replace(tree, drawn_from=[None, *growth.drawn[: len(tree) - 1]])

    def affordable_steps(self, request: DraftRequest) -> int:
        """Levels that fit into the cache: each but the first writes top_k rows."""
        return min(request.plan.steps, 1 + self.decoder.room(request.lane) // request.plan.top_k)

    def to_base(self, ids: Ids) -> Ids:
        """The base's ids of the draft's own, by the offsets of d2t."""
        return ids + self.d2t[ids]

    def snapshot(self, lane: int, count: int) -> LaneRows:
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
