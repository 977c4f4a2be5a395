"""Requests are rendered when their turn comes, conversations are finished before others
begin, and a stop leaves an answer for everybody. The engine here only names what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from edgespec.errors import EnvironmentProblem, RequestError
from edgespec.prompts import MAX_LENGTH, Message, Request, SamplingParams
from edgespec.prompts.rendering import Rendering
from edgespec.runtime.loop.generation import GenerationRequest, Response
from edgespec.runtime.loop.metrics import RequestMetrics
from edgespec.runtime.requests.answers import Answer, FileAnswers, sentences
from edgespec.runtime.vision.image_prompts import RunStopped


@dataclass
class Echo:
    """Answers a prompt with the number of its tokens; `asked` are the prompts in the order in which
    they were begun."""

    rendered: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    stopping: bool = False
    stop_after: int = 10**6

    @property
    def tokenizer(self) -> Echo:
        return self

    prompts = tokenizer

    def render(self, messages: tuple[Message, ...], asked: Rendering) -> str:
        text = " ".join(m.content for m in messages)
        if "refuse" in text:
            raise RequestError("the template refuses")
        if "large" in text:
            raise MemoryError
        self.rendered.append(text)
        return text

    def encode(self, text: str, **flags: Any) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_rendered(
        self,
        text: str,
        messages: tuple[Message, ...],
        asked: Rendering,
        *,
        stopping: Callable[[], bool],
    ) -> list[int]:
        if "slow image" in text:  # a signal comes meanwhile
            self.stopping = True
            assert stopping()
            raise RunStopped
        return self.encode(text)

    def run_queue(
        self, queue: Any, batch_size: int, stopping: Any
    ) -> Iterator[tuple[GenerationRequest, Response]]:
        while queue:
            request = queue.popleft()
            if request is None:
                continue
            text = "".join(map(chr, request.prompt_ids))
            self.asked.append(text)
            self.stopping = len(self.asked) >= self.stop_after
            metrics = RequestMetrics(len(text))
            ids = list(request.prompt_ids)
            yield request, Response(f"<{len(text)}>", [1], MAX_LENGTH, metrics, None, ids)


def request(index: int, text: str, *turns: str) -> Request:
    return Request(index, (Message("user", text),), SamplingParams(), turns=turns)


def run(echo: Echo, *requests: Request) -> list[Answer]:
    found = list(FileAnswers(echo, None, stopping=lambda: echo.stopping).run(requests))
    keys = [answer.key for answer in found]
    assert sorted(keys) == [
        (r.index, turn) for r in requests for turn in range(len(r.turns) + 1)
    ], "each turn once"
    return sorted(found, key=lambda answer: answer.key)


def test_conversation_is_finished_before_the_next_one_begins() -> None:
    echo = Echo()
    run(echo, request(0, "a", "b", "c"), request(1, "x", "y"))
    assert echo.asked == ["a", "a <1> b", "a <1> b <7> c", "x", "x <1> y"]


def test_prompt_is_made_when_its_turn_comes() -> None:
    echo = Echo()
    answers = FileAnswers(echo, None).run([request(i, str(i)) for i in range(5)])
    next(answers)
    assert echo.rendered == ["0"]


def test_turns_after_a_failed_one_fail_and_other_requests_do_not() -> None:
    found = run(Echo(), request(0, "refuse", "b"), request(1, "x"), request(2, "y", "refuse", "z"))
    assert [bool(answer.error) for answer in found] == [True, True, False, False, True, True]
    assert "turn 1 of request 2" in found[-1].error.what


def test_a_request_that_memory_does_not_suffice_for_fails_alone() -> None:
    first, second = run(Echo(), request(0, "large"), request(1, "x"))
    assert isinstance(first.error, EnvironmentProblem)
    assert first.error.what == "not enough memory for this request"
    assert second.error is None


def test_requests_that_are_all_refused_have_their_answers() -> None:
    assert all(answer.error for answer in run(Echo(), request(0, "refuse"), request(1, "refuse")))


@pytest.mark.parametrize("after", [1, 2, 3])
def test_stop_cancels_what_is_not_begun(after: int) -> None:
    echo = Echo(stop_after=after)
    found = run(echo, request(0, "a", "b"), request(1, "x", "y"), request(2, "z"))
    assert len(echo.asked) == after
    assert [answer.cancelled for answer in found] == [False] * after + [True] * (5 - after)


def test_a_stop_while_images_are_read_cancels_that_request_and_the_rest() -> None:
    echo = Echo()
    found = run(echo, request(0, "a"), request(1, "slow image", "b"), request(2, "c"))
    assert echo.asked == ["a"]
    assert [answer.cancelled for answer in found] == [False, True, True, True]
    assert not any(answer.error for answer in found)


@pytest.mark.parametrize("what", ["it is too long", "It is too long."])
def test_error_of_an_answer_is_two_sentences(what: str) -> None:
    assert sentences(RequestError(what, "Shorten it.")) == f"{what.rstrip('.')}. Shorten it."
