"""What a recipe for an MTP head says. Knows no torch."""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import command
from edgespec.training.keys import NUMBER, SWITCH, WHOLE, Fixed, Key, Trainable


def exports(base: str, draft: Path) -> list[tuple[str, str]]:
    """The command that exports the copy of the base with its head, and what to build of it."""
    line = command("export", draft, "onnx", mtp=True)
    return [(line, "onnx/llm"), (line, "onnx/mtp_draft")]


TRAINABLE = Trainable(
    recipe_type="speculative_mtp",
    section="mtp",
    module="edgespec.training.mtp",
    keys={
        "mtp.mtp_ttt_steps": Key(WHOLE, 3, least=1, most=32),
        "mtp.mtp_loss_decay_factor": Key(NUMBER, 0.8, least=0, most=1),
        "mtp.mtp_self_logit_distillation": Key(SWITCH, True),
        "mtp.mtp_new_head": Key(SWITCH, False),
        "data.draft_vocab_cache": Fixed("the head has the lm_head of its base", ()),
    },
    exports=exports,
)
