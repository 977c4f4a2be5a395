"""An MTP head's drafts: a chain (arXiv 2404.19737).

Knows what differs: a head drafts one token a step and no trees, and it speaks the base's own ids,
so that there is no vocabulary map. The search is `tree_drafter`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgespec.backends.engine_config import EngineConfig
from edgespec.errors import LimitError
from edgespec.methods.mtp import NAME
from edgespec.runtime.drafters.row import DrafterRow, DrafterSources
from edgespec.runtime.drafters.tree_drafter import TreeDrafter, cached_decoder, draft_sizes
from edgespec.runtime.plans.plan import TreeLimits
from edgespec.runtime.trees.static_tree import StaticPlan
from edgespec.runtime.trees.tree import DraftPlan


@dataclass(frozen=True, slots=True)
class MtpLimits(TreeLimits):
    """What base and head were built for; chains only."""

    def check(self, plan: DraftPlan) -> None:
        """LimitError for a tree too."""
        if plan.top_k > 1 and not isinstance(plan, StaticPlan):
            message = (
                f"`spec_draft_top_k` {plan.top_k}: an MTP head drafts a chain, one token a step, "
                "and no trees"
            )
            raise LimitError(message, "Set it to 1, or leave it out.")
        TreeLimits.check(self, plan)

    def fewer_nodes(self, plan: DraftPlan) -> str:
        size = plan.verify_size
        return f"Lower it to {plan.steps + 1}, or raise `spec_draft_step` to {size - 1}."


def limits(base: EngineConfig, draft: EngineConfig | None) -> MtpLimits:
    """The plans that the two engines were built for."""
    return MtpLimits(*draft_sizes(base, draft))


def open_drafter(sources: DrafterSources) -> TreeDrafter:
    """The drafter of a head's engine."""
    assert sources.draft is not None
    rows = sources.draft.config.component.draft_vocab_size
    assert rows is not None
    return TreeDrafter(cached_decoder(sources.draft), np.zeros(rows, np.int64))


ROW = DrafterRow(
    open=open_drafter,
    limits=limits,
    words=" with the MTP head",
)
__all__ = ["NAME", "ROW"]
