"""What a recipe for a DFlash draft says: ModelOpt's section `dflash`. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.errors import UnsupportedModel
from edgespec.methods.dflash import NAME
from edgespec.training.block_keys import PROJECTOR, asked_for, block_exports, block_keys
from edgespec.training.keys import Trainable, shown


def refuse(section: Mapping[str, Any], source: str) -> None:
    """Raises UnsupportedModel for a projector of ModelOpt that makes another draft."""
    if (projector := asked_for(section)) not in ("none", NAME, None):
        raise UnsupportedModel(
            f"{source}: projector_type {shown(projector)}: this version trains no such draft",
            "Remove the key for a DFlash draft.",
        )


TRAINABLE = Trainable(
    recipe_type="speculative_dflash",
    section="dflash",
    module="edgespec.training.dflash",
    defaults={"training.answer_only_loss": True},
    marks=(PROJECTOR,),
    refuse=refuse,
    keys=block_keys("dflash"),
    exports=block_exports(NAME),
)
