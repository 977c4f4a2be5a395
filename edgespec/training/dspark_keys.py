"""What a recipe for a DSpark draft says: ModelOpt's section `dflash`, by its projector. Knows no
torch."""

from __future__ import annotations

from edgespec.methods.dspark import NAME
from edgespec.training.block_keys import PROJECTOR, asked_for, block_exports, block_keys
from edgespec.training.keys import NUMBER, WHOLE, Fixed, Idle, Key, Trainable

OWN = "its loss is the sum of its own three terms"

TRAINABLE = Trainable(
    recipe_type="speculative_dflash",
    section="dflash",
    module="edgespec.training.dspark",
    defaults={"training.answer_only_loss": True},
    claims=lambda section: asked_for(section) == NAME,
    marks=(PROJECTOR,),
    keys={
        **block_keys("dflash"),
        "training.loss": Fixed(OWN, ()),
        "dflash.dflash_block_size": Key(WHOLE, 7, least=2, most=64),  # which draft 7 tokens
        "dflash.dflash_ce_loss_alpha": Key(NUMBER, 0.1, least=0),
        "dflash.dflash_l1_loss_alpha": Key(NUMBER, 0.9, least=0),
        "dflash.dflash_confidence_head_alpha": Key(NUMBER, 1.0, least=0),
        "dflash.dflash_loss_objective": Idle("near slots weigh more by dflash_loss_decay_factor"),
        "dflash.dflash_dpace_alpha": Idle("near slots weigh more by dflash_loss_decay_factor"),
        "dflash.dflash_self_logit_distillation": Idle(OWN),
    },
    exports=block_exports(NAME),
)
