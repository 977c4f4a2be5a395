"""JSONL of texts and conversations, as calibration and training read it: an object a line with
"messages", "text" or "turns". Knows no tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgespec.errors import RequestError
from edgespec.prompts.chats import MORE

Messages = list[dict[str, Any]]  # with role, content and of MORE what there is, for a template
Record = str | Messages  # a text, or a conversation


def numbered_records(text: str, path: Path, wanted: str) -> Iterator[tuple[str, Record]]:
    """Where each record stands, and the record. Raises RequestError with the line, and `wanted` as
    the remedy."""
    for number, line in enumerate(text.split("\n"), 1):  # JSON may have other ends of lines inside
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _record(line, where, wanted)


def _record(line: str, where: str, wanted: str) -> Record:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON: {error}.", wanted) from error
    if not isinstance(value, dict):
        raise RequestError(f"{where} is not an object.", wanted)
    if isinstance(value.get("text"), str):
        return str(value["text"])
    turns = value.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return [
            {"role": "user" if i % 2 == 0 else "assistant", "content": turn}
            for i, turn in enumerate(turns)
        ]
    messages = value.get("messages", value.get("conversations"))
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        kept = ("role", "content", *MORE)
        return [{key: m[key] for key in kept if key in m} for m in messages]
    raise RequestError(
        f"{where} has none of messages (with role and content), text and turns.", wanted
    )


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )
