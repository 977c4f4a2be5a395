"""An MTP head's drafts: a chain (arXiv 2404.19737).

Knows what differs: a head drafts one token a step and no trees, and it speaks the base's own ids,
so that there is no vocabulary map. The search is `tree_drafter`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgespec.backends.engine_config import EngineConfig
from edgespec.errors import LimitError, OptionError
from edgespec.methods.mtp import NAME
from edgespec.runtime.drafters.decoding import MAX_DRAFT_LEN, DecodingConfig, DecodingType
from edgespec.runtime.drafters.options import option
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


ONE_KIND = "a head drafts with its own hidden states; there is no other kind"


@dataclass(frozen=True, kw_only=True)
class MtpDecoding(DecodingConfig):
    """The keys of its decoding type: a chain."""

    len_keys = ("max_draft_len", "num_nextn_predict_layers")

    num_nextn_predict_layers: int | None = option(
        None, "TensorRT-LLM's older name of max_draft_len.", low=1, high=MAX_DRAFT_LEN
    )
    use_mtp_vanilla: bool = option(False, "One head for each draft; true is refused.")
    mtp_eagle_one_model: bool = option(True, "One program for base and head.", unused=ONE_KIND)

    def __post_init__(self) -> None:
        DecodingConfig.__post_init__(self)
        older = self.num_nextn_predict_layers
        if older is not None and self.max_draft_len not in (None, older):
            message = f"num_nextn_predict_layers is {older}, and max_draft_len {self.max_draft_len}"
            raise OptionError(message, "They mean the same: leave one out.")
        if self.use_mtp_vanilla:
            message = "use_mtp_vanilla is true, and a head drafts all tokens of a step"
            raise OptionError(message, "Set it to false, or leave it out.")


ROW = DrafterRow(
    open=open_drafter,
    limits=limits,
    words=" with the MTP head",
    decoding=DecodingType(name="MTP", keys=MtpDecoding),
)
__all__ = ["NAME", "ROW"]
