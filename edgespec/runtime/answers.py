"""Answers a request file with an engine: one answer a turn of each request, none harmed by another.

Knows requests, conversations and answers. How tokens come about stands in `engine` and below.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgespec.errors import EdgeSpecError, RequestError
from edgespec.prompts import CANCELLED, ERROR, Message, Request
from edgespec.runtime.engine import Engine, with_seed
from edgespec.runtime.jobs import Chunk, Job, Response
from edgespec.runtime.lossless_check import Difference, first_difference
from edgespec.runtime.tokenizer import Tokenizer
from edgespec.runtime.tree import DraftPlan

Observer = Callable[[Chunk], None]
Stopping = Callable[[], bool]


@dataclass(frozen=True)
class Answer:
    """A turn of a request and what came of it: a response, or the error that it alone met.

    `messages` are the conversation up to this turn, the answers to earlier turns among them.
    """

    request: Request
    turn: int = 0
    messages: tuple[Message, ...] = ()
    prompt: str = ""  # the text that was tokenised
    system_prompt: str = ""
    response: Response | None = None
    speculative: bool = False
    plain: Response | None = None  # with a check of losslessness: the same request without drafts
    difference: Difference | None = None
    error: EdgeSpecError | None = None
    cancelled: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.request.index, self.turn


class Answers:
    """Runs requests `batch_size` at a time. `stopping` is asked after every step: once it says yes,
    what is under way ends there and the rest is cancelled."""

    def __init__(
        self,
        engine: Engine,
        plan: DraftPlan | None,
        batch_size: int = 1,
        *,
        observe: Observer = lambda chunk: None,
        stopping: Stopping = lambda: False,
    ) -> None:
        self.engine, self.plan, self.batch_size = engine, plan, batch_size
        self.observe, self.stopping = observe, stopping

    def run(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """An Answer for every turn of every request, in the order in which they end."""
        backlog = Backlog(self, requests)
        for job, event in self.engine.serve(backlog, self.batch_size):
            yield from backlog.refused()
            if self.stopping():
                backlog.stop()
            if isinstance(event, Chunk):
                self.observe(event)
                continue
            answer = answered(backlog.asked.pop(job), event)
            yield answer
            request, turn = answer.request, answer.turn + 1
            if answer.error is not None:
                yield from unasked(request, turn, failed_before(request, answer.turn))
            elif answer.cancelled or self.stopping():
                yield from unasked(request, turn)
            elif turn <= len(request.turns):
                backlog.ask(request, turn, following(answer))
        yield from backlog.refused()
        yield from backlog.never_begun()

    def ask(
        self, request: Request, turn: int, messages: tuple[Message, ...]
    ) -> tuple[Answer, Job | None]:
        """A turn as it is put to the engine: its answer to come, and its job, where there can be
        one."""
        plan = None if request.disable_spec_decode else self.plan
        answer = Answer(request, turn, messages, speculative=plan is not None)
        try:
            prompt = self.render(request, messages)
            system_prompt = self.system_prompt(request, messages)
            ids = self.engine.tokenizer.encode(
                prompt, add_special_tokens=not request.apply_chat_template
            )
        except EdgeSpecError as error:
            return replace(answer, error=error), None
        keep = self.common(ids, system_prompt) if request.keep_system_prompt else 0
        job = Job(ids, with_seed(request.sampling), plan, keep, keep_all=turn < len(request.turns))
        return replace(answer, prompt=prompt, system_prompt=system_prompt), job

    def render(self, request: Request, messages: Sequence[Message]) -> str:
        return self.engine.render(
            messages,
            apply_chat_template=request.apply_chat_template,
            add_generation_prompt=request.add_generation_prompt,
            enable_thinking=request.enable_thinking,
        )

    def system_prompt(self, request: Request, messages: Sequence[Message]) -> str:
        """The text of the system messages alone; empty where there are none or the template wants a
        user as well."""
        system = [m for m in messages if m.role == "system"]
        if not system or not request.apply_chat_template:
            return ""
        try:
            return self.engine.render(
                system, add_generation_prompt=False, enable_thinking=request.enable_thinking
            )
        except RequestError:
            return ""

    def common(self, ids: Sequence[int], system_prompt: str) -> int:
        """How many tokens of a prompt are those of its system prompt."""
        system = self.engine.tokenizer.encode(system_prompt) if system_prompt else []
        differing = (i for i, (a, b) in enumerate(zip(ids, system, strict=False)) if a != b)
        return next(differing, min(len(ids), len(system)))

    def compare(self, answers: Iterable[Answer]) -> Iterator[Answer]:
        """The speculative ones again, each with the plain answer to the same prompt and seed, and
        their difference."""
        drafted = [a for a in answers if a.response is not None and a.speculative]
        jobs: dict[Job, Answer] = {}
        for answer in drafted:
            assert answer.response is not None
            sampling = seeded(answer)
            jobs[Job(answer.response.prompt_ids, sampling)] = answer
        queue = deque(jobs)
        found: list[tuple[Answer, Response]] = []
        for job, event in self.engine.serve(queue, self.batch_size):
            if self.stopping():
                queue.clear()
                job.cancel()
            if isinstance(event, Chunk):
                self.observe(event)
            elif isinstance(event, Response) and event.finish_reason != CANCELLED:
                found.append((jobs[job], event))
        for answer, plain in found:
            assert answer.response is not None
            difference = first_difference(self.engine, plain, answer.response, seeded(answer))
            yield replace(answer, plain=plain, difference=difference)


class Backlog:
    """The jobs of requests that wait: each is made when its turn comes, and a later turn of a
    conversation goes before conversations not yet begun, whose rows would drive out its own."""

    def __init__(self, answers: Answers, requests: Sequence[Request]) -> None:
        self.answers, self.waiting = answers, deque(requests)
        self.ready: deque[Job] = deque()
        self.asked: dict[Job, Answer] = {}  # what is under way, or ready
        self.failed: list[Answer] = []  # what could not be asked, until somebody takes it
        self.dropped: list[Answer] = []  # what was asked and not begun

    def __len__(self) -> int:
        while self.waiting and not self.ready and not self.answers.stopping():
            request = self.waiting.popleft()
            self.ask(request, 0, request.messages)
        return len(self.ready)

    def popleft(self) -> Job:
        return self.ready.popleft()

    def ask(self, request: Request, turn: int, messages: tuple[Message, ...]) -> None:
        answer, job = self.answers.ask(request, turn, messages)
        if job is None:
            self.failed += [answer, *unasked(request, turn + 1, failed_before(request, turn))]
        else:
            self.asked[job] = answer
            self.ready.append(job)

    def refused(self) -> Iterator[Answer]:
        """The answers to what could not be asked, each once."""
        failed, self.failed = self.failed, []
        yield from failed

    def stop(self) -> None:
        """Begin nothing more, and end what runs after its step."""
        self.dropped += [self.asked.pop(job) for job in self.ready]
        self.ready.clear()
        for job in self.asked:
            job.cancel()

    def never_begun(self) -> Iterator[Answer]:
        for answer in self.dropped:
            yield from unasked(answer.request, answer.turn)
        for request in self.waiting:
            yield from unasked(request, 0)


def answered(answer: Answer, event: Response | EdgeSpecError) -> Answer:
    if isinstance(event, EdgeSpecError):
        return replace(answer, error=event)
    return replace(answer, response=event, cancelled=event.finish_reason == CANCELLED)


def following(answer: Answer) -> tuple[Message, ...]:
    """The conversation up to the turn after an answer."""
    assert answer.response is not None
    user = Message("user", answer.request.turns[answer.turn])
    return (*answer.messages, Message("assistant", answer.response.text), user)


def failed_before(request: Request, turn: int) -> RequestError:
    return RequestError(
        f"turn {turn} of request {request.index} failed, and this one builds on it",
        "Mend that one.",
    )


def unasked(request: Request, first: int, error: EdgeSpecError | None = None) -> Iterator[Answer]:
    """The turns of a request from `first` on, which were not begun."""
    for turn in range(first, len(request.turns) + 1):
        yield Answer(request, turn, error=error, cancelled=error is None)


def seeded(answer: Answer) -> Any:
    """The sampling of an answered request, with the seed that it used."""
    assert answer.response is not None
    return replace(answer.request.sampling, seed=answer.response.seed or 0)


def to_dict(found: Answer, tokenizer: Tokenizer) -> dict[str, object]:
    """One entry of output.json's `responses`; the tokenizer spells the candidates of
    log-probabilities."""
    request, response = found.request, found.response
    slot = None if response is None else response.slot
    place: dict[str, object] = {"request_idx": request.index, "batch_idx": slot}
    if request.name is not None:
        place["id"] = request.name
    if request.turns:
        place["turn_idx"] = found.turn
    messages = [{"role": m.role, "content": m.content} for m in found.messages]
    if response is None:
        reason = CANCELLED if found.cancelled else ERROR
        text = "" if found.error is None else f"{found.error.what} {found.error.remedy}".strip()
        return {
            "output_text": "",
            "finish_reason": reason,
            "error": text,
            **place,
            "batch_idx": None,
            "messages": messages,
        }
    out: dict[str, object] = {
        "output_text": response.text,
        "output_ids": response.token_ids,
        "finish_reason": response.finish_reason,
        **place,
        "messages": messages,
        "formatted_system_prompt": found.system_prompt,
        "formatted_complete_request": found.prompt,
        "seed": response.seed,
        "metrics": response.metrics.to_dict(speculative=found.speculative),
    }
    if response.logprobs:
        out["logprobs"] = [
            [candidate(tokenizer, i, p) for i, p in step] for step in response.logprobs
        ]
    return out | ({"lossless": lossless(found)} if found.plain is not None else {})


def candidate(tokenizer: Tokenizer, token_id: int, log_prob: float) -> dict[str, object]:
    """The token's own bytes, and as text what of them is UTF-8."""
    raw = tokenizer.token_bytes(token_id)
    finite = log_prob if math.isfinite(log_prob) else None  # JSON has no infinity
    return {
        "token_id": token_id,
        "token": raw.decode("utf-8", "replace"),
        "bytes": [*raw],
        "logprob": finite,
    }


def lossless(found: Answer) -> dict[str, Any]:
    """The report of one check: equal, or the first difference with its margin."""
    if found.difference is None:
        return {"equal": True}
    difference = found.difference
    return {
        "equal": False,
        "near_tie": difference.near_tie,
        "token_index": difference.index,
        "plain_token": difference.plain,
        "speculative_token": difference.speculative,
        "margin": difference.margin if difference.margin < float("inf") else None,
    }
