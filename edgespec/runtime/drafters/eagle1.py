"""EAGLE-1's and EAGLE-2's drafts (arXiv 2401.15077, 2406.16858): static and dynamic trees, and
chains.

Knows the method's row. The search is `tree_drafter`'s.
"""

from __future__ import annotations

import numpy as np

from edgespec.artifacts import file_names
from edgespec.artifacts.component_files import d2t_offsets, required_arrays
from edgespec.backends.engine_config import BUILD_AGAIN, EngineConfig
from edgespec.methods.eagle1 import NAME
from edgespec.runtime.drafters.row import DrafterRow, DrafterSources
from edgespec.runtime.drafters.tree_drafter import TreeDrafter, cached_decoder, draft_sizes
from edgespec.runtime.plans.plan import TreeLimits


def open_drafter(sources: DrafterSources) -> TreeDrafter:
    """The drafter of a draft's engine; a vocabulary map stands beside it where it has one."""
    assert sources.draft is not None
    path, config = sources.engine_dir / file_names.D2T, sources.draft.config.component
    rows = config.draft_vocab_size
    assert rows is not None
    offsets = np.zeros(rows, np.int64)
    if file_names.D2T in required_arrays(config):
        offsets = d2t_offsets(path, config, BUILD_AGAIN)
    return TreeDrafter(cached_decoder(sources.draft), offsets)


def limits(base: EngineConfig, draft: EngineConfig | None) -> TreeLimits:
    """The plans that the two engines were built for."""
    return TreeLimits(*draft_sizes(base, draft), static_trees=True)


ROW = DrafterRow(
    open=open_drafter,
    limits=limits,
)
__all__ = ["NAME", "ROW"]
