"""The table of model families: one row per architecture, made of the families' files.

Adding a family is a file beside this one and its line here (docs/add_a_family.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.families import (
    gemma3,
    llama,
    mistral,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_vl,
)
from edgespec.families.base import Family

# Architecture, as config.json names it -> its row. Tests add rows of their own.
FAMILIES: dict[str, Family] = {
    **llama.FAMILIES,
    **mistral.FAMILIES,
    **qwen2.FAMILIES,
    **qwen2_5_vl.FAMILIES,
    **qwen3.FAMILIES,
    **qwen3_vl.FAMILIES,
    **qwen3_moe.FAMILIES,
    **qwen3_5.FAMILIES,
    **qwen3_5_moe.FAMILIES,
    **phi3.FAMILIES,
    **gemma3.FAMILIES,
}


def by_model_type() -> dict[str, str]:
    """model_type -> architecture."""
    return {family.model_type: name for name, family in FAMILIES.items()}


def family_names() -> str:
    """The families for a message: "Llama, Mistral and Qwen2"."""
    *names, last = dict.fromkeys(family.name for family in FAMILIES.values())
    return f"{', '.join(names)} and {last}"


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The row of an unchecked config.json, by its model_type or one of its architectures; None:
    there is none."""
    model_type, names = config.get("model_type"), config.get("architectures")
    if isinstance(model_type, str) and model_type in by_model_type():
        return FAMILIES[by_model_type()[model_type]]
    known = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return next((FAMILIES[name] for name in known if name in FAMILIES), None)
