"""Answers a request file with an engine: one answer per turn of each request.

Knows requests, conversations and answers. How tokens come about stands in `engine` and below.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from edgespec.compat.decoding import DecodingConfig
from edgespec.compat.speculative_config import for_request
from edgespec.errors import EdgeSpecError, RequestError
from edgespec.prompts import CANCELLED, ERROR, Message, Request
from edgespec.runtime.engine import Engine
from edgespec.runtime.faults import FAULTS, as_error
from edgespec.runtime.loop.generation import Chunk, GenerationRequest, Response, with_seed
from edgespec.runtime.requests.lossless_check import Difference, first_difference
from edgespec.runtime.requests.quality import Quality, compared
from edgespec.runtime.text.tokenizer import Tokenizer
from edgespec.runtime.trees.tree import DraftPlan
from edgespec.runtime.vision.image_prompts import RunStopped

NO_CONFIGS: Mapping[int, DecodingConfig] = MappingProxyType({})
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
    prompt: str = ""  # the text that was tokenized
    system_prompt: str = ""
    response: Response | None = None
    speculative: bool = False
    # with a check of losslessness or of quality: the same request without drafts
    plain: Response | None = None
    difference: Difference | None = None
    quality: Quality | None = None
    error: EdgeSpecError | None = None
    cancelled: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """The request's index in the file and the turn, unique in a run."""
        return self.request.index, self.turn


