"""Daring-Anteater: conversations whose roles are capitalized, with the system turn in a column of
its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.data.sources.row import Messages, Part, Source
from edgespec.prompts.chats import ROLES, messages_of


def read(record: Mapping[str, Any]) -> Messages:
    """The conversation behind its system turn."""
    turns = [{**turn, "role": turn["role"].lower()} for turn in messages_of(record)]
    named = [{**turn, "role": ROLES.get(turn["role"], turn["role"])} for turn in turns]
    system = record.get("system")
    first = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    return (*first, *named) if named else ()


SOURCE = Source((Part("nvidia/Daring-Anteater", ("train",)),), read)
