"""How a JetSpec draft is trained: by the base's distribution, whose forward divergence weighs the
same in all slots (arXiv 2606.18394, section 2.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.config.values import Shapes
from edgespec.graphs.block_draft import named_tensors
from edgespec.methods.jetspec import PUBLISHED_SECTION
from edgespec.modules.block_draft import BlockDraftModule
from edgespec.training import blocks
from edgespec.training.recipe import TrainRecipe
from edgespec.training.row import BaseFacts, TrainRow


def new_config(facts: BaseFacts, recipe: TrainRecipe) -> dict[str, Any]:
    """A new draft's config.json in the layout of its authors: class and keys are DFlash's."""
    config, section = blocks.block_config(facts, recipe, blocks.block_architecture(recipe))
    section |= {**blocks.sliding_keys(recipe), "causal_head": True}
    return {"architectures": ["DFlashDraftModel"], **config, PUBLISHED_SECTION: section}


def new_shapes(config: Mapping[str, Any]) -> Shapes:
    """Name -> shape of a new draft's tensors."""
    return blocks.block_shapes(config, len(config[PUBLISHED_SECTION]["target_layer_ids"]))


ROW = TrainRow(
    config=new_config,
    shapes=new_shapes,
    names=named_tensors,  # type: ignore[arg-type]
    module=BlockDraftModule,  # type: ignore[arg-type]
    loss=blocks.loss,
    drafts=blocks.drafts,
    sample=blocks.sample,
    check=blocks.check,
)
