"""What a prompt may be: a text, the messages of a conversation, or token ids.

Tells the three from each other by their types. Knows no tokenizer and no template.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import RequestError
from edgespec.prompts import Message
from edgespec.prompts.checks import text_size
from edgespec.prompts.parse import check_images, message
from edgespec.prompts.places import JsonPlace, show

# Messages may also be written as OpenAI's clients write them
Conversation = Sequence[Message | Mapping[str, object]]
Prompt = str | Conversation | Sequence[int] | NDArray[np.integer[Any]]

HERE = JsonPlace("prompt")
ONE_OF = 'a text, a list of messages ({"role": "user", "content": "..."}) or a list of token ids'


def read_prompt(prompt: Prompt) -> str | tuple[Message, ...] | list[int]:
    """A prompt as one of the three, checked. Raises RequestError."""
    if isinstance(prompt, str):
        text_size(prompt, HERE)
        return prompt
    items = items_of(prompt)
    if items and all(isinstance(item, Message | Mapping) for item in items):
        return read_messages(items)
    return [token_id(item, index) for index, item in enumerate(items)]


def read_messages(messages: Conversation) -> tuple[Message, ...]:
    """Messages of either form as `Message`. Raises RequestError that names the place."""
    read = tuple(
        item if isinstance(item, Message) else message(item, HERE.item(index))
        for index, item in enumerate(items_of(messages))
    )
    check_images(read, HERE)
    return read


def has_images(prompt: object) -> bool:
    """Whether a prompt may have images: messages, one of which has more than a text. Checks nothing
    else."""
    return isinstance(prompt, list | tuple) and any(
        bool(item.images)
        if isinstance(item, Message)
        else isinstance(item, Mapping) and not isinstance(item.get("content"), str)
        for item in prompt
    )


def items_of(prompt: object) -> list[Any]:
    """The items of a list. RequestError for what is none, or has no order."""
    if isinstance(prompt, bytes | bytearray | memoryview):
        HERE.refuse(f"is {type(prompt).__name__}, not text", "Decode it: prompt.decode().")
    if isinstance(prompt, Message | Mapping):
        HERE.refuse("is one message, not a list of messages", "Put it into a list: [message].")
    if isinstance(prompt, Set) or not isinstance(prompt, Iterable):
        HERE.refuse(f"is of type {type(prompt).__name__}", f"Give {ONE_OF}.")
    return list(prompt)


def token_id(item: object, index: int) -> int:
    """An item of a list as a token id, of whatever type of integer. Raises RequestError."""
    try:
        if not isinstance(item, bool | np.bool_):
            return operator.index(item)  # type: ignore[arg-type]
    except TypeError:
        pass
    kind = "a message" if isinstance(item, Message | Mapping) else show(item)
    message = f"prompt[{index}] is {kind}: a prompt is {ONE_OF}"
    raise RequestError(message, "Give one of the three, not a mixture.")
