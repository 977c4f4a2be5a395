"""Drafting a block of tokens in one call of the draft: what all block drafts share.

Knows the draft's engine and the base's hidden states that the engine has not read yet. How logits
become drafts is known in the file of each method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edgespec.artifacts import file_names
from edgespec.artifacts.component_files import d2t_offsets, required_arrays
from edgespec.backends.base import LaneRows, PlanHints
from edgespec.backends.call import HiddenStates, Ids
from edgespec.backends.engine_config import BUILD_AGAIN, EngineConfig
from edgespec.config.ropes import AXES
from edgespec.contract import MAX_BLOCK_NODES
from edgespec.errors import LimitError
from edgespec.methods import METHODS
from edgespec.methods.block_method import BlockSpec
from edgespec.rope import RopeTable
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.candidates import Search, best_first, side_by_side
from edgespec.runtime.drafters.engine_drafter import EngineDrafter
from edgespec.runtime.drafters.row import DrafterSources
from edgespec.runtime.lanes.block import NO_TOKENS, BlockDecoder, BlockOutput, BlockRows, MaskSpec
from edgespec.runtime.plans.draft_budget import Budgeted
from edgespec.runtime.plans.plan import GUIDE_VERIFY_SIZE, exceeds_base, no_static_trees
from edgespec.runtime.text.prompt_value import on_all_axes
from edgespec.runtime.trees.static_tree import StaticPlan
from edgespec.runtime.trees.tree import BlockPlan, DraftPlan, DraftTree, full_tree_size

MAX_BLOCK_TOP_K = 8
NO_POSITIONS: Ids = np.empty((0, AXES), np.int64)


@dataclass
class BlockDraftLane:
    """The hidden states that the next call is to read, if only those of no rows."""

    pending: list[HiddenStates] = field(default_factory=list)  # each k*H wide
    # of a prompt with images and what follows it, [rows, 3] each; else None
    rope_positions: list[Ids] | None = None
    # the cache could not take all of them, or they held NaN or Inf: no drafts from there on
    full: bool = False

    @property
    def count(self) -> int:
        """Positions that are pending."""
        return sum(map(len, self.pending))


class BlockDrafter(EngineDrafter[BlockDecoder, BlockDraftLane], ABC):
    """`max_block` bounds a block, and the context that lanes of one call may differ by."""

    def __init__(self, decoder: BlockDecoder, mask_token: int, max_block: int) -> None:
        super().__init__(decoder, BlockDraftLane)
        self.mask_token, self.max_block = mask_token, max_block

    @abstractmethod
    def drafted(self, request: DraftRequest, output: BlockOutput) -> DraftTree:
        """The drafts of a lane, from what the engine says of its block."""

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the new hidden states; the engine reads them with the next block, or by themselves
        where they are many."""
        for item in observations:
            assert item.hidden_states is not None
            state, count = self.lanes[item.lane], len(item.hidden_states)
            fits = state.count + count <= self.decoder.room(item.lane)
            # NaN or Inf must not get into the cache: it would corrupt the lane's next sequence too
            state.full = state.full or not fits or not item.hidden_states.finite()
            if state.full:
                state.pending = []
                continue
            self.keep_positions(item)
            state.pending.append(item.hidden_states.take(np.arange(count)))
            if state.count >= self.decoder.prefill_chunk:
                self.flush(item.lane)

    def keep_positions(self, item: Observation) -> None:
        """Note where the new rows stand, once a prompt has images: text goes on behind them."""
        state, new = self.lanes[item.lane], item.rope_positions
        if new is None and state.rope_positions is not None:
            lane, before = self.decoder.lanes[item.lane], self.rope_positions(item.lane)
            first = lane.length + state.count + lane.offset_behind(before)
            new = on_all_axes(first + np.arange(len(item.tokens)))
        if new is not None:
            state.rope_positions = [*(state.rope_positions or []), new]

    def rope_positions(self, lane: int) -> Ids | None:
        """[rows, 3] of what is pending; None where no prompt had images."""
        positions = self.lanes[lane].rope_positions
        return None if positions is None else np.concatenate([*positions, NO_POSITIONS])

    def read(self, lane: int) -> None:
        """What was pending is in the engine's cache."""
        state = self.lanes[lane]
        state.pending = [state.pending[0].take(NO_TOKENS)]
        if state.rope_positions is not None:
            state.rope_positions = []

    def flush(self, lane: int) -> None:
        """Let the engine read what is pending, without a block."""
        state = self.lanes[lane]
        if not state.count:
            return
        context, rows, size = self.context(lane), np.arange(state.count), self.decoder.prefill_chunk
        positions = self.rope_positions(lane)
        for start in range(0, len(rows), size):
            chunk = context.take(rows[start : start + size])
            own = None if positions is None else positions[start : start + size]
            self.decoder.run([BlockRows(lane, chunk, NO_TOKENS, own)])
        self.read(lane)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """One call for all requests: the new context of each, and behind it the pending token and
        its masks."""
        trees = {request.lane: DraftTree.root_only(request.pending) for request in requests}
        able = [request for request in requests if self.num_drafts(request)]
        if len(able) > 1:
            for request in able:
                # the other lanes would run as many padding rows
                if self.lanes[request.lane].count > self.max_block:
                    self.flush(request.lane)
        parts = [self.block(request) for request in able]
        outputs = self.decoder.run(parts) if parts else []
        for request, output in zip(able, outputs, strict=True):
            state = self.lanes[request.lane]
            self.read(request.lane)
            state.full = not output.logits.finite()
            if state.full:
                self.decoder.zero(request.lane)
            else:
                trees[request.lane] = self.drafted(request, output)
        return [trees[request.lane] for request in requests]

    def num_drafts(self, request: DraftRequest) -> int:
        """Slots of a lane's block that are to draft; 0 is no draft."""
        state, plan, first = self.lanes[request.lane], request.plan, self.decoder.first_slot
        if state.full:
            return 0
        room = self.decoder.room(request.lane) - state.count
        return max(0, min(min(self.max_block, room) - first, plan.steps, plan.verify_size - 1))

    def block(self, request: DraftRequest) -> BlockRows:
        """A lane's part of a call: the pending token, then mask tokens to the end of the block."""
        slots = self.num_drafts(request) + self.decoder.first_slot
        tokens = np.full(slots, self.mask_token, np.int64)
        tokens[0] = request.pending
        lane = request.lane
        return BlockRows(lane, self.context(lane), tokens, self.rope_positions(lane))

    def context(self, lane: int) -> HiddenStates:
        """What is pending; of no rows where all was read."""
        first, *others = self.lanes[lane].pending
        return first.joined(others) if others else first

    def snapshot(self, lane: int, count: int) -> LaneRows:
        """Copies of the first `count` KV rows, the pending ones computed first where needed."""
        if self.decoder.lanes[lane].length < count:
            self.flush(lane)
        return self.decoder.snapshot(lane, count)


