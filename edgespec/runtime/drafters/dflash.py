"""DFlash's search: a block of drafts in one pass (arXiv 2602.06036), as a chain or as a DDTree
(arXiv 2604.12989), the most probable nodes of the tree that the slots' candidates span.

The slots of a block are drafted side by side and do not know of each other.
"""

from __future__ import annotations

from edgespec.methods.dflash import NAME
from edgespec.runtime.drafters.block_drafter import (
    BlockTreeDrafter,
    limits,
    open_decoder,
    spec_of,
    trained_with_thinking,
    vocabulary_map,
)
from edgespec.runtime.drafters.row import DrafterRow, DrafterSources

__all__ = ["NAME", "ROW", "DFlashDrafter"]


class DFlashDrafter(BlockTreeDrafter):
    """Its trees are the most probable ones."""


def open_drafter(sources: DrafterSources) -> DFlashDrafter:
    """The drafter of a DFlash engine, with a vocabulary map where one stands beside it."""
    assert sources.draft is not None
    spec, decoder = spec_of(sources.draft.config), open_decoder(sources)
    return DFlashDrafter(decoder, spec.mask_token_id, spec.block_size, vocabulary_map(sources))


ROW = DrafterRow(
    open=open_drafter,
    limits=limits,
    trained_with_thinking=trained_with_thinking,
)
