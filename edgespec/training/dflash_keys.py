"""What a recipe for a DFlash draft says: ModelOpt's section `dflash`. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.errors import UnsupportedModel, command
from edgespec.training.keys import (
    KEYS_,
    MEASURED,
    NUMBER,
    OFFLINE,
    SWITCH,
    TEXT,
    WHOLE,
    Fixed,
    Idle,
    Key,
    Trainable,
    shown,
)

OTHER = Idle("it is of another draft")


def exports(base: str, draft: Path) -> list[tuple[str, str]]:
    """The commands that export the pair, and what to build of each."""
    return [
        (
            command("export", base, "onnx/base", dflash_base=True, dflash_draft_dir=draft),
            "onnx/base/llm",
        ),
        (
            command("export", base, "onnx/draft", dflash_draft=True, dflash_draft_dir=draft),
            "onnx/draft/dflash_draft",
        ),
    ]


def refuse(section: Mapping[str, Any], source: str) -> None:
    """Raises UnsupportedModel for the projectors of other drafts, which ModelOpt has in the same
    section."""
    inner = section.get("dflash_architecture_config")
    projector = inner.get("projector_type") if isinstance(inner, Mapping) else None
    if projector not in ("none", "dflash", None):
        raise UnsupportedModel(
            f"{source}: projector_type {shown(projector)}: this version trains no such draft",
            "Remove the key for a DFlash draft.",
        )


TRAINABLE = Trainable(
    recipe_type="speculative_dflash",
    section="dflash",
    module="edgespec.training.dflash",
    defaults={"training.answer_only_loss": True},
    refuse=refuse,
    keys={
        "dflash.dflash_block_size": Key(WHOLE, 8, least=2, most=64),
        "dflash.dflash_num_anchors": Key(WHOLE, 32, least=1),
        "dflash.dflash_loss_objective": Key(TEXT, "dpace", choices=("dpace", "decay")),
        "dflash.dflash_dpace_alpha": Key(NUMBER, 0.5, least=1e-6, most=1),
        "dflash.dflash_loss_decay_factor": Key(NUMBER, 4.0, least=0),
        "dflash.dflash_self_logit_distillation": Key(SWITCH, True),
        "dflash.dflash_mask_token_id": Key(WHOLE, least=0),
        "dflash.dflash_swa_window_size": Key(WHOLE, least=1),
        "dflash.dflash_draft_attention": Key(
            TEXT, "bidirectional", choices=("bidirectional", "causal")
        ),
        "dflash.dflash_init_checkpoint": Key(TEXT),
        "dflash.dflash_architecture_config": Key(KEYS_, {}),
        "dflash.dflash_freeze_base_model": Fixed("the base is never trained", (True,)),
        "dflash.dflash_attention_sink": Fixed("engines have no attention sinks"),
        "dflash.dflash_offline": OFFLINE,
        "dflash.dflash_report_acc": Idle(MEASURED),
        "dflash.dflash_use_torch_compile": Idle("nothing is compiled"),
        "dflash.dflash_export_rope_scaling": Idle("a draft is exported with the RoPE it learned"),
        "dflash.dflash_lambda_base_start": OTHER,
        "dflash.dflash_lambda_base_decay_ratio": OTHER,
        "dflash.dflash_ce_loss_alpha": OTHER,
        "dflash.dflash_l1_loss_alpha": OTHER,
        "dflash.dflash_confidence_head_alpha": OTHER,
    },
    exports=exports,
)
