"""OpenAI's `POST /v1/responses`: items to one answer, whole or as a stream of typed events.

Knows the fields and the events; a whole answer is that of the last event. Nothing is stored: what
refers to what was said before is refused. What a request is made of stands in
`openai_responses_items`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp

from edgespec.errors import RequestError
from edgespec.prompts import Message, checks
from edgespec.prompts.parse import as_object
from edgespec.runtime.loop.generation import Response
from edgespec.serve import sse
from edgespec.serve.answering import Answers, Ask
from edgespec.serve.calling import FORCED, Calling
from edgespec.serve.errors import refusal_of
from edgespec.serve.fields import (
    BOOLEAN,
    INTEGER,
    OBJECT,
    STRING,
    STRINGS,
    Fields,
    Values,
    harmless,
    refused,
    taken,
)
from edgespec.serve.openai_chat import CHOICES
from edgespec.serve.openai_common import (
    COMMON,
    NO_MEANING,
    finish_reason,
    room_of,
    samplings,
    speculation_of,
    turn_of,
    with_adjusted,
)
from edgespec.serve.openai_responses_items import (
    PLAIN,
    Told,
    conversation,
    include,
    instructions,
    offered,
    reasoning,
    text,
    tool_choice,
)
from edgespec.serve.responding import respond
from edgespec.serve.service import Call, Ticket
from edgespec.serve.tool_calls import ToolCall

OBJECTS = {"type": "array", "items": OBJECT}
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # of ids
STORED = "nothing is stored; send the items of the conversation in input"
# Status of an answer with an error -> OpenAI's code
CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
NO_TEXT, NO_TOOLS = Told(None, PLAIN), Told((), [])
NO_EFFORT = Told(None, {"effort": None, "summary": None})
FIELDS: Fields = {
    "input": taken(conversation, {"anyOf": [STRING, OBJECTS]}, required=True),
    "instructions": taken(instructions, STRING),
    "max_output_tokens": taken(checks.integer(1, checks.MAX_COUNT), INTEGER),
    **{name: COMMON[name] for name in ("model", "temperature", "top_p", "stream", "user")},
    "text": taken(text, OBJECT),
    "reasoning": taken(reasoning, OBJECT),
    "tools": taken(offered, OBJECTS),
    "tool_choice": taken(tool_choice, {"anyOf": [{"enum": [*CHOICES]}, OBJECT]}),
    "parallel_tool_calls": taken(checks.flag, BOOLEAN),
    "include": taken(include, STRINGS),
    "metadata": taken(as_object, OBJECT),  # which the answer repeats
    # Not OpenAI's
    **{
        name: COMMON[name]
        for name in ("top_k", "seed", "disable_spec_decode", "priority", "cache_salt")
    },
    "store": harmless("nothing is stored", BOOLEAN, False),
    "stream_options": harmless("events have no padding", OBJECT),
    "truncation": harmless("prompts are never cut", STRING, "disabled"),
    "max_tool_calls": harmless("tools run where the client is", INTEGER),
    "service_tier": harmless(NO_MEANING, STRING, "auto", "default"),
    "safety_identifier": harmless(NO_MEANING, STRING),
    "prompt_cache_key": harmless("prompts that begin alike share what was read", STRING),
    "prompt_cache_retention": harmless("prefixes are kept as long as there is room", STRING),
    "prompt_cache_options": harmless("prefixes are kept as long as there is room", OBJECT),
    "context_management": harmless("prompts are never cut", OBJECTS),
    "previous_response_id": refused(STORED),
    "conversation": refused(STORED),
    "prompt": refused("nothing is stored; write what it says in input"),
    "background": refused("nothing is stored; ask with stream", False),
    "background_options": refused("nothing is stored; ask with stream"),
    "moderation": refused("nothing is moderated"),
    "top_logprobs": refused("/v1/chat/completions has logprobs", 0),
}


# ---- answers


async def answer(call: Call) -> ASGIApp:
    """The response to a request."""
    asked = ResponseRequest(call, Output())
    return await respond(call, asked, 1, encode=sse.typed, failed=asked.failed)


class Output:
    """The items of an answer as they come, and the number of the next event."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.text: str | None = None  # of the item that is open, which is the last
        self.number = 0

    def event(self, kind: str, **values: Any) -> dict[str, Any]:
        """The next event."""
        self.number += 1
        return {"type": f"response.{kind}", "sequence_number": self.number - 1, **values}

    def begun(self, kind: str, **values: Any) -> dict[str, Any]:
        """The event of a new item."""
        own_id = f"{PREFIXES[kind]}_{uuid4().hex}"
        self.items.append({"id": own_id, "type": kind, "status": "in_progress", **values})
        return self.of_item("output_item.added", item={**self.items[-1]})

    def of_item(self, kind: str, **values: Any) -> dict[str, Any]:
        """An event about the last item."""
        where = {} if "item" in values else {"item_id": self.items[-1]["id"]}
        return self.event(kind, **where, output_index=len(self.items) - 1, **values)

    def written(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """The events of a text, which goes on with the open item or begins one."""
        if self.text is None or self.items[-1]["type"] != kind:
            yield from self.closed("completed")
            more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield self.begun(kind, content=[], **more)
            self.text = ""
            yield self.of_item("content_part.added", content_index=0, part=self.part())
        self.text = f"{self.text}{text}"
        yield self.of_item(f"{self.name}.delta", content_index=0, delta=text, **self.logprobs)

    def closed(self, status: str) -> Iterator[dict[str, Any]]:
        """The events of the end of the open item."""
        if self.text is None:
            return
        yield self.of_item(f"{self.name}.done", content_index=0, text=self.text, **self.logprobs)
        yield self.of_item("content_part.done", content_index=0, part=self.part())
        self.end(status)
        yield self.of_item("output_item.done", item=self.items[-1])

    def end(self, status: str) -> None:
        """The open item ends, where there is one."""
        if self.text is not None:
            self.items[-1] |= {"content": [self.part()], "status": status}
            self.text = None

    def called(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        """The events of a call, which comes whole."""
        yield from self.closed("completed")
        yield self.begun("function_call", arguments="", call_id=call.id, name=call.name)
        kind, own = "function_call_arguments", call.arguments
        yield self.of_item(f"{kind}.delta", delta=own)
        yield self.of_item(f"{kind}.done", name=call.name, arguments=own)
        self.items[-1] |= {"arguments": own, "status": "completed"}
        yield self.of_item("output_item.done", item=self.items[-1])

    def added(self, item: str | ToolCall) -> Iterator[dict[str, Any]]:
        """The events of a text or a call."""
        return self.called(item) if isinstance(item, ToolCall) else self.written("message", item)

    @property
    def is_message(self) -> bool:
        """Whether the last item is one."""
        return bool(self.items[-1]["type"] == "message")

    @property
    def name(self) -> str:
        """How events call the text of the last item."""
        return "output_text" if self.is_message else "reasoning_text"

    @property
    def logprobs(self) -> dict[str, Any]:
        """What events of a message's text have beside it."""
        return {"logprobs": []} if self.is_message else {}

    def part(self) -> dict[str, Any]:
        """The open item's content so far."""
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if self.is_message else {}
        return {"type": self.name, "text": self.text, **more}


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A request as it was read, and what was sent of its answer."""

    call: Call
    output: Output
    id: str = field(default_factory=lambda: f"resp_{uuid4().hex}")
    created_at: int = field(default_factory=lambda: int(time.time()))

    @property
    def values(self) -> Values:
        """The values of its fields."""
        return self.call.values

    @property
    def calling(self) -> Calling:
        """The functions that the model may call."""
        tools, values = self.values.get("tools", NO_TOOLS).value, self.values
        several = values.get("parallel_tool_calls", True)
        return Calling(tools, values.get("tool_choice", "auto"), several)

    async def answers(self, ticket: Ticket) -> Answers:
        """The answer, once the prompt is encoded."""
        service, values, adjusted = self.call.service, self.values, self.call.adjusted
        notes = (note for own in values.values() if isinstance(own, Told) for note in own.notes)
        adjusted.extend(dict.fromkeys(notes))
        tokenizer = service.engine.tokenizer
        guided = self.calling.guided(tokenizer)
        thinks = values.get("reasoning", NO_EFFORT).value not in (None, "none")
        if thinks and not tokenizer.knows_thinking():
            message = "request: the model's chat template has no thinking mode."
            raise RequestError(message, "Leave reasoning.effort out.", param="reasoning.effort")
        messages: list[Message] = values["input"].value
        if "instructions" in values:
            messages = [Message("system", values["instructions"]), *messages]
        prompt = await self.calling.encode(self.call, messages, thinks)
        name = "max_output_tokens"
        room = room_of(service, len(prompt), values.get(name), adjusted, name)
        (sampling,) = samplings(values, room, 0)
        form = guided or values.get("text", NO_TEXT).value
        turn = {**turn_of(values), "form": FORCED if guided else "text.format"}
        ask = Ask(prompt, replace(sampling, guided=form), keep=True, **turn)
        return Answers(service, [ask], ticket)

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """The answer as one object: that of the last event."""
        events = [event async for event in self.parts(answers)]
        response: dict[str, Any] = events[-1]["response"]
        return response

    async def parts(self, answers: Answers) -> AsyncIterator[dict[str, Any]]:
        """The events of the answer."""
        output, splitter = self.output, self.calling.splitter(self.call, answers.asks[0].prompt)
        for kind in ("created", "in_progress"):
            yield output.event(kind, response=self.response("in_progress"))
        async for _, event in answers.events():
            if isinstance(event, Response):
                thoughts, items = splitter.flush()
            else:
                thoughts, items = splitter.push(event.token_ids, event.pieces)
            for sent in output.written("reasoning", thoughts) if thoughts else ():
                yield sent
            if isinstance(event, Response) and not output.items and not items:
                items = [""]
            for item in items:
                for sent in output.added(item):
                    yield sent
            if isinstance(event, Response):
                is_cut = finish_reason(event) == "length"
                status = "incomplete" if is_cut else "completed"
                for sent in output.closed(status):
                    yield sent
                usage = usage_of(event, splitter.thoughts.num_thoughts)
                why = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
                own = self.response(status, usage=usage, **why, **speculation_of(event))
                yield output.event(status, response=own)

    def failed(self, error: Exception) -> dict[str, Any]:
        """The event of an error behind what was sent."""
        refusal = refusal_of(error, self.call.service.max_model_len)
        self.output.end("incomplete")
        told = {"code": CODES.get(refusal.status, "server_error"), "message": refusal.message}
        return self.output.event("failed", response=self.response("failed", error=told))

    def response(self, status: str, **more: Any) -> dict[str, Any]:
        """The answer so far."""
        values = self.values
        choice = values.get("tool_choice", "auto")
        named = {"type": "function", "name": choice[0]} if isinstance(choice, tuple) else choice
        own = {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": values.get("instructions"),
            "max_output_tokens": values.get("max_output_tokens"),
            "metadata": values.get("metadata", {}),
            "model": self.call.service.name,
            "output": [*self.output.items],
            "parallel_tool_calls": values.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": values.get("reasoning", NO_EFFORT).told,
            "store": False,
            "temperature": values.get("temperature", 1.0),
            "text": values.get("text", NO_TEXT).told,
            "tool_choice": named,
            "tools": values.get("tools", NO_TOOLS).told,
            "top_p": values.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": None,
        }
        return with_adjusted(own | more, self.call.adjusted)


def usage_of(response: Response, num_thoughts: int) -> dict[str, Any]:
    """What was read and written."""
    own = response.metrics
    return {
        "input_tokens": own.prompt_tokens,
        "input_tokens_details": {"cached_tokens": own.reused_tokens, "cache_write_tokens": 0},
        "output_tokens": own.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_thoughts},
        "total_tokens": own.prompt_tokens + own.completion_tokens,
    }
