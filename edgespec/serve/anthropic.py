"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`.

Knows the fields and the events of an answer; a whole one is its events, joined. `input_tokens` are
those that were read, without `cache_read_input_tokens`, whose KV rows were there. What a
conversation is made of stands in `anthropic_messages`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from edgespec.errors import RequestError
from edgespec.prompts import checks
from edgespec.prompts import types as reasons
from edgespec.runtime.loop.generation import Response
from edgespec.runtime.text.tokenizer import Tokenizer
from edgespec.serve import sse
from edgespec.serve.answering import Answers, Ask
from edgespec.serve.anthropic_messages import (
    ID_PREFIX,
    Noted,
    conversation,
    offered,
    output_config,
    system,
    thinking,
    tool_choice,
)
from edgespec.serve.calling import FORCED, Calling
from edgespec.serve.fields import (
    INTEGER,
    OBJECT,
    STRING,
    STRINGS,
    Fields,
    harmless,
    refused,
    taken,
)
from edgespec.serve.openai_common import (
    COMMON,
    NO_MEANING,
    room_of,
    samplings,
    speculation_of,
    turn_of,
    with_adjusted,
)
from edgespec.serve.responding import respond
from edgespec.serve.service import Call, Ticket
from edgespec.serve.tool_calls import ToolCall

OBJECTS = {"type": "array", "items": OBJECT}
# Why an answer of the engine ended -> as Anthropic's clients know it
STOP_REASONS = {
    reasons.END_OF_SEQUENCE: "end_turn",
    reasons.STOP_WORDS: "stop_sequence",
    reasons.MAX_LENGTH: "max_tokens",
    reasons.CAPACITY: "max_tokens",
    reasons.CANCELLED: "pause_turn",
}
NOT_GIVEN, NO_FORM, DISABLED = Noted(()), Noted(None), Noted("disabled")
PROMPT: Fields = {
    "model": COMMON["model"],
    "messages": taken(conversation, {**OBJECTS, "minItems": 1}, required=True),
    "system": taken(system, {"anyOf": [STRING, OBJECTS]}),
    "thinking": taken(thinking, OBJECT),
    "tools": taken(offered, OBJECTS),
    "tool_choice": taken(tool_choice, OBJECT),
    "cache_control": harmless("prompts that begin alike share what was read", OBJECT),
    "output_config": taken(output_config, OBJECT),
    "speed": refused("there is one speed", "standard"),
}
FIELDS: Fields = {
    **PROMPT,
    "max_tokens": taken(checks.integer(1, checks.MAX_COUNT), INTEGER, required=True),
    "stop_sequences": taken(checks.SAMPLING["stop"], STRINGS),
    **{name: COMMON[name] for name in ("temperature", "top_p", "top_k", "stream")},
    # Not Anthropic's
    **{name: COMMON[name] for name in ("seed", "disable_spec_decode", "priority", "cache_salt")},
    "metadata": harmless(NO_MEANING, OBJECT),
    "service_tier": harmless(NO_MEANING, STRING),
    "inference_geo": harmless(NO_MEANING, STRING),
    "context_management": harmless("prompts are never cut", OBJECT),
    "container": refused("no code is run"),
    "mcp_servers": refused("tools run where the client is", []),
}


async def answer(call: Call) -> ASGIApp:
    """The response to a request."""
    return await respond(call, MessageRequest(call), 1, encode=sse.typed)


async def count_tokens(call: Call) -> ASGIApp:
    """How many tokens the prompt of a request has."""
    return JSONResponse({"input_tokens": len(await prompt_of(call))})


async def prompt_of(call: Call) -> Sequence[int]:
    """The prompt's ids. Raises RequestError, and what encoding images raises."""
    values, engine = call.values, call.service.engine
    notes = (note for value in values.values() if isinstance(value, Noted) for note in value.notes)
    call.adjusted.extend(dict.fromkeys(notes))
    asked = values.get("thinking", DISABLED)
    knows = engine.tokenizer.knows_thinking()
    if asked.value == "enabled" and not knows:
        message = "request: the model's chat template has no thinking mode."
        raise RequestError(message, "Leave thinking out.", param="thinking")
    messages = (*values.get("system", NOT_GIVEN).value, *values["messages"].value)
    return await calling_of(call).encode(call, messages, knows and asked.value != "disabled")


