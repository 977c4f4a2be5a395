"""DFlash's search: a block of drafts in one pass (arXiv 2602.06036), as a chain or as a DDTree
(arXiv 2604.12989).

Knows the draft's engine, its vocabulary map and the base's hidden states that the engine has not
read yet. The slots of a block are drafted side by side and do not know of each other, so all nodes
of a depth share their candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgespec import bundle
from edgespec.backends.base import LaneRows, PlanHints
from edgespec.backends.engine_config import BUILD_AGAIN, EngineConfig
from edgespec.component_files import d2t_offsets, required_arrays
from edgespec.contract import MAX_BLOCK_NODES
from edgespec.errors import LimitError, OptionError
from edgespec.methods.dflash import NAME, THINKING, DFlashSpec
from edgespec.rope import RopeTable
from edgespec.runtime.block import NO_TOKENS, BlockDecoder, BlockRows, MaskSpec
from edgespec.runtime.draft_sampling import Distribution, DraftSampler
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.candidates import best_first, top_log_probs
from edgespec.runtime.drafters.decoding import (
    LAYERS_SCHEMA,
    DecodingConfig,
    DecodingType,
    Sizes,
    read_layers,
)
from edgespec.runtime.drafters.engine_drafter import EngineDrafter
from edgespec.runtime.drafters.options import option
from edgespec.runtime.drafters.row import DrafterRow, DrafterSources
from edgespec.runtime.plans import GUIDE_VERIFY_SIZE, exceeds_base, no_static_trees
from edgespec.runtime.static_tree import StaticPlan
from edgespec.runtime.tree import BlockPlan, DraftPlan, DraftTree, full_tree_size

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
# rows of context a call: bounds the mask and the activations of a long prompt
CONTEXT_CHUNK = 256
MAX_BLOCK_TOP_K = 8


@dataclass
class LaneState:
    """The hidden states that the next call is to read."""

    pending: list[Floats] = field(default_factory=list)  # each [m, k*H]
    # the cache could not take all of them, or they held NaN or Inf: no drafts from there on
    full: bool = False

    @property
    def count(self) -> int:
        """Positions that are pending."""
        return sum(map(len, self.pending))


class DFlashDrafter(EngineDrafter[BlockDecoder, LaneState]):
    """`d2t` [Vd] are offsets: base id = draft id + d2t[draft id]; None where draft and base share
    the vocabulary.

    `max_block` bounds a block, and the context that lanes of one call may differ by.
    """

    def __init__(
        self, decoder: BlockDecoder, mask_token: int, max_block: int, d2t: Ids | None = None
    ) -> None:
        super().__init__(decoder, LaneState)
        self.mask_token, self.max_block, self.d2t = mask_token, max_block, d2t

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the new hidden states; the engine reads them with the next block, or by themselves
        where they are many."""
        for item in observations:
            assert item.hidden_states is not None
            state, count = self.lanes[item.lane], len(item.hidden_states)
            fits = state.count + count <= self.decoder.room(item.lane)
            # NaN or Inf must not get into the cache: it would corrupt the lane's next sequence too
            state.full = state.full or not fits or not np.isfinite(item.hidden_states).all()
            if state.full:
                state.pending = []
                continue
            state.pending.append(item.hidden_states.copy())
            if state.count >= CONTEXT_CHUNK:
                self.flush(item.lane)

    def flush(self, lane: int) -> None:
        """Let the engine read what is pending, without a block."""
        state = self.lanes[lane]
        if not state.count:
            return
        context = np.concatenate(state.pending)
        for start in range(0, len(context), CONTEXT_CHUNK):
            self.decoder.run([BlockRows(lane, context[start : start + CONTEXT_CHUNK], NO_TOKENS)])
        state.pending = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """One call for all requests: the new context of each, and behind it the pending token and
        its masks."""
        trees = {request.lane: DraftTree.root_only(request.pending) for request in requests}
        able = [request for request in requests if self.block_size(request) > 1]
        if len(able) > 1:
            for request in able:
                # the other lanes would run as many padding rows
                if self.lanes[request.lane].count > self.max_block:
                    self.flush(request.lane)
        parts = [self.block(request) for request in able]
        for request, logits in zip(able, self.decoder.run(parts) if parts else [], strict=True):
            state = self.lanes[request.lane]
            state.pending, state.full = [], not np.isfinite(logits).all()
            if state.full:
                self.decoder.zero(request.lane)
            else:
                trees[request.lane] = self.tree(request, logits)
        return [trees[request.lane] for request in requests]

    def block_size(self, request: DraftRequest) -> int:
        """Slots of a lane's block, the pending token's included; 1 is no draft."""
        state, plan = self.lanes[request.lane], request.plan
        if state.full:
            return 1
        room = self.decoder.room(request.lane) - state.count
        return max(1, min(self.max_block, plan.steps + 1, plan.verify_size, room))

    def block(self, request: DraftRequest) -> BlockRows:
        """A lane's part of a call: the pending token, then mask tokens to the end of the block."""
        tokens = np.full(self.block_size(request), self.mask_token, np.int64)
        tokens[0] = request.pending
        return BlockRows(request.lane, self.context(request.lane), tokens)

    def context(self, lane: int) -> Floats:
        """[L, k*H], what is pending."""
        none = np.zeros((0, self.decoder.runner.contract.shape.base_features), np.float32)
        return np.concatenate([none, *self.lanes[lane].pending])

    def tree(self, request: DraftRequest, logits: Floats) -> DraftTree:
        """The draft tree from logits [S-1, Vd]: the chain of each slot's best token, or with a
        top-k above 1 the most probable tree (DDTree, arXiv 2604.12989)."""
        if request.sampler is not None and request.plan.top_k == 1:
            return self.drawn_chain(request, request.sampler, logits)
        ids, log_probs = top_log_probs(logits, request.plan.top_k)
        tokens = ids if self.d2t is None else ids + self.d2t[ids]
        parents, chosen = best_first(log_probs, request.plan.verify_size)
        return DraftTree(
            np.concatenate([[request.pending], tokens[chosen[:, 0], chosen[:, 1]]]), parents
        )

    def drawn_chain(
        self, request: DraftRequest, sampler: DraftSampler, logits: Floats
    ) -> DraftTree:
        """A chain from logits [S-1, Vd], each slot's token drawn by itself."""
        own = None if self.d2t is None else np.arange(len(self.d2t)) + self.d2t
        tokens, drawn = list[int](), list[Distribution | None]([None])
        for row in logits[: request.plan.verify_size - 1]:
            token, distribution = sampler.draw(row, tokens, own)
            tokens.append(token)
            drawn.append(distribution)
        return DraftTree(
            np.array([request.pending, *tokens], np.int64),
            np.arange(-1, len(tokens)),
            drawn_from=drawn,
        )

    def snapshot(self, lane: int, count: int) -> LaneRows:
        """Copies of the first `count` KV rows, the pending ones computed first where needed."""
        if self.decoder.lanes[lane].length < count:
            self.flush(lane)
        return self.decoder.snapshot(lane, count)


