"""Anthropic's routes over a socket: the answers are those of OpenAI's, in their form and events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgespec.prompts.places import JsonPlace
from edgespec.runtime.engine import Engine
from edgespec.serve.anthropic_messages import conversation, offered
from tests.unit.serve.serving import MODEL, Running, served

PATH = "/v1/messages"
USER = {"role": "user", "content": "Hi"}
ASKED: dict[str, Any] = {"messages": [USER], "system": "Be", "temperature": 0, "max_tokens": 8}
HERE = JsonPlace("request")


def asked(server: Running, **body: Any) -> Any:
    response = server.post(PATH, **ASKED | body)
    assert response.status_code == 200, response.text
    return response.json()


def blocks(text: str) -> list[dict[str, Any]]:
    """A content of two blocks, the second of which is to be cached."""
    marked = {"type": "text", "text": text[1:], "cache_control": {"type": "ephemeral"}}
    return [{"type": "text", "text": text[:1]}, marked]


def test_an_answer_is_that_of_openais_route(server: Running) -> None:
    messages = [{"role": "system", "content": "Be"}, USER]
    expected = server.chat(messages=messages, max_tokens=8)
    done = asked(server)
    text = expected["choices"][0]["message"]["content"]
    assert done["content"] == [{"type": "text", "text": text}]
    assert (done["type"], done["role"], done["model"]) == ("message", "assistant", MODEL)
    assert (done["stop_reason"], done["stop_sequence"]) == ("max_tokens", None)
    read = done["usage"]["input_tokens"] + done["usage"]["cache_read_input_tokens"]
    assert read == expected["usage"]["prompt_tokens"]
    assert done["usage"]["output_tokens"] == 8
    assert "adjusted" not in done
    split = {**USER, "content": blocks("Hi")}
    again = asked(server, messages=[split], system=blocks("Be"), metadata={"user_id": "7"})
    assert again["content"] == done["content"]
    assert [note.partition(":")[0] for note in again["adjusted"]] == ["metadata", "cache_control"]
    stopped = asked(server, stop_sequences=["§", text[3:5]])
    assert stopped["content"][0]["text"] == text[: text.index(text[3:5])]
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[3:5])
