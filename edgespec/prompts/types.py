"""Validated requests, and the finish reasons of a response.

Knows the values. Knows nothing of JSON or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from edgespec.prompts import checks
from edgespec.prompts.guided import Guided
from edgespec.prompts.image_item import ImageItem
from edgespec.prompts.places import JsonPlace, show

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
    in order in `parts`, and `content` is its texts, joined; `Message.of` makes one. Raises
    RequestError for another role, and for a content that is not a text.
    """

    role: str
    content: str
    parts: tuple[str | ImageItem, ...] = ()  # empty: content alone

    def __post_init__(self) -> None:
        here = JsonPlace("Message")
        checks.role(self.role, here.key("role"))
        checks.text(self.content, here.key("content"))
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
    def of(cls, role: str, parts: Iterable[str | ImageItem]) -> Message:
        """A message of texts and images in order; without an image its texts are joined."""
        parts = tuple(parts)
        has_images = any(not isinstance(part, str) for part in parts)
        return cls(role, _joined(parts), parts if has_images else ())

    @property
    def images(self) -> tuple[ImageItem, ...]:
        """The images of the message, in order."""
        return tuple(part for part in self.parts if isinstance(part, ImageItem))

    def to_dict(self, *, whole: bool = False) -> dict[str, object]:
        """The message as JSON, in the form of input.json; unless it is to be `whole`, a `data:` URL
        is shortened."""
        if not self.parts:
            return {"role": self.role, "content": self.content}
        items = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "image": part.source if whole else part.echo}
            for part in self.parts
        ]
        return {"role": self.role, "content": items}


def _joined(parts: Iterable[str | ImageItem]) -> str:
    return "".join(part for part in parts if isinstance(part, str))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample the next token, and when to stop.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 are off;
    `seed` None is a random seed. `logit_bias` may also be a dict with ids or digit strings, and
    `stop` a string or a list. `guided` is the form of the answer (docs/structured.md). Raises
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
    guided: Guided | None = None

    def __post_init__(self) -> None:
        here = JsonPlace("SamplingParams")
        for name, check in checks.SAMPLING.items():
            object.__setattr__(self, name, check(getattr(self, name), here.key(name)))


@dataclass(frozen=True, slots=True)
class Request:
    """One conversation to continue."""

    index: int  # its position in the file
    messages: tuple[Message, ...]
    sampling: SamplingParams
    disable_spec_decode: bool = False
    speculative: Mapping[str, object] | None = None  # keys and values; the engine checks them
    apply_chat_template: bool = True
    add_generation_prompt: bool = True
    enable_thinking: bool = False
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
