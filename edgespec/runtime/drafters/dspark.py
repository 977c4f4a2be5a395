"""DSpark's search (arXiv 2607.05147): a block in one pass, walked from left to right by the Markov
head, and cut where the confidence head expects the next token to be turned down.

Drafts are the best tokens at every temperature, and chains: each slot follows from the token before
it (deepseek-ai/DeepSpec, eval/dspark/draft_ops.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from edgespec import bundle
from edgespec.backends.engine_config import BUILD_AGAIN, EngineConfig
from edgespec.component_files import head_arrays
from edgespec.methods.dspark import NAME, DSparkSpec
from edgespec.methods.dspark_heads import DSparkHeads
from edgespec.runtime.block import BlockDecoder, BlockOutput
from edgespec.runtime.drafters import block_drafter
from edgespec.runtime.drafters.base import DraftRequest
from edgespec.runtime.drafters.block_drafter import (
    BlockDrafter,
    BlockLimits,
    Floats,
    open_decoder,
    spec_of,
    trained_with_thinking,
    vocabulary_map,
)
from edgespec.runtime.drafters.options import DrafterOptions, option
from edgespec.runtime.drafters.row import DrafterRow, DrafterSources
from edgespec.runtime.tree import DraftTree

__all__ = ["NAME", "ROW", "DSparkDrafter", "DSparkOptions", "confident_length"]

# A draft below it costs more than it brings: where a further row costs about a fifth of a pass
# (decision 0011) and a token less than a whole one
CONFIDENCE_THRESHOLD = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkOptions(DrafterOptions):
    """DSpark's options."""

    confidence_threshold: float = option(
        CONFIDENCE_THRESHOLD,
        "A block ends before the first slot that is less confident; 0 verifies whole blocks.",
        low=0,
        high=1,
    )


class DSparkDrafter(BlockDrafter):
    """`heads` are those of the draft. A block ends before the first slot whose confidence is below
    `threshold`; 0 verifies whole blocks."""

    def __init__(
        self,
        decoder: BlockDecoder,
        mask_token: int,
        max_block: int,
        heads: DSparkHeads,
        threshold: float = CONFIDENCE_THRESHOLD,
    ) -> None:
        super().__init__(decoder, mask_token, max_block)
        self.heads, self.threshold = heads, threshold

    def drafted(self, request: DraftRequest, output: BlockOutput) -> DraftTree:
        """The chain of a block, as long as the confidences say."""
        walk = self.heads.walk(request.pending, output.logits, output.states)
        count = len(walk.ids)
        if walk.confidences is not None:
            count = confident_length(walk.confidences, self.threshold)
        tokens = self.heads.base_ids[walk.ids[:count]]
        return DraftTree(np.concatenate([[request.pending], tokens]), np.arange(-1, count))


def confident_length(confidences: Floats, threshold: float) -> int:
    """The slots before the first whose confidence is below the threshold."""
    below = np.flatnonzero(confidences < threshold)
    return int(below[0]) if below.size else len(confidences)


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
    path = sources.engine_dir / bundle.HEADS
    arrays = head_arrays(path, config, BUILD_AGAIN) if config.graph.features else {}
    heads = DSparkHeads(spec.heads, arrays, ids if offsets is None else ids + offsets)
    threshold, decoder = options.confidence_threshold, open_decoder(sources)
    return DSparkDrafter(decoder, spec.mask_token_id, spec.block_size, heads, threshold)


ROW = DrafterRow(
    open=open_drafter,
    limits=limits,
    options=DSparkOptions,
    trained_with_thinking=trained_with_thinking,
)
