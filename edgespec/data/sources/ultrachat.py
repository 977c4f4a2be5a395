"""UltraChat-200k: conversations of several turns, in `messages`. Its `prompt` is their first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.data.sources.row import Messages, Part, Source
from edgespec.prompts.chats import messages_of


def read(record: Mapping[str, Any]) -> Messages:
    """The messages, or the prompt where there are none."""
    return messages_of({k: v for k, v in record.items() if k != "prompt"}) or messages_of(record)


SOURCE = Source((Part("HuggingFaceH4/ultrachat_200k", ("train_sft",)),), read)