class BlockTreeDrafter(BlockDrafter, Budgeted):
    """Of each slot the best tokens, whatever the other slots have: a chain, or a tree whose nodes
    of a depth share their candidates, as `search` chooses them.

    `d2t` [Vd] are offsets: base id = draft id + d2t[draft id]; None where draft and base share the
    vocabulary.
    """

    def __init__(
        self,
        decoder: BlockDecoder,
        mask_token: int,
        max_block: int,
        d2t: Ids | None = None,
        search: Search = best_first,
    ) -> None:
        super().__init__(decoder, mask_token, max_block)
        self.d2t, self.search = d2t, search

    def drafted(self, request: DraftRequest, output: BlockOutput) -> DraftTree:
        """The tree of a block's logits."""
        return side_by_side(request, output.logits, self.d2t, self.search)


# ---- what a method's row is made of


@dataclass(frozen=True, slots=True)
class BlockLimits:
    """What base and draft were built for, where the draft makes blocks. `draft_title` is the
    method's, for messages; `max_top_k` 1: chains alone."""

    max_verify_tree_size: int
    block_size: int
    draft_vocab_size: int
    draft_title: str = "a block draft"
    first_slot: int = 1
    max_top_k: int = MAX_BLOCK_TOP_K

    @property
    def levels(self) -> int:
        """Tokens that a whole block drafts."""
        return self.block_size - self.first_slot

    @property
    def max_levels(self) -> int:
        """Those of a whole block."""
        return self.levels

    def plan(
        self, top_k: int | None, steps: int | None, verify_size: int | None, hints: PlanHints
    ) -> BlockPlan:
        """A chain of one block, or with a top-k above 1 a tree; LimitError where it cannot be."""
        if steps not in (None, 1):
            message = f"`spec_draft_step` {steps}: {self.draft_title} makes its block in one step"
            raise LimitError(
                message,
                "Set it to 1, or leave it out; `spec_verify_size` says how much is drafted.",
            )
        k = 1 if top_k is None else top_k
        if verify_size is None:
            wanted = hints.block_nodes if k == 1 else GUIDE_VERIFY_SIZE
            most = min(wanted, self.max_verify_tree_size)
            verify_size = full_tree_size(max(k, 1), self.levels, most)
        levels = max(1, min(self.levels, verify_size - 1))
        plan = BlockPlan(k, levels, verify_size, self.first_slot)
        self.check(plan)
        return plan

    def check(self, plan: DraftPlan) -> None:
        """Raises LimitError for a plan that base and draft cannot do."""
        if isinstance(plan, StaticPlan):
            raise no_static_trees()
        k, n = plan.top_k, plan.verify_size
        if min(k, n, plan.steps) < 1:
            raise LimitError(f"draft top-k {k} and verify size {n} must be at least 1", "Raise it.")
        self.check_top_k(k)
        if n > MAX_BLOCK_NODES:
            message = (
                f"`spec_verify_size` {n}: trees of {self.draft_title} have at most"
                f" {MAX_BLOCK_NODES} nodes"
            )
            raise LimitError(message, f"Set `spec_verify_size` to {MAX_BLOCK_NODES} or less.")
        if n > self.max_verify_tree_size:
            raise exceeds_base(n, self.max_verify_tree_size)
        if plan.steps > self.levels:
            message = (
                f"a plan of {plan.steps} levels; the draft makes blocks of {self.block_size}, the"
                " pending token included"
            )
            raise LimitError(message, f"Draft at most {self.levels} levels.")
        if n > (most := full_tree_size(k, self.levels, n)):
            message = (
                f"`spec_verify_size` {n}: with top-k {k} the draft's blocks of {self.block_size}"
                f" make {most} nodes at most"
            )
            higher = ", or raise `spec_draft_top_k`" if k == 1 < self.max_top_k else ""
            raise LimitError(message, f"Set `spec_verify_size` to {most} or less{higher}.")

    def check_top_k(self, k: int) -> None:
        """Raises LimitError for candidates that the draft does not make."""
        if k > 1 == self.max_top_k:
            message = (
                f"`spec_draft_top_k` {k}: {self.draft_title} makes chains, each of whose slots"
                " follows from the token before it"
            )
            raise LimitError(message, "Set it to 1, or leave it out.")
        if k > self.max_top_k:
            message = (
                f"`spec_draft_top_k` {k}: trees of {self.draft_title} have at most"
                f" {self.max_top_k} children a node"
            )
            raise LimitError(
                message, f"Set it to 1 for a chain, or to 2 to {self.max_top_k} for a tree."
            )
        if k > self.draft_vocab_size:
            raise LimitError(f"`spec_draft_top_k` {k} exceeds the draft's vocabulary", "Lower it.")