# ---- the method's row


@dataclass(frozen=True, slots=True)
class BlockLimits:
    """What base and draft were built for, where the draft makes blocks."""

    max_verify_tree_size: int
    block_size: int
    draft_vocab_size: int

    def plan(
        self, top_k: int | None, steps: int | None, verify_size: int | None, hints: PlanHints
    ) -> BlockPlan:
        """A chain of one block, or with a top-k above 1 a tree; LimitError where it cannot be."""
        if steps not in (None, 1):
            what = f"--spec-draft-step {steps}: a DFlash draft makes its block in one step"
            raise LimitError(
                what, "Set it to 1, or leave it out; --spec-verify-size says how much is drafted."
            )
        k = 1 if top_k is None else top_k
        if verify_size is None:
            wanted = hints.block_nodes if k == 1 else GUIDE_VERIFY_SIZE
            most = min(wanted, self.max_verify_tree_size)
            verify_size = full_tree_size(max(k, 1), self.block_size - 1, most)
        plan = BlockPlan(k, max(1, min(self.block_size, verify_size) - 1), verify_size)
        self.check(plan)
        return plan

    def check(self, plan: DraftPlan) -> None:
        """Raises LimitError for a plan that base and draft cannot do."""
        if isinstance(plan, StaticPlan):
            raise no_static_trees()
        k, n, block = plan.top_k, plan.verify_size, self.block_size
        if min(k, n, plan.steps) < 1:
            raise LimitError(f"draft top-k {k} and verify size {n} must be at least 1", "Raise it.")
        if k > MAX_BLOCK_TOP_K:
            what = (
                f"--spec-draft-top-k {k}: trees of a DFlash draft have at most {MAX_BLOCK_TOP_K}"
                " children a node"
            )
            raise LimitError(
                what, f"Set it to 1 for a chain, or to 2 to {MAX_BLOCK_TOP_K} for a tree."
            )
        if k > self.draft_vocab_size:
            raise LimitError(f"--spec-draft-top-k {k} exceeds the draft's vocabulary", "Lower it.")
        if n > MAX_BLOCK_NODES:
            what = (
                f"--spec-verify-size {n}: trees of a DFlash draft have at most {MAX_BLOCK_NODES}"
                " nodes"
            )
            raise LimitError(what, f"Set it to {MAX_BLOCK_NODES} or less.")
        if n > self.max_verify_tree_size:
            raise exceeds_base(n, self.max_verify_tree_size)
        if plan.steps > block - 1:
            what = (
                f"a plan of {plan.steps} levels; the draft makes blocks of {block}, the pending"
                " token included"
            )
            raise LimitError(what, f"Draft at most {block - 1} levels.")
        if n > (most := full_tree_size(k, block - 1, n)):
            what = (
                f"--spec-verify-size {n}: with top-k {k} the draft's blocks of {block} make {most}"
                " nodes at most"
            )
            raise LimitError(
                what,
                f"Set it to {most} or less" + (", or raise --spec-draft-top-k." if k == 1 else "."),
            )


