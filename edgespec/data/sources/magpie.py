"""Magpie: one instruction and its response a record, in sets of three sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.data.sources.row import Messages, Part, Source


def read(record: Mapping[str, Any]) -> Messages:
    """Two turns."""
    said = record.get("instruction"), record.get("response")
    roles = ("user", "assistant")
    return tuple(
        {"role": role, "content": text}
        for role, text in zip(roles, said, strict=True)
        if isinstance(text, str)
    )


def source(repository: str) -> Source:
    """One of its sets."""
    return Source((Part(repository, ("train",)),), read)


MAGPIE_1M = source("Magpie-Align/Magpie-Llama-3.3-Pro-1M-v0.1")
MAGPIE_500K = source("Magpie-Align/Magpie-Llama-3.3-Pro-500K-Filtered")
MAGPIE_300K = source("Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered")