def calling_of(call: Call) -> Calling:
    """The functions that the model may call."""
    tools = call.values.get("tools", NOT_GIVEN).value
    return Calling(tools, *call.values.get("tool_choice", ()))


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A request as it was read."""

    call: Call

    async def answers(self, ticket: Ticket) -> Answers:
        """The answer, once the prompt is encoded."""
        service, values = self.call.service, self.call.values
        guided = calling_of(self.call).guided(service.engine.tokenizer)
        prompt = await prompt_of(self.call)
        room = room_of(service, len(prompt), values["max_tokens"], self.call.adjusted)
        stop, form = values.get("stop_sequences", ()), values.get("output_config", NO_FORM)
        (sampling,) = samplings({**values, "stop": stop}, room, 0)
        sampling = replace(sampling, guided=guided or form.value)
        turn = {**turn_of(values), "form": FORCED if guided else "output_config"}
        return Answers(service, [Ask(prompt, sampling, keep=True, **turn)], ticket)

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """The answer as one message: its events, joined."""
        message: dict[str, Any] = {}
        async for event in self.parts(answers):
            match event["type"]:
                case "message_start":
                    message = event["message"]
                case "content_block_start":
                    message["content"].append(event["content_block"])
                case "content_block_delta":
                    block, delta = message["content"][-1], event["delta"]
                    if block["type"] == "tool_use":
                        block["input"] = json.loads(delta["partial_json"])  # a call comes whole
                    else:
                        block[block["type"]] += delta[block["type"]]
                case "message_delta":
                    more = {name: event[name] for name in event if name not in ("type", "delta")}
                    message |= {**event["delta"], **more}
        return message

    async def parts(self, answers: Answers) -> AsyncIterator[dict[str, Any]]:
        """The events of the answer: blocks of thoughts, text and calls, as they come."""
        prompt = answers.asks[0].prompt
        splitter = calling_of(self.call).splitter(self.call, prompt)
        begun: dict[str, Any] = {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self.call.service.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(len(prompt), 0, 0),
        }
        yield {"type": "message_start", "message": with_adjusted(begun, self.call.adjusted)}
        number, current = -1, ""
        async for _, event in answers.events():
            if isinstance(event, Response):
                thoughts, items = splitter.flush()
            else:
                thoughts, items = splitter.push(event.token_ids, event.pieces)
            pieces = [piece_of("thinking", thoughts)] if thoughts else []
            pieces += [piece_of("text", item) for item in items]
            if isinstance(event, Response) and number < 0 and not pieces:
                pieces = [piece_of("text", "")]
            for block, delta in pieces:
                if block["type"] != current or current == "tool_use":
                    if current:
                        yield {"type": "content_block_stop", "index": number}
                    number, current = number + 1, block["type"]
                    yield {"type": "content_block_start", "index": number, "content_block": block}
                    if not number:
                        yield {"type": "ping"}
                yield {"type": "content_block_delta", "index": number, "delta": delta}
            if isinstance(event, Response):
                yield {"type": "content_block_stop", "index": number}
                yield self.ending(event, called=splitter.num_calls > 0)
                yield {"type": "message_stop"}

    def ending(self, response: Response, *, called: bool) -> dict[str, Any]:
        """The event of why the answer ended, and its usage."""
        of, tokenizer = response.metrics, self.call.service.engine.tokenizer
        stop = stop_sequence_of(response, self.call.values.get("stop_sequences", ()), tokenizer)
        reason = STOP_REASONS[response.finish_reason]
        reason = "tool_use" if called and reason == "end_turn" else reason
        return {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop},
            "usage": usage_of(of.prompt_tokens, of.completion_tokens, of.reused_tokens),
            **speculation_of(response),
        }


def piece_of(kind: str, item: str | ToolCall) -> tuple[dict[str, Any], dict[str, Any]]:
    """A block as it begins, and what is added to it: a call at once, as it comes whole."""
    if isinstance(item, ToolCall):
        own_id = f"{ID_PREFIX}{item.id.removeprefix('call_')}"
        block = {"type": "tool_use", "id": own_id, "name": item.name, "input": {}}
        return block, {"type": "input_json_delta", "partial_json": item.arguments}
    signed = {"signature": ""} if kind == "thinking" else {}  # nobody has to prove thoughts here
    return {"type": kind, kind: "", **signed}, {"type": f"{kind}_delta", kind: item}


def usage_of(num_prompt: int, num_completion: int, num_reused: int) -> dict[str, int]:
    """What was read and written."""
    return {
        "input_tokens": num_prompt - num_reused,
        "cache_read_input_tokens": num_reused,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_completion,
    }


def stop_sequence_of(response: Response, stops: Sequence[str], tokenizer: Tokenizer) -> str | None:
    """The stop sequence that ended an answer: it is behind the text, or the last token's name."""
    if response.finish_reason != reasons.STOP_WORDS:
        return None
    rest = tokenizer.decode(response.token_ids)[len(response.text) :]
    last = tokenizer.token(response.token_ids[-1])
    found = [stop for stop in stops if rest.startswith(stop) or stop == last]
    return min(found, key=len, default=None)
