"""OpenAI's `POST /v1/chat/completions`: messages to one or several answers, whole or as a stream.

Knows the fields and the shapes. Thoughts are sent under both names that clients read,
`reasoning_content` and `reasoning`. A call of a tool is sent once it is whole.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.types import ASGIApp

from edgespec.errors import RequestError
from edgespec.prompts import Message, checks
from edgespec.prompts.parse import messages
from edgespec.prompts.places import JsonPlace, show
from edgespec.prompts.tools import tools
from edgespec.runtime.loop.generation import Chunk, Response
from edgespec.runtime.loop.sequence import Candidates
from edgespec.serve.answering import Answers, Ask
from edgespec.serve.calling import FORCED, Calling
from edgespec.serve.fields import (
    BOOLEAN,
    INTEGER,
    OBJECT,
    STRING,
    Fields,
    Values,
    harmless,
    one_of,
    refused,
    taken,
)
from edgespec.serve.openai_common import (
    COMMON,
    NO_MEANING,
    Head,
    data_images_only,
    finish_reason,
    own_logprob,
    room_of,
    samplings,
    speculation_of,
    template_kwargs,
    thinking_of,
    token_entry,
    turn_of,
    usage_of,
    with_adjusted,
)
from edgespec.serve.responding import respond
from edgespec.serve.service import Call, Ticket
from edgespec.serve.sse import DONE, TextEvent
from edgespec.serve.tool_calls import AnswerSplitter, Items, ToolCall

MAX_TOP_LOGPROBS = 20
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
MORE = ("logprobs", "return_token_ids", "return_speculation")  # beside the text of a chunk
CHOICES = ("none", "auto", "required")
TOOLS = "`tools` has them"
NAMED = '{"type": "function", "function": {"name": "..."}}'
NO_AUDIO = "the model writes text alone"


def server_messages(value: object, here: JsonPlace) -> tuple[Message, ...]:
    """Returns the messages, with images that are in the request alone."""
    read = messages(value, here)
    for index, message in enumerate(read):
        data_images_only([image.source for image in message.images], here.item(index))
    return read


def tool_choice(value: object, here: JsonPlace) -> str | tuple[str]:
    """Returns a word, or the name of the one function that is to be called."""
    if isinstance(value, str) and value in CHOICES:
        return value
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        here.refuse(f"is {show(value)}", f"Write one of {', '.join(CHOICES)}, or {NAMED}.")
    return (name,)


FIELDS: Fields = {
    **COMMON,
    "messages": taken(
        server_messages, {"type": "array", "items": OBJECT, "minItems": 1}, required=True
    ),
    "max_tokens": taken(checks.integer(1, checks.MAX_COUNT), INTEGER),
    "max_completion_tokens": taken(checks.integer(1, checks.MAX_COUNT), INTEGER),
    "logprobs": taken(checks.flag, BOOLEAN),
    "top_logprobs": taken(checks.integer(0, MAX_TOP_LOGPROBS), INTEGER),
    "reasoning_effort": taken(one_of(*EFFORTS), {"enum": [*EFFORTS]}),
    "chat_template_kwargs": taken(template_kwargs, OBJECT),
    "return_speculation": taken(checks.flag, BOOLEAN),
    "store": harmless(NO_MEANING, BOOLEAN, False),
    "metadata": harmless(NO_MEANING, OBJECT),
    "service_tier": harmless(NO_MEANING, STRING),
    "safety_identifier": harmless(NO_MEANING, STRING),
    "prompt_cache_key": harmless("prompts that begin alike share what was read", STRING),
    "prompt_cache_retention": harmless("prefixes are kept as long as there is room", STRING),
    "prediction": harmless("drafts are made without it", OBJECT),
    "tools": taken(tools, {"type": "array", "items": OBJECT}),
    "tool_choice": taken(tool_choice, {"anyOf": [{"enum": [*CHOICES]}, OBJECT]}),
    "parallel_tool_calls": taken(checks.flag, BOOLEAN),
    "functions": refused(TOOLS, []),
    "function_call": refused(TOOLS, "none", "auto"),
    "add_generation_prompt": refused("an answer begins a message of its own", True),
    "continue_final_message": refused("an answer begins a message of its own", False),
    "add_special_tokens": refused("the chat template has them", False),
    "echo": refused("the answer is what the model writes; completions echo", False),
    "include_reasoning": refused("thoughts are sent apart from the answer", True),
    "chat_template": refused("no template of a request is run"),
    "documents": refused("chat templates get messages alone", []),
    "mm_processor_kwargs": refused("the size of an image follows from the model"),
    "modalities": refused(NO_AUDIO, ["text"]),
    "audio": refused(NO_AUDIO),
    "verbosity": refused("the model does not know it", "medium"),
    "web_search_options": refused("nothing is searched"),
}


async def answer(call: Call) -> ASGIApp:
    """The response to a request."""
    kind = "chat.completion.chunk" if call.values.get("stream") else "chat.completion"
    asked = ChatRequest(call, Head.new(kind, "chatcmpl", call.service.name))
    return await respond(call, asked, call.values.get("n", 1), done=DONE)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request as it was read."""

    call: Call
    head: Head

    @property
    def values(self) -> Values:
        """The values of its fields."""
        return self.call.values

    @property
    def num_logprobs(self) -> int:
        """Candidates of each token. Raises RequestError for some without `logprobs`."""
        top = self.values.get("top_logprobs", 0)
        if top and not self.values.get("logprobs"):
            message = "request: top_logprobs goes with logprobs."
            raise RequestError(message, 'Add "logprobs": true.', param="top_logprobs")
        return max(1, top) if self.values.get("logprobs") else 0

    @property
    def max_tokens(self) -> int | None:
        """The tokens of an answer, by either name. Raises RequestError where they differ."""
        names = ("max_completion_tokens", "max_tokens")
        given = {self.values[name] for name in names if name in self.values}
        if len(given) > 1:
            message = "request: max_tokens and max_completion_tokens differ."
            raise RequestError(message, "Leave max_tokens out.", param="max_tokens")
        return next(iter(given), None)

    @property
    def calling(self) -> Calling:
        """The functions that the model may call."""
        choice = self.values.get("tool_choice", "auto")
        several = self.values.get("parallel_tool_calls", True)
        return Calling(self.values.get("tools", ()), choice, several)

    @property
    def wants(self) -> Values:
        """What a stream has beside text."""
        options: Values = self.values.get("stream_options", {})
        return options

    async def answers(self, ticket: Ticket) -> Answers:
        """The answers, once the prompt is encoded."""
        service, calling = self.call.service, self.calling
        num_logprobs, max_tokens = self.num_logprobs, self.max_tokens
        thinking = thinking_of(self.values, service)
        prompt = await calling.encode(self.call, self.values["messages"], thinking)
        guided, turn = calling.guided(service.engine.tokenizer), turn_of(self.values)
        if guided:
            turn["form"] = FORCED
        room = room_of(service, len(prompt), max_tokens, self.call.adjusted)
        asks = [
            Ask(prompt, replace(sampling, guided=guided or sampling.guided), keep=True, **turn)
            for sampling in samplings(self.values, room, num_logprobs)
        ]
        return Answers(service, asks, ticket)

    # ---- whole

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """The answer as one JSON object."""
        splitters, responses = self.splitters(answers), {}
        texts = [ChoiceText(splitter) for splitter in splitters]
        async for index, event in answers.events():
            if isinstance(event, Chunk):
                texts[index].push(event)
            else:
                responses[index] = event
        several = len(texts) > 1
        choices = [
            {
                "index": index,
                "message": text.message(),
                "logprobs": self.logprobs(response.token_ids, response.logprobs),
                "finish_reason": ended(response, text.splitter),
                **self.ids_of(response.token_ids),
                **(speculation_of(response) if several else {}),
            }
            for index, text in enumerate(texts)
            for response in [responses[index]]
        ]
        answer = {
            **self.head.to_dict(),
            "choices": choices,
            **self.ending(answers, responses, splitters),
            **self.ids_of(answers.asks[0].prompt, "prompt_token_ids"),
        }
        return with_adjusted(answer, self.call.adjusted)

    def ending(
        self,
        answers: Answers,
        responses: Mapping[int, Response],
        splitters: Sequence[AnswerSplitter],
    ) -> dict[str, Any]:
        """The usage, and what was drafted where there is one choice."""
        thoughts = sum(splitter.thoughts.num_thoughts for splitter in splitters)
        usage = usage_of(len(answers.asks[0].prompt), [*responses.values()], thoughts)
        return {"usage": usage, **(speculation_of(responses[0]) if len(responses) == 1 else {})}

    # ---- as a stream

    async def parts(self, answers: Answers) -> AsyncIterator[dict[str, Any] | bytes]:
        """The answer part by part: the role first, the usage last, where it is asked for."""
        prompt, responses = answers.asks[0].prompt, dict[int, Response]()
        splitters = self.splitters(answers)
        deltas = [Deltas() for _ in answers.asks]
        numbers, head = [0] * len(answers.asks), self.head.to_dict()

        def part(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            usage: dict[str, Any] = {}
            if self.wants.get("continuous_usage_stats"):
                usage = {"usage": running_usage(len(prompt), sum(numbers))}
            elif self.wants.get("include_usage"):
                usage = {"usage": None}
            return {**head, "choices": [{**choice, **more}], **usage}

        def text_part(index: int, text: str) -> dict[str, Any]:
            return part(index, {"content": text})

        texts = [TextEvent(partial(text_part, index)) for index in range(len(answers.asks))]
        says_more = any(map(self.values.get, MORE)) or self.wants.get("continuous_usage_stats")
        for index in range(len(answers.asks)):
            first = part(index, {"role": "assistant", "content": ""})
            if not index:
                first.update(self.ids_of(prompt, "prompt_token_ids"))
                first = with_adjusted(first, self.call.adjusted)
            yield first
        async for index, event in answers.events():
            if isinstance(event, Chunk):
                numbers[index] += len(event.token_ids)
                pushed = splitters[index].push(event.token_ids, event.pieces)
                delta, *others = deltas[index].of(*pushed) or [{}]
                if not says_more and delta.keys() == {"content"}:
                    yield texts[index].of(delta["content"])
                elif says_more or delta:
                    more = self.ids_of(event.token_ids) | self.step_of(event)
                    if delta or more or (event.logprobs and event.token_ids):
                        logprobs = self.logprobs(event.token_ids, event.logprobs)
                        yield part(index, delta, logprobs=logprobs, **more)
                for delta in others:
                    yield part(index, delta)
                continue
            responses[index] = event
            for delta in deltas[index].of(*splitters[index].flush()):
                yield part(index, delta)
            last = part(index, {}, finish_reason=ended(event, splitters[index]))
            several, with_usage = len(answers.asks) > 1, self.wants.get("include_usage")
            if several:
                last["choices"][0].update(speculation_of(event))
            elif not with_usage:
                last.update(speculation_of(event))
            yield last
        if self.wants.get("include_usage"):
            ending = self.ending(answers, responses, splitters)
            yield {**head, "choices": [], **ending}

    # ---- parts of both

    def splitters(self, answers: Answers) -> list[AnswerSplitter]:
        """What divides the text of each choice."""
        return [self.calling.splitter(self.call, ask.prompt) for ask in answers.asks]

    def logprobs(
        self, token_ids: Sequence[int], steps: Sequence[Candidates]
    ) -> dict[str, Any] | None:
        """The log-probabilities of some tokens, where they are asked for."""
        if not self.values.get("logprobs"):
            return None
        tokenizer, top = self.call.service.engine.tokenizer, self.values.get("top_logprobs", 0)
        content = []
        for token_id, step in zip(token_ids, steps, strict=True):
            entry = token_entry(tokenizer, token_id, own_logprob(step, token_id))
            entry["top_logprobs"] = [token_entry(tokenizer, i, p) for i, p in step[:top]]
            content.append(entry)
        return {"content": content, "refusal": None}

    def step_of(self, chunk: Chunk) -> dict[str, Any]:
        """What a step drafted and accepted, where it is asked for: the text of each token, of which
        the first `accepted` were drafts, and the tree, whose nodes have their parents' numbers."""
        if not self.values.get("return_speculation") or not chunk.token_ids:
            return {}
        step = {"pieces": chunk.pieces, "accepted": chunk.accepted, "tree": None}
        if (tree := chunk.tree) is not None:
            names = [self.call.service.engine.tokenizer.token_bytes(int(i)) for i in tree.tokens]
            step["tree"] = {
                "tokens": [name.decode("utf-8", "replace") for name in names],
                "parents": tree.parents.tolist(),
                "probs": None if tree.probs is None else tree.probs.tolist(),
                "path": [int(node) for node in chunk.path],
            }
        return {"speculation": step}

    def ids_of(self, token_ids: Sequence[int], name: str = "token_ids") -> dict[str, Any]:
        """Token ids, where they are asked for."""
        return {name: [*token_ids]} if self.values.get("return_token_ids") else {}


class ChoiceText:
    """The text of one choice as it comes."""

    def __init__(self, splitter: AnswerSplitter) -> None:
        self.splitter, self.thoughts, self.content = splitter, "", ""
        self.calls: list[ToolCall] = []

    def push(self, chunk: Chunk) -> None:
        """Takes in what a step added."""
        self.add(*self.splitter.push(chunk.token_ids, chunk.pieces))

    def add(self, thoughts: str, items: Items) -> None:
        """Takes in thoughts, text and calls."""
        self.thoughts += thoughts
        self.content += "".join(item for item in items if isinstance(item, str))
        self.calls += [item for item in items if isinstance(item, ToolCall)]

    def message(self) -> dict[str, Any]:
        """The message, once all has come."""
        self.add(*self.splitter.flush())
        content: dict[str, Any] = {"content": self.content}
        if self.calls:
            calls = [{"id": call.id, **function(call.name, call.arguments)} for call in self.calls]
            content = {"content": self.content or None, "tool_calls": calls}
        return {"role": "assistant", **content, "refusal": None, **thoughts_of(self.thoughts)}


class Deltas:
    """What is sent of one choice in a stream, whose calls it counts."""

    def __init__(self) -> None:
        self.num_calls = 0

    def of(self, thoughts: str, items: Items) -> list[dict[str, Any]]:
        """What one event adds: thoughts and text together, and of each call its name, and then its
        arguments."""
        found = [thoughts_of(thoughts)]
        for item in items:
            if isinstance(item, ToolCall):
                index, self.num_calls = self.num_calls, self.num_calls + 1
                first = {"index": index, "id": item.id, **function(item.name, "")}
                rest = {"index": index, "function": {"arguments": item.arguments}}
                found += [{"tool_calls": [first]}, {"tool_calls": [rest]}]
            elif "tool_calls" in found[-1]:
                found.append({"content": item})
            else:
                found[-1]["content"] = found[-1].get("content", "") + item
        return found if found[0] else found[1:]


def function(name: str, arguments: str) -> dict[str, Any]:
    """A call of a function as OpenAI's clients read it."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def ended(response: Response, splitter: AnswerSplitter) -> str:
    """Why an answer ended, which may be that it called."""
    reason = finish_reason(response)
    return "tool_calls" if splitter.num_calls and reason == "stop" else reason


def thoughts_of(thoughts: str) -> dict[str, Any]:
    """Thoughts under both names that clients read."""
    return {"reasoning_content": thoughts, "reasoning": thoughts} if thoughts else {}


def running_usage(num_prompt: int, num_completion: int) -> dict[str, int]:
    """The usage so far."""
    total = num_prompt + num_completion
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": total,
    }