def limits(base: EngineConfig, draft: EngineConfig | None) -> BlockLimits:
    """The plans that the two engines were built for."""
    assert draft is not None
    rows = draft.component.draft_vocab_size
    assert rows is not None
    return BlockLimits(base.limits.verify_tree_size, spec_of(draft).block_size, rows)


def spec_of(draft: EngineConfig) -> DFlashSpec:
    """What config.json keeps of the block."""
    spec = draft.component.spec
    assert isinstance(spec, DFlashSpec)
    return spec


def open_drafter(sources: DrafterSources) -> DFlashDrafter:
    """The drafter of a DFlash engine, with a vocabulary map where one stands beside it."""
    draft = sources.draft
    assert draft is not None
    spec, config, d2t = spec_of(draft.config), draft.config.component, None
    vocabulary = sources.engine_dir / bundle.D2T
    if vocabulary.is_file() or bundle.D2T in required_arrays(config):
        d2t = d2t_offsets(vocabulary, config, BUILD_AGAIN)
    found = {MaskSpec(*pair) for pair in zip(spec.windows, spec.causal, strict=True)}
    # the mask for layers without a window first
    ordered = sorted(found, key=lambda mask: mask.window is not None)
    assert config.rope is not None
    rope = RopeTable.of(config.rope, draft.runner.capacity)
    decoder = BlockDecoder(draft.runner, draft.table, rope, ordered)
    return DFlashDrafter(decoder, spec.mask_token_id, spec.block_size, d2t)


def trained_with_thinking(base: EngineConfig, draft: EngineConfig | None) -> bool | None:
    """The mode of a draft: as its export says, or, without a base then, by the base that is here
    now."""
    assert draft is not None
    assert draft.component.pair is not None
    mode = draft.component.pair.enable_thinking
    return THINKING.get(base.component.model) if mode is None else mode


@dataclass(frozen=True, kw_only=True)
class DFlashDecoding(DecodingConfig):
    """The keys of its decoding type: a chain of one block, or a tree made of it."""

    dynamic_tree_max_topK: int | None = option(  # noqa: N815
        None,
        "Candidates per slot of a block; above 1 a tree of max_total_draft_tokens nodes is made of"
        " it (DDTree).",
        low=1,
        high=MAX_BLOCK_TOP_K,
    )
    target_layer_ids: tuple[int, ...] | None = option(
        None,
        "The base's layers whose output the draft reads, counted from 0; others than the draft was"
        " exported with are refused.",
        read=read_layers,
        schema=LAYERS_SCHEMA,
    )
    mask_token_id: int | None = option(
        None, "The mask token.", low=0, unused="it is the one that the draft was exported with"
    )

    @property
    def sizes(self) -> Sizes:
        """How much to draft: a block of max_draft_len drafts. Raises OptionError."""
        length, top_k, total = (
            self.draft_len,
            self.dynamic_tree_max_topK,
            self.max_total_draft_tokens,
        )
        if top_k is None or top_k == 1:
            self.check_chain()
            return Sizes(1, None, None if length is None else 1 + length)
        if length is not None:
            what = f"a tree of candidates ({top_k}) is asked for, and max_draft_len {length}"
            raise OptionError(what, "A tree is as deep as the block: give max_total_draft_tokens.")
        return Sizes(top_k, None, None if total is None else 1 + total)

    @property
    def aux_layers(self) -> tuple[int, ...] | None:
        """The layers as hidden_states indices, which count the embedding as 0."""
        layers = self.target_layer_ids
        return None if layers is None else tuple(layer + 1 for layer in layers)


ROW = DrafterRow(
    open=open_drafter,
    limits=limits,
    trained_with_thinking=trained_with_thinking,
    decoding=DecodingType(name="DFlash", keys=DFlashDecoding),
)
__all__ = ["NAME", "ROW", "BlockLimits", "DFlashDrafter"]
