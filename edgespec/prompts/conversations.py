"""JSONL of texts and conversations, as calibration and training read it: an object a line with
"messages", "text" or "turns". Knows no tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgespec.errors import RequestError
from edgespec.prompts.chats import MORE

# With role, content and of MORE what there is, for a template. Content is a text, or parts where
# images are allowed
Messages = list[dict[str, Any]]
Record = str | Messages  # a text, or a conversation


def numbered_records(
    text: str, path: Path, wanted: str, *, parts: bool = False
) -> Iterator[tuple[str, Record]]:
    """Where each record stands, and the record; with `parts` content may be a list of texts and
    images. Raises RequestError with the line, and `wanted` as the remedy."""
    for number, line in enumerate(text.split("\n"), 1):  # JSON may have other ends of lines inside
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _record(line, where, wanted, parts)


def _record(line: str, where: str, wanted: str, parts: bool) -> Record:
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
    if isinstance(messages, list) and messages and all(_is_message(m, parts) for m in messages):
        return [_kept(message) for message in messages]
    raise RequestError(
        f"{where} has none of messages (with role and content), text and turns.", wanted
    )


def _is_message(value: object, parts: bool) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    return isinstance(content, str) or (
        parts and isinstance(content, list) and bool(content) and all(map(_is_part, content))
    )


def _kept(message: dict[str, Any]) -> dict[str, Any]:
    """What templates read of a message."""
    more = {key: message[key] for key in MORE if key in message}
    return {"role": message["role"], "content": _content(message["content"]), **more}


def _content(content: Any) -> Any:
    """Parts without an image as the text that they are."""
    if isinstance(content, str) or any(part["type"] == "image" for part in content):
        return content
    return "".join(part["text"] for part in content)


def _is_part(value: object) -> bool:
    """A text or an image of a message."""
    return (
        isinstance(value, dict)
        and value.get("type") in ("text", "image")
        and isinstance(value.get(str(value["type"])), str)
    )
