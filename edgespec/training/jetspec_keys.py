"""What a recipe for a JetSpec draft says: ModelOpt's section `dflash`, by a projector of our own
and with the defaults of the paper. Knows no torch."""

from __future__ import annotations

from edgespec.methods.jetspec import NAME
from edgespec.training.block_keys import PROJECTOR, asked_for, block_exports, block_keys
from edgespec.training.keys import NUMBER, TEXT, Fixed, Key, Trainable

TRAINABLE = Trainable(
    recipe_type="speculative_dflash",
    section="dflash",
    module="edgespec.training.jetspec",
    defaults={"training.answer_only_loss": True},
    claims=lambda section: asked_for(section) == NAME,
    marks=(PROJECTOR,),
    keys={
        **block_keys("dflash"),
        # all slots weigh the same (arXiv 2606.18394, section 2.3)
        "dflash.dflash_loss_objective": Key(TEXT, "decay", choices=("dpace", "decay")),
        "dflash.dflash_loss_decay_factor": Key(NUMBER, 0.0, least=0),
        "dflash.dflash_draft_attention": Fixed("a slot sees none behind it", ("causal",)),
    },
    exports=block_exports(NAME),
)
