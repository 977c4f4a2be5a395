"""ShareGPT: conversations that users shared, in `from` and `value`. Its system turns are notes of
the site, and those with Bing are in no common form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.data.sources.row import Messages, Part, Source
from edgespec.prompts.chats import messages_of


def read(record: Mapping[str, Any]) -> Messages:
    """Turns of users and answers; none of a conversation with Bing."""
    turns = record.get("conversations") or ()
    if any(isinstance(turn, dict) and turn.get("from") == "bing" for turn in turns):
        return ()
    return tuple(m for m in messages_of(record) if m["role"] != "system")


SOURCE = Source((Part("anon8231489123/ShareGPT_Vicuna_unfiltered"),), read)
