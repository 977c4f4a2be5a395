"""EAGLE-3's drafts (arXiv 2503.01840): trees and chains, in a vocabulary of the draft's own.

Knows the method's row. The search is `tree_drafter`'s.
"""

from __future__ import annotations

from edgespec import bundle
from edgespec.backends.engine_config import BUILD_AGAIN, EngineConfig
from edgespec.component_files import d2t_offsets
from edgespec.methods.eagle3 import NAME
from edgespec.runtime.drafters.row import DrafterRow, DrafterSources
from edgespec.runtime.drafters.tree_drafter import TreeDrafter, cached_decoder, draft_sizes
from edgespec.runtime.plans import TreeLimits


def open_drafter(sources: DrafterSources) -> TreeDrafter:
    """The drafter of a draft's engine; the vocabulary map stands beside it."""
    assert sources.draft is not None
    path, config = sources.engine_dir / bundle.D2T, sources.draft.config.component
    offsets = d2t_offsets(path, config, BUILD_AGAIN)
    return TreeDrafter(cached_decoder(sources.draft), offsets)


def limits(base: EngineConfig, draft: EngineConfig | None) -> TreeLimits:
    """The plans that the two engines were built for."""
    return TreeLimits(*draft_sizes(base, draft), static_trees=True)


ROW = DrafterRow(open=open_drafter, limits=limits)
__all__ = ["NAME", "ROW"]
