"""A draft model's drafts (arXiv 2211.17192): chains and dynamic trees (arXiv 2406.16858).

Knows the tokens of each sequence and which of them the draft has read. It reads what is missing,
the pending token last, in the call that makes the first level; of a tree it keeps the rows of what
was accepted. The search is `tree_drafter`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LaneRows
from edgespec.backends.call import Logits, Result
from edgespec.backends.engine_config import EngineConfig
from edgespec.methods.draft_model import NAME, DraftModelSpec
from edgespec.runtime.drafters.base import DraftRequest, Observation, PromptReader, Snapshot
from edgespec.runtime.drafters.row import DrafterRow, DrafterSources
from edgespec.runtime.drafters.tree_drafter import (
    Growth,
    TreeDrafter,
    TreeLane,
    cached_decoder,
    draft_sizes,
)
from edgespec.runtime.lanes.decoder import CachedDecoder, DecoderRows
from edgespec.runtime.plans.plan import TreeLimits
from edgespec.runtime.trees.tree import DraftTree

# missing tokens that a lane reads beside others in one call, which run as many padding rows
MAX_TOGETHER = 16


@dataclass
class ModelLane(TreeLane):
    """`tokens` are the prompt's and all that were drawn, the pending one last. `fed` are the pool
    entries of a tree's scratch rows while it grows. When it is done `rows` has each of them by the
    row of its parent (-1: the pending token) and its token."""

    tokens: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)


class DraftModelDrafter(TreeDrafter, PromptReader):
    """Proposes the first `num_shared` ids, those that the base has a row for as well.

    `vocab_size` are the rows of the draft's embedding. Sequences beyond `max_position` tokens, the
    most that the draft was made for, get no drafts.
    """

    needs_hidden_states = False

    def __init__(
        self,
        decoder: CachedDecoder,
        *,
        vocab_size: int,
        num_shared: int,
        max_position: int,
        max_together: int = MAX_TOGETHER,
    ) -> None:
        super().__init__(decoder, np.zeros(num_shared, np.int64), ModelLane)
        self.vocab_size, self.num_shared = vocab_size, num_shared
        self.max_position, self.max_together = max_position, max_together

    @property
    def capacity(self) -> int:
        """Tokens of a sequence that it can follow: those of its KV cache, and of its positions."""
        return min(self.decoder.capacity, self.max_position)

    def state(self, lane: int) -> ModelLane:
        """The state of a lane."""
        state = self.lanes[lane]
        assert isinstance(state, ModelLane)
        return state

    def missing(self, lane: int) -> list[int]:
        """The tokens of a sequence that are not in the cache yet."""
        return self.state(lane).tokens[self.decoder.lanes[lane].length :]

    # ---- what is committed

    def begin(self, lane: int, tokens: Sequence[int], num_reused: int) -> None:
        """Take the prompt, of which the cache may have a part."""
        self.append(lane, tokens)

    def read_prompt(self, lane: int, count: int) -> None:
        """Read the prompt's first `count` tokens, as far as they are not in the cache; a few are
        left to the first draft."""
        tokens = self.state(lane).tokens[self.decoder.lanes[lane].length : count]
        if len(tokens) > self.max_together and not self.state(lane).full:
            self.decoder.read(lane, np.array(tokens, np.int64))

    def append(self, lane: int, tokens: Sequence[int]) -> None:
        """More tokens of a sequence. It is followed no further than they can be read."""
        state = self.state(lane)
        state.tokens += tokens
        unknown = any(token >= self.vocab_size for token in tokens)
        state.full = state.full or unknown or len(state.tokens) > self.capacity

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the rows of accepted drafts. What is missing is read by the next call, or here where
        it is much: of a sequence that was not drafted for a while."""
        for item in observations:
            tokens = item.tokens.tolist()
            self.keep_accepted(item.lane, tokens)
            self.append(item.lane, tokens)
            self.catch_up(item.lane)

    def keep_accepted(self, lane: int, tokens: Sequence[int]) -> None:
        """Commit the scratch rows that hold `tokens`, as far as the tree's path goes. The last one
        is pending: it is read anew for its logits, even where it was a candidate."""
        state, path, parent = self.state(lane), list[int](), -1
        for token in tokens[:-1]:
            if (parent, token) not in state.rows:
                break
            parent = state.rows.index((parent, token))
            path.append(parent)
        if path:
            self.decoder.commit(lane, np.array(path, np.int64))
        self.forget_tree(lane)

    def forget_tree(self, lane: int) -> None:
        """Drop the scratch rows of a lane."""
        self.decoder.drop_scratch(lane)
        self.state(lane).fed, self.state(lane).rows = [], []

    def catch_up(self, lane: int) -> None:
        """Read all missing tokens but the last, where they are many."""
        missing = self.missing(lane)
        if len(missing) > self.max_together and not self.state(lane).full:
            self.decoder.read(lane, np.array(missing[:-1], np.int64))

    # ---- drafting

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Read what is missing in one call for all, whose last rows give the first level; then grow
        the trees."""
        for request in requests:
            self.forget_tree(request.lane)
        self.read_missing([request.lane for request in requests if self.can_draft(request)])
        return super().propose(requests)

    def can_draft(self, request: DraftRequest) -> bool:
        """Whether a tree is asked for, and the lane can still be followed."""
        if self.lanes[request.lane].full or request.plan.verify_size == 1:
            return False
        return request.plan.steps > 0

    def read_missing(self, lanes: Sequence[int]) -> None:
        """Commit all tokens of these lanes, the pending ones included. The logits behind them are
        views: the first levels are made of them before the next call."""
        if not lanes:
            return
        for lane in lanes:
            self.catch_up(lane)
        missing = [np.array(self.missing(lane), np.int64) for lane in lanes]
        parts = [
            self.decoder.causal(lane, tokens, np.array([len(tokens) - 1]))
            for lane, tokens in zip(lanes, missing, strict=True)
        ]
        for lane, result in zip(lanes, self.decoder.extend(parts), strict=True):
            state = self.lanes[lane]
            state.last_logits, _ = self.said(result)
            if not state.last_logits.finite():
                self.stop_drafting(lane)

    def grow(self, growing: Sequence[Growth], level: int) -> None:
        """The next level. Recurrent layers know no scratch rows: they run the whole tree anew."""
        if self.decoder.recurrent:
            for lane in range(self.num_lanes):
                self.decoder.drop_scratch(lane)
        super().grow(growing, level)

    def forced_rows(self, request: DraftRequest) -> DecoderRows:
        """The first entries of a tree, which its rows go on from."""
        self.state(request.lane).fed += range(len(request.forced))
        return super().forced_rows(request)

    def beam_rows(self, growth: Growth, level: int) -> DecoderRows:
        """A lane's part of a call: the beam, or for recurrent layers the tree up to it."""
        state, pool = self.state(growth.request.lane), growth.pool
        state.fed += growth.beam
        if not self.decoder.recurrent:
            return super().beam_rows(growth, level)
        nodes = state.fed
        visible = np.eye(len(nodes), dtype=bool)
        for row, entry in enumerate(nodes):
            if pool.parents[entry] >= 0:
                visible[row] |= visible[nodes.index(pool.parents[entry])]
        lane, beam = growth.request.lane, len(growth.beam)
        depths = np.array([pool.depths[entry] for entry in nodes])
        positions = self.decoder.lanes[lane].length + depths - 1
        tokens = np.array([pool.tokens[entry] for entry in nodes], np.int64)
        return DecoderRows(
            lane, tokens, positions, visible, np.arange(len(nodes) - beam, len(nodes))
        )

    def leave(self, growth: Growth) -> None:
        """A tree is done: what it drafted stays until it is known which of it was accepted."""
        lane, pool = growth.request.lane, growth.pool
        if self.decoder.recurrent:
            return self.forget_tree(lane)
        state = self.state(lane)
        place = {entry: row for row, entry in enumerate(state.fed)} | {-1: -1}
        state.rows = [(place[pool.parents[i]], pool.tokens[i]) for i in state.fed]

    def stop_drafting(self, lane: int) -> None:
        """No drafts from here on: the rows may hold NaN or Inf."""
        super().stop_drafting(lane)
        self.forget_tree(lane)

    def said(self, result: Result) -> tuple[Logits, None]:
        """The logits [R, num_shared] of ids that the base has a row for, and no states: the next
        rows read tokens alone."""
        return result.logits.first_ids(self.num_shared), None

    def room(self, lane: int) -> int:
        """Rows of a tree that a lane has room for, in its cache and in the draft's positions."""
        return self.capacity - self.decoder.lanes[lane].end

    # ---- lanes

    def move(self, source: int, target: int) -> None:
        """The KV rows and the state of `source` go to `target`; a tree that was not observed is
        dropped."""
        self.forget_tree(source)
        super().move(source, target)

    def snapshot(self, lane: int, count: int) -> Snapshot | None:
        """Copies of the first `count` KV rows, or of as many as there are. Of recurrent layers all
        that the lane holds; None where that is more than was asked for."""
        if not self.decoder.recurrent:
            return super().snapshot(lane, count)
        length = self.decoder.lanes[lane].length
        if not 0 < length <= count + 1:  # a row needs no token after it
            return None
        return WholeState(self.decoder.snapshot(lane, length))

    def restore(self, lane: int, snapshot: Snapshot) -> None:
        """Begin a lane with what `snapshot` gave."""
        if not isinstance(snapshot, WholeState):
            return super().restore(lane, snapshot)
        self.reset(lane)
        if snapshot.rows is not None:
            self.decoder.restore(lane, snapshot.rows)

    def pack(self, snapshot: Snapshot) -> dict[str, NDArray[Any]]:
        """The arrays of KV rows, and of the state where layers are recurrent."""
        if not isinstance(snapshot, WholeState):
            return super().pack(snapshot)
        return {} if snapshot.rows is None else super().pack(snapshot.rows)

    def unpack(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Snapshot:
        """What `snapshot` gave, of its arrays."""
        if not self.decoder.recurrent:
            return super().unpack(arrays, count)
        rows = cast(LaneRows, super().unpack(arrays, count)) if arrays else None
        return WholeState(rows)


@dataclass(frozen=True, slots=True)
class WholeState:
    """What a lane with recurrent layers holds. It has no shorter prefix: of fewer tokens nothing is
    left, and the draft reads them again."""

    rows: LaneRows | None = None

    def __len__(self) -> int:
        return 0 if self.rows is None else len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes that keeping it costs."""
        return 0 if self.rows is None else self.rows.nbytes

    def prefix(self, count: int) -> WholeState:
        """Itself, or nothing where `count` is less."""
        return self if count >= len(self) else WholeState()


# ---- the method's row


def open_drafter(sources: DrafterSources) -> DraftModelDrafter:
    """The drafter of a draft model's engine, for the ids that base and draft share."""
    draft = sources.draft
    assert draft is not None
    component, nodes = draft.config.component, draft.config.limits.max_draft_tree_size
    assert isinstance(component.spec, DraftModelSpec)
    assert nodes is not None
    return DraftModelDrafter(
        cached_decoder(draft),
        vocab_size=component.vocab_size,
        num_shared=min(component.vocab_size, sources.base.component.vocab_size),
        max_position=component.spec.max_position,
        max_together=min(MAX_TOGETHER, nodes + 1),  # a batched engine has room for so many
    )


def limits(base: EngineConfig, draft: EngineConfig | None) -> TreeLimits:
    """The plans that the two engines were built for."""
    return TreeLimits(*draft_sizes(base, draft), static_trees=True)


ROW = DrafterRow(
    open=open_drafter,
    limits=limits,
    words=" with the draft model",
)
__all__ = ["NAME", "ROW", "DraftModelDrafter"]
