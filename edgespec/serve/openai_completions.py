"""OpenAI's `POST /v1/completions`: texts or token ids that are continued as they are.

Knows the fields and the shapes. Several prompts are answered together; choice p * n + i is the i-th
answer to prompt p.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from edgespec.errors import RequestError
from edgespec.prompts import checks
from edgespec.prompts.places import JsonPlace, show
from edgespec.runtime.loop.generation import Chunk, Response
from edgespec.runtime.loop.sequence import Candidates
from edgespec.serve.answering import Answers, Ask
from edgespec.serve.fields import BOOLEAN, INTEGER, INTEGERS, STRING, Fields, Values, refused, taken
from edgespec.serve.fields import token_ids as ids_check
from edgespec.serve.openai_common import (
    COMMON,
    Head,
    finish_reason,
    logprob_of,
    own_logprob,
    room_of,
    samplings,
    speculation_of,
    turn_of,
    usage_of,
    with_adjusted,
)
from edgespec.serve.responding import respond
from edgespec.serve.service import Call, Ticket
from edgespec.serve.sse import DONE

MAX_TOKENS = 16  # OpenAI's default
TextPrompt = str | list[int]


def prompts(value: object, here: JsonPlace) -> list[TextPrompt]:
    """Returns the prompts of a text, of token ids, or of a list of either."""
    if isinstance(value, str):
        return [checks.text(value, here)]
    if not isinstance(value, list) or not value:
        here.refuse(f"is {show(value)}", "Write a text, token ids, or a list of either.")
    if isinstance(value[0], int):
        return [ids_check(value, here)]
    read: list[TextPrompt] = [
        checks.text(item, here.item(index))
        if isinstance(item, str)
        else ids_check(item, here.item(index))
        for index, item in enumerate(value)
    ]
    return read


TEXT = {"anyOf": [STRING, INTEGERS]}
FIELDS: Fields = {
    **COMMON,
    "prompt": taken(prompts, {"anyOf": [*TEXT["anyOf"], {"type": "array"}]}, required=True),
    "max_tokens": taken(checks.SAMPLING["max_generate_length"], INTEGER),
    "logprobs": taken(checks.SAMPLING["num_logprobs"], INTEGER),
    "echo": taken(checks.flag, BOOLEAN),
    "suffix": refused("the model continues a text, and fills none in", ""),
    "add_special_tokens": refused("a text has the tokenizer's own", True),
}


async def answer(call: Call) -> ASGIApp:
    """The response to a request."""
    asked = CompletionRequest(call, Head.new("text_completion", "cmpl", call.service.name))
    count = len(call.values["prompt"]) * call.values.get("n", 1)
    return await respond(call, asked, count, done=DONE)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request as it was read."""

    call: Call
    head: Head

    @property
    def values(self) -> Values:
        """The values of its fields."""
        return self.call.values

    async def answers(self, ticket: Ticket) -> Answers:
        """The answers, once the prompts are encoded."""
        service, values = self.call.service, self.values
        logprobs, asks = values.get("logprobs"), list[Ask]()
        scored = values.get("echo") and logprobs is not None
        if scored and values.get("stream"):
            message = "request: the log-probabilities of an echoed prompt are not streamed."
            raise RequestError(message, "Leave stream out.", param="logprobs")
        num_logprobs = 0 if logprobs is None else max(1, logprobs)
        asked = values.get("max_tokens", MAX_TOKENS)
        prompt_logprobs = (logprobs if scored else 0) if scored or not asked else None
        for text in values["prompt"]:
            ids = await asyncio.to_thread(service.engine.encode, text)
            room = room_of(service, len(ids), asked, self.call.adjusted)
            sampled = samplings(values, room, num_logprobs, prompt_logprobs)
            asks += [Ask(ids, one, **turn_of(values)) for one in sampled]
        return Answers(service, asks, ticket)

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """All answers as one object."""
        responses = dict[int, Response]()
        async for index, event in answers.events():
            if isinstance(event, Response):
                responses[index] = event
        choices = []
        for index, ask in enumerate(answers.asks):
            response = responses[index]
            echo = self.echo_of(ask)
            ids: Sequence[int] = response.token_ids
            steps: Sequence[Candidates | None] = response.logprobs
            if self.values.get("echo"):  # from the prompt's first token on
                ids = [*ask.prompt, *ids]
                steps = [*response.prompt_logprobs, *steps]
            logprobs = self.logprobs(ids, steps, 0)
            more = self.ids_of(ask.prompt, "prompt_token_ids") | self.ids_of(response.token_ids)
            choice = choice_of(index, echo + response.text, logprobs, finish_reason(response))
            several = len(answers.asks) > 1
            choices.append({**choice, **more, **(speculation_of(response) if several else {})})
        answer = {**self.head.to_dict(), "choices": choices, **self.ending(answers, responses)}
        return with_adjusted(answer, self.call.adjusted)

    async def parts(self, answers: Answers) -> AsyncIterator[dict[str, Any]]:
        """The answers piece by piece, with the prompt first where it is echoed."""
        responses, head, adjusted = dict[int, Response](), self.head.to_dict(), self.call.adjusted
        lengths = [0] * len(answers.asks)  # characters that were sent
        wants = self.values.get("stream_options", {})
        nothing = {"usage": None} if wants.get("include_usage") else {}
        for index, ask in enumerate(answers.asks):
            if echo := self.echo_of(ask):
                lengths[index] = len(echo)
                yield with_adjusted({**head, "choices": [choice_of(index, echo)]}, adjusted)
                adjusted = []
        async for index, event in answers.events():
            if isinstance(event, Chunk):
                logprobs = self.logprobs(event.token_ids, event.logprobs, lengths[index])
                more = self.ids_of(event.token_ids)
                lengths[index] += len(event.text)
                if event.text or more or logprobs:
                    choice = {**choice_of(index, event.text, logprobs), **more}
                    yield with_adjusted({**head, "choices": [choice], **nothing}, adjusted)
                    adjusted = []
                continue
            responses[index] = event
            last = choice_of(index, "", None, finish_reason(event))
            alone = speculation_of(event) if not wants.get("include_usage") else {}
            if len(answers.asks) > 1:
                last, alone = {**last, **speculation_of(event)}, {}
            yield with_adjusted({**head, "choices": [last], **nothing, **alone}, adjusted)
            adjusted = []
        if wants.get("include_usage"):
            yield {**head, "choices": [], **self.ending(answers, responses)}

    def ending(self, answers: Answers, responses: dict[int, Response]) -> dict[str, Any]:
        """The usage, and what was drafted where there is one answer."""
        prompts = {id(ask.prompt): len(ask.prompt) for ask in answers.asks}
        usage = usage_of(sum(prompts.values()), [*responses.values()])
        return {"usage": usage, **(speculation_of(responses[0]) if len(responses) == 1 else {})}

    def echo_of(self, ask: Ask) -> str:
        """The prompt's text, where it is to stand before the answer."""
        return self.call.service.engine.decode(ask.prompt) if self.values.get("echo") else ""

    def logprobs(
        self, token_ids: Sequence[int], steps: Sequence[Candidates | None], offset: int
    ) -> dict[str, Any] | None:
        """The log-probabilities of some tokens, where they are asked for; their text begins at
        `offset`. The first token of a prompt has none."""
        if self.values.get("logprobs") is None:
            return None
        tokenizer, top = self.call.service.engine.tokenizer, self.values["logprobs"]
        pairs = list(zip(token_ids, steps, strict=True))
        texts = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in token_ids]
        offsets = [offset]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        return {
            "tokens": texts,
            "token_logprobs": [
                None if step is None else logprob_of(own_logprob(step, i)) for i, step in pairs
            ],
            "top_logprobs": [
                None
                if step is None
                else {
                    tokenizer.token_bytes(i).decode("utf-8", "replace"): logprob_of(p)
                    for i, p in dict([*step[:top], (drawn, own_logprob(step, drawn))]).items()
                }
                for drawn, step in pairs
            ],
            "text_offset": offsets[:-1],
        }

    def ids_of(self, token_ids: Sequence[int], name: str = "token_ids") -> dict[str, Any]:
        """Token ids, where they are asked for."""
        return {name: [*token_ids]} if self.values.get("return_token_ids") else {}


def choice_of(
    index: int, text: str, logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    """One choice, or what is added to it."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
