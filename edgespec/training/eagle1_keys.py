"""What a recipe for an EAGLE-1 draft says: ModelOpt's section `eagle`, with an architecture that
reads no aux layers. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.errors import command
from edgespec.training import eagle3_keys
from edgespec.training.keys import SWITCH, Key


def claims(section: Mapping[str, Any]) -> bool:
    """Whether the architecture says that the draft reads no aux layers."""
    inner = section.get("eagle_architecture_config")
    return isinstance(inner, Mapping) and inner.get("use_aux_hidden_state") is False


def exports(base: str, draft: Path) -> list[tuple[str, str]]:
    """The commands that export the pair, and what to build of each."""
    return [
        (command("export", base, "onnx/base", eagle1_base=True), "onnx/base/llm"),
        (command("export", draft, "onnx/draft", base_model_dir=base), "onnx/draft/llm"),
    ]


TRAINABLE = replace(
    eagle3_keys.TRAINABLE,
    module="edgespec.training.eagle1",
    keys={
        **eagle3_keys.TRAINABLE.keys,
        "eagle.eagle_hidden_state_distillation": Key(SWITCH, True),
    },
    claims=claims,
    marks=("use_aux_hidden_state",),
    exports=exports,
)