class FileAnswers:
    """Runs requests `batch_size` at a time; those of `configs`, by their index, draft by their own.
    `stopping` is asked after every step: once it says yes, what is under way ends there and the
    rest is cancelled."""

    def __init__(
        self,
        engine: Engine,
        plan: DraftPlan | None,
        batch_size: int = 1,
        configs: Mapping[int, DecodingConfig] = NO_CONFIGS,
        *,
        observe: Observer = lambda chunk: None,
        stopping: Stopping = lambda: False,
    ) -> None:
        self.engine, self.plan, self.batch_size, self.configs = engine, plan, batch_size, configs
        self.observe, self.stopping = observe, stopping

    def run(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """An Answer for every turn of every request, in the order in which they end."""
        queue = RequestQueue(self, requests)
        for asked, event in self.engine.run_queue(queue, self.batch_size, self.stopping):
            yield from queue.take_refused()
            if isinstance(event, Chunk):
                self.observe(event)
                continue
            answer = answered(queue.asked.pop(asked), event)
            yield answer
            request, turn = answer.request, answer.turn + 1
            if answer.error is not None:
                yield from unasked(request, turn, failed_before(request, answer.turn))
            elif answer.cancelled or self.stopping():
                yield from unasked(request, turn)
            elif turn <= len(request.turns):
                queue.ask(request, turn, next_messages(answer), time.perf_counter())
        yield from queue.take_refused()
        yield from queue.never_begun()

    def ask(
        self, request: Request, turn: int, messages: tuple[Message, ...], arrived_s: float
    ) -> tuple[Answer, GenerationRequest | None]:
        """A turn as it is put to the engine: its answer to come, and what is asked, where that can
        be."""
        answer = Answer(request, turn, messages)
        try:
            drafts = self.drafts_of(request)
            answer = replace(answer, speculative=drafts["plan"] is not None)
            prompt = self.engine.prompts.render(messages, request.rendering)
            system_prompt = self.system_prompt(request, messages)
            ids = self.engine.prompts.encode_rendered(
                prompt, messages, request.rendering, stopping=self.stopping
            )
        except RunStopped:
            return replace(answer, cancelled=True), None
        except FAULTS as error:
            return replace(answer, error=as_error(error)), None
        asked = GenerationRequest(
            ids,
            with_seed(request.sampling),
            **drafts,
            keep=self.common(ids, system_prompt) if request.keep_system_prompt else 0,
            keep_all=turn < len(request.turns),
            arrived_s=arrived_s,
            takes_forced=not request.disable_spec_decode,
        )
        return replace(answer, prompt=prompt, system_prompt=system_prompt), asked

    def drafts_of(self, request: Request) -> dict[str, Any]:
        """What drafts for a request and how much, as fields of a GenerationRequest: by its own
        config, else by the plan of the run. Raises LimitError or OptionError."""
        if request.disable_spec_decode or request.index not in self.configs:
            return {"plan": None if request.disable_spec_decode else self.plan}
        asked = for_request(self.configs[request.index], self.engine.method)
        return self.engine.planner.drafts_by(asked)

    def system_prompt(self, request: Request, messages: Sequence[Message]) -> str:
        """The text of the system messages alone; empty where there are none or the template wants a
        user as well."""
        system = [m for m in messages if m.role == "system"]
        if not system or not request.rendering.apply_chat_template:
            return ""
        try:
            opening = replace(request.rendering, add_generation_prompt=False)
            return self.engine.prompts.render(system, opening)
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
        for answer, plain in self.plainly(answers):
            assert answer.response is not None
            difference = first_difference(
                self.engine, plain, answer.response, seeded(answer), self.batch_size
            )
            yield replace(answer, plain=plain, difference=difference)

    def compare_quality(self, answers: Iterable[Answer]) -> Iterator[Answer]:
        """The speculative ones again, each with the plain answer to the same prompt and seed, and
        what the accept rule cost."""
        for answer, plain in self.plainly(answers):
            assert answer.response is not None
            quality = compared(self.engine, answer.response, plain)
            yield replace(answer, plain=plain, quality=quality)

    def plainly(self, answers: Iterable[Answer]) -> list[tuple[Answer, Response]]:
        """The speculative ones with the plain answers to the same prompts and seeds; without those
        that failed plainly or were stopped."""
        arrived_s, asked = time.perf_counter(), dict[GenerationRequest, Answer]()
        for answer in answers:
            if answer.response is not None and answer.speculative:
                prompt_ids, sampling = answer.response.prompt_ids, seeded(answer)
                request = GenerationRequest(
                    prompt_ids, sampling, arrived_s=arrived_s, takes_forced=False
                )
                asked[request] = answer
        queue = deque(asked)
        answered: list[tuple[Answer, Response]] = []
        for request, event in self.engine.run_queue(queue, self.batch_size, self.stopping):
            if self.stopping():
                queue.clear()
            if isinstance(event, Chunk):
                self.observe(event)
            elif isinstance(event, Response) and event.finish_reason != CANCELLED:
                answered.append((asked[request], event))
        return answered


class RequestQueue:
    """The requests of a file that wait: each is rendered when its turn comes, and a later turn of a
    conversation goes before conversations not yet begun, whose rows would evict its own."""

    def __init__(self, answers: FileAnswers, requests: Sequence[Request]) -> None:
        self.answers, self.waiting = answers, deque(requests)
        self.arrived_s = time.perf_counter()  # of all first turns
        self.ready: deque[GenerationRequest] = deque()
        self.asked: dict[GenerationRequest, Answer] = {}  # what is under way, or ready
        self.refused: list[Answer] = []  # what could not be asked, until it is taken

    def __len__(self) -> int:
        """Turns that can be asked; none once the run is to stop."""
        return 0 if self.answers.stopping() else len(self.ready) + len(self.waiting)

    def popleft(self) -> GenerationRequest | None:
        """What is to be asked next; None where that could not be rendered."""
        if not self.ready:
            request = self.waiting.popleft()
            self.ask(request, 0, request.messages, self.arrived_s)
        return self.ready.popleft() if self.ready else None

    def ask(
        self, request: Request, turn: int, messages: tuple[Message, ...], arrived_s: float
    ) -> None:
        """Makes a turn ready, or puts it and the turns after it among the refused ones."""
        answer, asked = self.answers.ask(request, turn, messages, arrived_s)
        if asked is None:
            error = None if answer.cancelled else failed_before(request, turn)
            self.refused += [answer, *unasked(request, turn + 1, error)]
        else:
            self.asked[asked] = answer
            self.ready.append(asked)

    def take_refused(self) -> Iterator[Answer]:
        """The answers to what could not be asked, each once."""
        refused, self.refused = self.refused, []
        yield from refused

    def never_begun(self) -> Iterator[Answer]:
        """The answers to what a stop left in the queue."""
        for asked in self.ready:
            answer = self.asked[asked]
            yield from unasked(answer.request, answer.turn)
        for request in self.waiting:
            yield from unasked(request, 0)


def answered(answer: Answer, event: Response | EdgeSpecError) -> Answer:
    """The answer with the response, or with the error, that ended it."""
    if isinstance(event, EdgeSpecError):
        return replace(answer, error=event)
    return replace(answer, response=event, cancelled=event.finish_reason == CANCELLED)


def next_messages(answer: Answer) -> tuple[Message, ...]:
    """The conversation up to the turn after an answer."""
    assert answer.response is not None
    user = Message("user", answer.request.turns[answer.turn])
    return (*answer.messages, Message("assistant", answer.response.text), user)


def failed_before(request: Request, turn: int) -> RequestError:
    """The error of the turns behind one that failed."""
    return RequestError(
        f"turn {turn} of request {request.index} failed, and this one builds on it",
        "Fix that one.",
    )


def unasked(request: Request, first: int, error: EdgeSpecError | None = None) -> Iterator[Answer]:
    """The turns of a request from `first` on, which were not begun."""
    for turn in range(first, len(request.turns) + 1):
        yield Answer(request, turn, error=error, cancelled=error is None)


def seeded(answer: Answer) -> Any:
    """The sampling of an answered request, with the seed that it used."""
    assert answer.response is not None
    return replace(answer.request.sampling, seed=answer.response.seed or 0)


def to_dict(answer: Answer, tokenizer: Tokenizer) -> dict[str, object]:
    """One entry of output.json's `responses`; the tokenizer spells the candidates of
    log-probabilities."""
    request, response = answer.request, answer.response
    slot = None if response is None else response.slot
    place: dict[str, object] = {"request_idx": request.index, "batch_idx": slot}
    if request.name is not None:
        place["id"] = request.name
    if request.turns:
        place["turn_idx"] = answer.turn
    messages = [message.to_dict() for message in answer.messages]
    if response is None:
        reason = CANCELLED if answer.cancelled else ERROR
        text = "" if answer.error is None else sentences(answer.error)
        return {
            "output_text": "",
            "output_ids": [],
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
        "formatted_system_prompt": answer.system_prompt,
        "formatted_complete_request": answer.prompt,
        "seed": response.seed,
        "metrics": response.metrics.to_dict(speculative=answer.speculative),
    }
    if response.logprobs:
        out["logprobs"] = [
            [candidate(tokenizer, i, p) for i, p in step] for step in response.logprobs
        ]
    if response.prompt_logprobs:
        out["prompt_logprobs"] = [
            step if step is None else [candidate(tokenizer, i, p) for i, p in step]
            for step in response.prompt_logprobs
        ]
    if answer.quality is not None:
        return out | {"quality": answer.quality.to_dict()}
    return out | ({"lossless": lossless(answer)} if answer.plain is not None else {})


def sentences(error: EdgeSpecError) -> str:
    """What happened and the remedy, in one text."""
    message = error.what if error.what.endswith((".", "!", "?")) else f"{error.what}."
    return f"{message} {error.remedy}".strip()


def candidate(tokenizer: Tokenizer, token_id: int, log_prob: float) -> dict[str, object]:
    """One candidate of output.json's `logprobs`: id, bytes, their text where it is UTF-8, and log
    p; null stands for minus infinity."""
    raw = tokenizer.token_bytes(token_id)
    finite = log_prob if math.isfinite(log_prob) else None  # JSON has no infinity
    return {
        "token_id": token_id,
        "token": raw.decode("utf-8", "replace"),
        "bytes": [*raw],
        "logprob": finite,
    }


def lossless(answer: Answer) -> dict[str, Any]:
    """The report of one check: equal, or the first difference with what was measured there."""
    difference = answer.difference
    return {"equal": True} if difference is None else {"equal": False, **difference.to_dict()}
