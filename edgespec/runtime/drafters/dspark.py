"""DSpark's search (arXiv 2607.05147): a block in one pass, walked from left to right by the Markov
head, and cut where the confidence head expects the next token to be turned down.

Drafts are chains: each slot follows from the token before it (deepseek-ai/DeepSpec,
eval/dspark/draft_ops.py). They are the best tokens at every temperature, but for accept rules that
compare them with what they were drawn from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from edgespec.artifacts import file_names
from edgespec.artifacts.component_files import head_arrays
from edgespec.backends.base import DEFAULT_ROW_COST
from edgespec.backends.call import Floats
from edgespec.backends.engine_config import BUILD_AGAIN, EngineConfig
from edgespec.methods.dspark import NAME, DSparkSpec
from edgespec.methods.dspark_heads import DSparkHeads
from edgespec.runtime.drafters import block_drafter
from edgespec.runtime.drafters.base import DraftRequest, Tunable
from edgespec.runtime.drafters.block_drafter import (
    BlockDrafter,
    BlockLimits,
    open_decoder,
    spec_of,
    trained_with_thinking,
    vocabulary_map,
)
from edgespec.runtime.drafters.options import DrafterOptions, option
from edgespec.runtime.drafters.row import DrafterRow, DrafterSources
from edgespec.runtime.lanes.block import BlockDecoder, BlockOutput
from edgespec.runtime.sampling.draft_sampler import Distribution
from edgespec.runtime.trees.tree import DraftTree

__all__ = ["NAME", "ROW", "DSparkDrafter", "DSparkOptions"]

LengthRule = Callable[[float], bool]  # whether a block goes on with a slot of this confidence


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkOptions(DrafterOptions):
    """DSpark's options."""

    confidence_threshold: float | None = option(
        None,
        "A block ends before the first slot that is less confident; 0 verifies whole blocks."
        " Default: where a further token costs more than it brings.",
        low=0,
        high=1,
    )


class DSparkDrafter(BlockDrafter, Tunable):
    """`heads` are those of the draft. A block ends before the first slot whose confidence is below
    `threshold`; None: where a further row, which costs `row_cost` passes, does not pay."""

    def __init__(
        self,
        decoder: BlockDecoder,
        mask_token: int,
        max_block: int,
        heads: DSparkHeads,
        threshold: float | None = None,
        row_cost: float = DEFAULT_ROW_COST,
    ) -> None:
        super().__init__(decoder, mask_token, max_block)
        self.heads, self.threshold, self.row_cost = heads, threshold, row_cost

    def tune(self, options: DrafterOptions) -> None:
        """Take the threshold of other options."""
        assert isinstance(options, DSparkOptions)
        self.threshold = options.confidence_threshold

    def drafted(self, request: DraftRequest, output: BlockOutput) -> DraftTree:
        """The chain of a block, as long as the confidences say: whether a slot drafts is decided
        before its token is known."""
        states = None if output.states is None else output.states.numpy()
        block = request.pending, output.logits.rows(), states, self.length_rule()
        if request.sampler is None:
            walk = self.heads.walk(*block)
            return DraftTree.chain(request.pending, self.heads.base_ids[walk.ids].tolist())
        sampler, base_ids = request.sampler, self.heads.base_ids
        tokens, drawn = list[int](), list[Distribution]()

        def draw(corrected: Floats) -> int:
            token, distribution = sampler.draw(corrected, tokens, base_ids)
            tokens.append(token)
            drawn.append(distribution)
            return int(np.flatnonzero(base_ids == token)[0])

        self.heads.walk(*block, draw)
        return DraftTree.chain(request.pending, tokens, drawn)

    def length_rule(self) -> LengthRule:
        """The rule of one block, to be asked slot by slot."""
        if self.threshold is None:
            return while_it_pays(self.row_cost)
        return partial(operator.le, self.threshold)  # DeepSpec's: threshold <= confidence


def while_it_pays(row_cost: float) -> LengthRule:
    """The rule of the length that brings most tokens for its cost, as the paper schedules one
    sequence.

    A slot survives with the product of the confidences up to it. With l slots a pass costs
    1 + l * row_cost, and brings one token and the sum of what survives. Slots are taken from left
    to right, while each raises tokens per cost.
    """
    tokens, cost, survival = 1.0, 1.0, 1.0

    def goes_on(confidence: float) -> bool:
        nonlocal tokens, cost, survival
        survival *= confidence
        if survival * cost < row_cost * tokens:
            return False
        tokens, cost = tokens + survival, cost + row_cost
        return True

    return goes_on


def limits(base: EngineConfig, draft: EngineConfig | None) -> BlockLimits:
    """The plans that the two engines were built for: chains."""
    return replace(block_drafter.limits(base, draft), max_top_k=1)


def open_drafter(sources: DrafterSources) -> DSparkDrafter:
    """The drafter of a DSpark engine, with the heads that stand beside it."""
    assert sources.draft is not None
    spec, config = spec_of(sources.draft.config), sources.draft.config.component
    options = sources.options or DSparkOptions()
    assert isinstance(spec, DSparkSpec)
    assert isinstance(options, DSparkOptions)
    assert config.draft_vocab_size is not None
    ids, offsets = np.arange(config.draft_vocab_size), vocabulary_map(sources)
    path = sources.engine_dir / file_names.HEADS
    arrays = head_arrays(path, config, BUILD_AGAIN) if config.graph.features else {}
    heads = DSparkHeads(spec.heads, arrays, ids if offsets is None else ids + offsets)
    return DSparkDrafter(
        open_decoder(sources),
        spec.mask_token_id,
        spec.block_size,
        heads,
        options.confidence_threshold,
        sources.row_cost,
    )


ROW = DrafterRow(
    open=open_drafter,
    limits=limits,
    options=DSparkOptions,
    tries=tuple({"confidence_threshold": share} for share in (0.0, 0.3, 0.5, 0.7)),
    trained_with_thinking=trained_with_thinking,
)
