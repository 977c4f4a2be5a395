"""JSONL of conversations with their ids, as data is prepared and answered: one line at a time, so
that a file may be larger than the memory.

A line is an object with `messages` or `conversations` (role and content, or from and value), or
with what a user says, in `turns` or `prompt`. Knows no tokens and no templates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import RequestError
from edgespec.safe_read.regular import open_regular

WANTED = (
    'Each line is an object with "messages", a list of {"role": ..., "content": ...}, or with'
    ' "turns", what the user says in turn.'
)
IDS = ("conversation_id", "uuid", "id", "question_id", "task_id", "prompt_id")
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
MORE = ("tool_calls", "tool_call_id", "name", "reasoning_content")  # what chat templates read too

Turn = dict[str, Any]  # role, content, and of MORE what there is


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation. `tools` are the functions that it was offered; without an id of its own its
    `id` is a hash of what is asked."""

    where: str
    id: str
    messages: tuple[Turn, ...]
    tools: tuple[Any, ...] = ()

    @property
    def asked(self) -> tuple[Turn, ...]:
        """All but the answers."""
        return tuple(m for m in self.messages if m["role"] != "assistant")

    def line(self, **more: object) -> str:
        """As JSONL, in ModelOpt's form."""
        value = {"conversation_id": self.id, "messages": [*self.messages]}
        tools = {"tools": [*self.tools]} if self.tools else {}
        return json.dumps(value | tools | more, ensure_ascii=False) + "\n"


def read_chats(path: Path) -> Iterator[Chat]:
    """The conversations of a JSONL file. Raises RequestError that names the line, and for a file
    without any."""
    found = False
    try:
        with open_regular(path) as file:
            for number, data in enumerate(file, 1):
                if data.strip():
                    found = True
                    yield chat_of(parsed(data, f"{path}, line {number}"), f"{path}, line {number}")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.", WANTED) from error
    if not found:
        raise RequestError(f"{path} has no conversations.", WANTED)


def parsed(data: bytes, where: str) -> Any:
    """The value of a line. Raises RequestError."""
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RequestError(f"{where} is not UTF-8.", WANTED) from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON: {error}.", WANTED) from error


def chat_of(record: object, where: str) -> Chat:
    """The conversation of a record, whatever its form. Raises RequestError."""
    if not isinstance(record, Mapping):
        raise RequestError(f"{where} is not an object.", WANTED)
    messages = messages_of(record)
    if not messages or not any(m["role"] == "user" for m in messages):
        raise RequestError(f"{where} has no messages with a turn of a user, and no turns.", WANTED)
    own = next((record[key] for key in IDS if isinstance(record.get(key), str | int)), None)
    tools = record.get("tools")
    name = identity(messages) if own is None else str(own)
    return Chat(where, name, messages, tuple(tools) if isinstance(tools, list) else ())


def messages_of(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    """The messages of a record; none where they have no form that is known."""
    said = [record["prompt"]] if isinstance(record.get("prompt"), str) else record.get("turns")
    if isinstance(said, list) and all(isinstance(text, str) for text in said):
        return tuple({"role": "user", "content": text} for text in said)
    given = record.get("messages", record.get("conversations"))
    found = [turn_of(value) for value in given] if isinstance(given, list) else []
    return tuple(turn for turn in found if turn is not None) if all(found) else ()


def turn_of(value: object) -> Turn | None:
    """A message in either form; None for another value."""
    if not isinstance(value, Mapping):
        return None
    role, content = value.get("role", value.get("from")), value.get("content", value.get("value"))
    if content is None and value.get("tool_calls"):
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        return None
    more = {key: value[key] for key in MORE if value.get(key)}
    return {"role": ROLES.get(role, role), "content": content, **more}


def identity(messages: Iterable[Turn]) -> str:
    """A hash of what is asked, whatever the answers."""
    asked = [[m["role"], m["content"]] for m in messages if m["role"] != "assistant"]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]
