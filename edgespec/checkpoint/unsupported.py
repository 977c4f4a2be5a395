"""Kinds of checkpoints that are detected and that this version does not do: each refused by name.

Knows the signs by which each is known. A kind that becomes supported leaves this table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.checkpoint.files import Checkpoint
from edgespec.config import Shapes
from edgespec.families import family_of


@dataclass(frozen=True, slots=True)
class Unsupported:
    """`name` follows "this is"; `matches` looks at config.json and, where it must, at tensors."""

    name: str
    matches: Callable[[Mapping[str, Any], Checkpoint], bool]


def bare_shapes(checkpoint: Checkpoint) -> Shapes:
    """Shapes by name; some drafts have everything under `model.`, which changes nothing."""
    return {name.removeprefix("model."): info.shape for name, info in checkpoint.tensors.items()}


def _is_qwen_next(config: Mapping[str, Any], _: Checkpoint) -> bool:
    return config.get("model_type") == "qwen3_next" or "Qwen3NextForCausalLM" in _architectures(
        config
    )


def _is_other_mtp(config: Mapping[str, Any], checkpoint: Checkpoint) -> bool:
    """A family whose head is known is a base like another: the head is left out, or exported
    beside it."""
    family = family_of(config)
    if family is not None and family.mtp_layers is not None:
        return False
    text = config.get("text_config")
    places = (config, text) if isinstance(text, Mapping) else (config,)
    if any(place.get("mtp_num_hidden_layers") for place in places):
        return True
    return any(name.startswith("mtp.") for name in checkpoint.tensors)


def _is_deepseek_mtp(config: Mapping[str, Any], checkpoint: Checkpoint) -> bool:
    if not config.get("num_nextn_predict_layers"):
        return False
    return any(
        re.fullmatch(r"model\.layers\.\d+\.eh_proj\.weight", name) for name in checkpoint.tensors
    )


def _is_vision_language(config: Mapping[str, Any], _: Checkpoint) -> bool:
    """A family whose text part is known is a base like another."""
    family = family_of(config)
    if family is not None and family.text_key:
        return False
    return bool(config.get("vision_config") or config.get("visual"))


# Kinds of drafts in speculators' layout, and what they are
SPECULATORS = {
    "peagle": " (P-EAGLE): it drafts all positions in one pass over mask slots, and EAGLE-3's graph"
    " here drafts them one by one",
}
# Asked once no method has claimed the checkpoint; the first that matches decides.
OTHERS = (
    Unsupported("a Qwen3-Next model", _is_qwen_next),
    Unsupported("a model with a multi-token prediction (MTP) head, and not Qwen3.5", _is_other_mtp),
    Unsupported(
        "a DeepSeek or GLM model with multi-token prediction (MTP) layers", _is_deepseek_mtp
    ),
    Unsupported("a vision-language model", _is_vision_language),
)


def _architectures(config: Mapping[str, Any]) -> list[Any]:
    names = config.get("architectures")
    return names if isinstance(names, list) else []
