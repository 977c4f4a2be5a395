"""EAGLE-3's drafts (arXiv 2503.01840): trees and chains, in a vocabulary of the draft's own.

Knows the method's row. The search is `tree_drafter`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.artifacts import file_names
from edgespec.artifacts.component_files import d2t_offsets
from edgespec.backends.engine_config import BUILD_AGAIN, EngineConfig
from edgespec.methods.eagle3 import NAME
from edgespec.runtime.drafters.options import DrafterOptions, option
from edgespec.runtime.drafters.row import DrafterRow, DrafterSources
from edgespec.runtime.drafters.tree_drafter import TreeDrafter, cached_decoder, draft_sizes
from edgespec.runtime.plans.plan import TreeLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Options(DrafterOptions):
    """EAGLE-3's options."""

    image_rows: bool = option(
        False,
        "Where a prompt has images, the draft reads their rows in place of the image token; drafts"
        " are trained in either way.",
    )


def open_drafter(sources: DrafterSources) -> TreeDrafter:
    """The drafter of a draft's engine; the vocabulary map stands beside it."""
    assert sources.draft is not None
    options = sources.options or Eagle3Options()
    assert isinstance(options, Eagle3Options)
    path, config = sources.engine_dir / file_names.D2T, sources.draft.config.component
    offsets = d2t_offsets(path, config, BUILD_AGAIN)
    decoder = cached_decoder(sources.draft)
    return TreeDrafter(decoder, offsets, image_rows=options.image_rows)


def limits(base: EngineConfig, draft: EngineConfig | None) -> TreeLimits:
    """The plans that the two engines were built for."""
    return TreeLimits(*draft_sizes(base, draft), static_trees=True)


ROW = DrafterRow(
    open=open_drafter,
    limits=limits,
    options=Eagle3Options,
)
__all__ = ["NAME", "ROW"]
