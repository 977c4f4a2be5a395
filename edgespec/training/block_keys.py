"""What recipes for drafts of blocks have in common, which ModelOpt has all in one section, and the
commands that export such a pair. Knows no method, and no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgespec.errors import command
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
    Keys,
)

PROJECTOR = "projector_type"  # of the architecture: by which ModelOpt tells such drafts apart
OTHER = Idle("it is of another draft")


def asked_for(section: Mapping[str, Any]) -> Any:
    """The kind of draft that a recipe's section asks for; None where it does not say."""
    inner = next((v for key, v in section.items() if key.endswith("architecture_config")), None)
    return inner.get(PROJECTOR) if isinstance(inner, Mapping) else None


def block_keys(section: str) -> Keys:
    """The keys of a `section` as most such drafts have them."""
    rows: dict[str, Key | Idle | Fixed] = {
        "block_size": Key(WHOLE, 8, least=2, most=64),
        "num_anchors": Key(WHOLE, 32, least=1),
        "loss_objective": Key(TEXT, "dpace", choices=("dpace", "decay")),
        "dpace_alpha": Key(NUMBER, 0.5, least=1e-6, most=1),
        "loss_decay_factor": Key(NUMBER, 4.0, least=0),
        "self_logit_distillation": Key(SWITCH, True),
        "mask_token_id": Key(WHOLE, least=0),
        "swa_window_size": Key(WHOLE, least=1),
        "draft_attention": Key(TEXT, "bidirectional", choices=("bidirectional", "causal")),
        "init_checkpoint": Key(TEXT),
        "architecture_config": Key(KEYS_, {}),
        "freeze_base_model": Fixed("the base is never trained", (True,)),
        "attention_sink": Fixed("engines have no attention sinks"),
        "offline": OFFLINE,
        "report_acc": Idle(MEASURED),
        "use_torch_compile": Idle("nothing is compiled"),
        "export_rope_scaling": Idle("a draft is exported with the RoPE it learned"),
        "lambda_base_start": OTHER,
        "lambda_base_decay_ratio": OTHER,
        "ce_loss_alpha": OTHER,
        "l1_loss_alpha": OTHER,
        "confidence_head_alpha": OTHER,
    }
    return {f"{section}.{section}_{name}": row for name, row in rows.items()}


def block_exports(method: str) -> Callable[[str, Path], list[tuple[str, str]]]:
    """The commands that export a base and its draft, and what to build of each."""

    def exports(base: str, draft: Path) -> list[tuple[str, str]]:
        of = {f"{method}_draft_dir": draft}
        sides = (("base", "llm"), ("draft", f"{method}_draft"))
        return [
            (
                command("export", base, f"onnx/{side}", **{f"{method}_{side}": True}, **of),
                f"onnx/{side}/{component}",
            )
            for side, component in sides
        ]

    return exports