def limits(base: EngineConfig, draft: EngineConfig | None) -> BlockLimits:
    """The plans that the two engines were built for."""
    assert draft is not None
    component, spec = draft.component, spec_of(draft)
    assert component.draft_vocab_size is not None
    assert component.method is not None
    return BlockLimits(
        base.limits.verify_tree_size,
        spec.block_size,
        component.draft_vocab_size,
        METHODS[component.method].draft_title,
        spec.first_slot,
    )


def spec_of(draft: EngineConfig) -> BlockSpec:
    """What config.json keeps of the block."""
    spec = draft.component.spec
    assert isinstance(spec, BlockSpec)
    return spec


def vocabulary_map(sources: DrafterSources) -> Ids | None:
    """The offsets beside the draft's engine; None where it shares the base's vocabulary. Raises
    BundleError where the file is damaged."""
    assert sources.draft is not None
    config, path = sources.draft.config.component, sources.engine_dir / file_names.D2T
    if path.is_file() or file_names.D2T in required_arrays(config):
        return d2t_offsets(path, config, BUILD_AGAIN)
    return None


def open_tree_drafter(sources: DrafterSources, search: Search = best_first) -> BlockTreeDrafter:
    """The drafter of a draft's engine, with a vocabulary map where one stands beside it."""
    assert sources.draft is not None
    spec, decoder, d2t = (
        spec_of(sources.draft.config),
        open_decoder(sources),
        vocabulary_map(sources),
    )
    return BlockTreeDrafter(decoder, spec.mask_token_id, spec.block_size, d2t, search)


def open_decoder(sources: DrafterSources) -> BlockDecoder:
    """The draft's engine with its memory."""
    draft = sources.draft
    assert draft is not None
    spec = spec_of(draft.config)
    masks = {MaskSpec(*pair) for pair in zip(spec.windows, spec.causal, strict=True)}
    # the mask for layers without a window first
    ordered = sorted(masks, key=lambda mask: mask.window is not None)
    assert draft.config.component.rope is not None
    rope = RopeTable.of(draft.config.component.rope, draft.runner.capacity)
    return BlockDecoder(draft.runner, draft.table, rope, ordered, spec.first_slot)


def trained_with_thinking(base: EngineConfig, draft: EngineConfig | None) -> bool | None:
    """The mode of a draft: as its export says, or, without a base then, by the base that is here
    now."""
    assert draft is not None
    component = draft.component
    assert component.pair is not None
    assert component.method is not None
    mode = component.pair.enable_thinking
    return METHODS[component.method].thinking.get(base.component.model) if mode is None else mode
