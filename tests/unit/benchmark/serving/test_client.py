"""A client of a real socket: what it times and counts, and what it takes for no answer."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from edgespec.benchmark.serving.client import MAX_BYTES, ChatClient, RequestFailed
from edgespec.benchmark.serving.load import Run, run_load
from edgespec.errors import OptionError
from tests.chat_server import Body, event, serving

BODY: Body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}}
DONE = b"data: [DONE]\n\n"


def test_an_answer_has_its_times_texts_and_counts() -> None:
    with serving(first_s=0.05, between_s=lambda body: 0.02) as server:
        answer = ChatClient(f"{server.url}/v1", timeout_s=5.0).ask(BODY)
    first, last = answer.pieces_s
    assert first - answer.started_s >= 0.05
    assert last - answer.started_s >= 0.07
    assert last > first
    assert (answer.text, answer.reasoning) == ("one two ", "why ")
    assert (answer.tokens("prompt"), answer.tokens("completion")) == (7, 4)
    assert answer.speculation["num_spec_steps"] == 2
    assert server.asked == [BODY | {"stream": True, "stream_options": {"include_usage": True}}]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"raw": event(END) + event(USAGE)}, "the stream ended before the answer"),
        ({"raw": event(USAGE) + DONE}, "the stream ended before the answer"),
        ({"raw": event(END) + DONE}, "the stream has no usage"),
        ({"raw": event(END) + event({"choices": [], "usage": {"prompt_tokens": 1}})}, "ended"),
        ({"raw": event({"error": {"message": "broke"}})}, "error in the stream: broke"),
        ({"raw": event({"choices": [1]})}, "not one of OpenAI's"),
        ({"raw": b"data: 1\n\n"}, "not one of OpenAI's"),
        ({"raw": b"data: {" + b" " * 2 * MAX_BYTES + b"}\n\n"}, "not one of OpenAI's"),
        ({"raw": b"data: " + b"[" * 100_000 + b"\n\n"}, "not one of OpenAI's"),
        ({"raw": b"oops\n\n"}, "the stream ended before the answer"),
        ({"kind": "application/json"}, "the answer is application/json"),
        ({"refuse": lambda body: (429, "full")}, "HTTP 429: full"),
        ({"refuse": lambda body: (302, "moved")}, "HTTP 302: moved"),
    ],
)
def test_what_is_no_answer_is_told(values: Any, said: str) -> None:
    with serving(**values) as server, pytest.raises(RequestFailed, match=said):
        ChatClient(server.url, timeout_s=5.0).ask(BODY)


def test_a_silent_server_and_none_at_all_are_failures() -> None:
    with serving(first_s=0.5) as server:
        with pytest.raises(RequestFailed, match="TimeoutError"):
            ChatClient(server.url, timeout_s=0.05).ask(BODY)
        port = server.port
    with pytest.raises(RequestFailed, match="Connection refused"):
        ChatClient(f"http://127.0.0.1:{port}", timeout_s=5.0).ask(BODY)


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://a", "http://", "http://u:p@a", "http://u@a", "http://a:x"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="is no address of a server"):
        ChatClient(url)


def load(server: Any, prompts: list[tuple[str, ...]], clients: int, **values: Any) -> Run:
    client = ChatClient(server.url, timeout_s=5.0)
    stopping = values.pop("stopping", lambda: False)
    return run_load(client, prompts, clients, lambda number: {"n": number}, stopping, **values)


def test_so_many_ask_at_a_time_and_turns_stand_behind_their_answers() -> None:
    prompts = [("Hi.", "Go on."), ("You.",), ("Hi.",)]
    pair = threading.Barrier(2, timeout=30)  # breaks where one asks alone
    with serving(refuse=lambda body: pair.wait() < 0 or None) as server:
        run = load(server, prompts, 2)
    assert server.most_active == 2
    assert sorted(run.answers) == [(0, 0), (0, 1), (1, 0), (2, 0)]
    (second,) = (body for body in server.asked if len(body["messages"]) > 1)
    said = [(message["role"], message["content"]) for message in second["messages"]]
    assert said == [("user", "Hi."), ("assistant", "one two "), ("user", "Go on.")]
    assert second["n"] == 0


def test_a_turn_that_failed_ends_its_conversation_alone() -> None:
    def refuse(body: Body) -> tuple[int, str] | None:
        return (503, "busy") if body["messages"][0]["content"] == "bad" else None

    with serving(refuse=refuse) as server:
        run = load(server, [("bad", "Go on."), ("Hi.", "Go on.")], 1)
    assert run.failures == ["HTTP 503: busy"]
    assert sorted(run.answers) == [(1, 0), (1, 1)]


def test_a_load_that_is_stopped_waits_for_no_answer() -> None:
    stopped = threading.Event()

    def refuse(body: Body) -> None:
        if len(server.asked) == 2:
            stopped.set()

    with serving(first_s=2.0, refuse=refuse) as server:
        run = load(server, [("Hi.",)] * 50, 2, stopping=stopped.is_set)
    assert len(server.asked) == 2
    assert not run.answers
