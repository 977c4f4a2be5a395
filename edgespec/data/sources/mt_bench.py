"""MT-Bench: 80 prompts of two turns, without answers. They measure; a draft that is measured with
them must not learn them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.data.sources.row import Messages, Part, Source
from edgespec.prompts.chats import messages_of


def read(record: Mapping[str, Any]) -> Messages:
    """What the user says, under either of its names."""
    prompt = record.get("prompt")
    return messages_of({"turns": prompt} if isinstance(prompt, list) else record)


SOURCE = Source((Part("HuggingFaceH4/mt_bench_prompts", ("train",)),), read)
