"""Validated requests, and the finish reasons of a response.

Knows the values. Knows nothing of JSON or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from edgespec.prompts import checks
from edgespec.prompts.guided import Guided
from edgespec.prompts.image_item import ImageItem
from edgespec.prompts.places import JsonPlace, show
from edgespec.prompts.rendering import DEFAULT_RENDERING, Rendering
from edgespec.prompts.tools import calls_as_text, tool_calls

END_OF_SEQUENCE = "end-of-sequence"
MAX_LENGTH = "max-length"
CAPACITY = "capacity"  # the KV cache is full before the length is reached
STOP_WORDS = "stop-words"
CANCELLED = "cancelled"
TIMEOUT = "timeout"  # its deadline has passed
ERROR = "error"

NO_BIAS = checks.LogitBias()


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; the text items of a content array are joined.

    `role` is system, developer, user, assistant or tool. A message with images has texts and images
    in order in `parts`, and `content` is its texts, joined; `Message.of` makes one. An answer has
    `tool_calls` as OpenAI's clients write them, and the message with a call's result its
    `tool_call_id`, perhaps the function's `name` too. What of these a prompt shows is the chat
    template's choice. Raises RequestError for another role, and for values of other types.
    """

    role: str
    content: str
    parts: tuple[str | ImageItem, ...] = ()  # empty: content alone
    tool_calls: Sequence[Mapping[str, Any]] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None  # what the model thought before its answer

    def __post_init__(self) -> None:
        here = JsonPlace("Message")
        checks.role(self.role, here.key("role"))
        checks.text(self.content, here.key("content"))
        for name, check in MESSAGE_PARTS.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check(value, here.key(name)))
        object.__setattr__(self, "parts", tuple(self.parts))
        for index, part in enumerate(self.parts):
            if not isinstance(part, str | ImageItem):
                problem = f"is {show(part)}, neither a text nor an image"
                here.key("parts").item(index).refuse(problem, 'Write edgespec.ImageItem("a.png").')
        if self.parts and _joined(self.parts) != self.content:
            here.key("content").refuse(
                "is not the texts of parts", "Write Message.of(role, parts)."
            )

    @classmethod
    def of(cls, role: str, parts: Iterable[str | ImageItem], **more: Any) -> Message:
        """A message of texts and images in order; without an image its texts are joined. `more` are
        its other values."""
        parts = tuple(parts)
        has_images = any(not isinstance(part, str) for part in parts)
        return cls(role, _joined(parts), parts if has_images else (), **more)

    @property
    def more(self) -> dict[str, Any]:
        """What it has beside role and content, as chat templates read it."""
        found = {name: getattr(self, name) for name in MESSAGE_PARTS if getattr(self, name)}
        return found | ({"tool_calls": [*self.tool_calls]} if self.tool_calls else {})

    @property
    def images(self) -> tuple[ImageItem, ...]:
        """The images of the message, in order."""
        return tuple(part for part in self.parts if isinstance(part, ImageItem))

    def mapped(self, change: Callable[[Any], Any]) -> Message:
        """The same with all of its texts changed, those in its calls too."""
        more = {name: change(value) for name, value in self.more.items()}
        if not self.parts:
            return replace(self, content=change(self.content), **more)
        parts = [change(part) if isinstance(part, str) else part for part in self.parts]
        return Message.of(self.role, parts, **more)

    def to_dict(self, *, whole: bool = False) -> dict[str, object]:
        """The message as JSON, in the form of input.json; unless it is to be `whole`, a `data:` URL
        is shortened."""
        more = self.more
        if self.tool_calls:
            more["tool_calls"] = calls_as_text(self.tool_calls)
        if not self.parts:
            return {"role": self.role, "content": self.content, **more}
        items = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "image": part.source if whole else part.echo}
            for part in self.parts
        ]
        return {"role": self.role, "content": items, **more}


# What a message may have beside role and content
MESSAGE_PARTS: dict[str, checks.Check[object]] = {
    "tool_calls": tool_calls,
    "tool_call_id": checks.text,
    "name": checks.text,
    "reasoning_content": checks.text,
}


def _joined(parts: Iterable[str | ImageItem]) -> str:
    return "".join(part for part in parts if isinstance(part, str))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample the next token, and when to stop.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 are off;
    `seed` None is a random seed. `logit_bias` may also be a dict with ids or digit strings, and
    `stop` a string or a list. `presence_penalty` and `frequency_penalty` are taken off the logits
    of what the answer has so far: once for each token, and once for each time. The first
    `min_tokens` hold no end, no token of `stop_token_ids` and no `stop`; with `ignore_eos` the
    model's end tokens end nothing. `prompt_logprobs` are the candidates of each token of the prompt
    in the Response, 0 for the token alone; `max_generate_length` may be 0 with them.
    `guided` is the form of the answer (docs/structured.md). Raises
    RequestError for values that input.json could not have either.
    """

    temperature: float = 1.0
    top_p: float = 0.8
    top_k: int = 50
    seed: int | None = None
    max_generate_length: int = 256
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = NO_BIAS
    stop: tuple[str, ...] = ()
    num_logprobs: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    guided: Guided | None = None

    def __post_init__(self) -> None:
        here = JsonPlace("SamplingParams")
        for name, check in checks.SAMPLING.items():
            object.__setattr__(self, name, check(getattr(self, name), here.key(name)))
        checks.check_lengths(self.max_generate_length, self.min_tokens, self.prompt_logprobs, here)


@dataclass(frozen=True, slots=True)
class Request:
    """One conversation to continue."""

    index: int  # its position in the file
    messages: tuple[Message, ...]
    sampling: SamplingParams
    disable_spec_decode: bool = False
    speculative: Mapping[str, object] | None = None  # keys and values; the engine checks them
    rendering: Rendering = DEFAULT_RENDERING
    keep_system_prompt: bool = True  # cache its KV for later requests; changes no output
    turns: tuple[str, ...] = ()  # later user turns, each sent after the response to the one before
    name: str | None = None  # its id in a prompt set


@dataclass(frozen=True, slots=True)
class RequestFile:
    """All requests of one file, in its order."""

    path: Path
    requests: tuple[Request, ...]
    batch_size: int


class Overrides(TypedDict, total=False):
    """Values of the command line for all requests; None keeps the file's value."""

    batch_size: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    max_generate_length: int | None
    num_logprobs: int | None
    guided: object
