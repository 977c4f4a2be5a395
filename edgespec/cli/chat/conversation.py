"""The messages of a chat, and the file that keeps them.

Knows messages and the form of input.json. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from edgespec.artifacts.json_files import write_json
from edgespec.artifacts.outputs import refuse_overwriting
from edgespec.errors import RequestError
from edgespec.prompts import ImageItem, Message
from edgespec.prompts.parse import messages as parse_messages
from edgespec.prompts.places import JsonPlace
from edgespec.prompts.source import MAX_FILE_BYTES, parse_json, read_bytes

ROOM = 4 * 2**20  # for the texts of a conversation's file
SHAPE = "Write a system message at most first, then user and assistant in turn."


@dataclass
class Conversation:
    """What was said so far: the system prompt, and exchanges of a user's turn and its answer."""

    system: str = ""
    exchanges: list[tuple[Message, Message]] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """All messages, in order."""
        system = [Message("system", self.system)] if self.system else []
        return [*system, *chain.from_iterable(self.exchanges)]

    def and_then(self, turn: Message) -> list[Message]:
        """Returns all messages with the user's new turn last."""
        return [*self.messages, turn]

    @property
    def images(self) -> list[ImageItem]:
        """All images, in order."""
        return [image for message in self.messages for image in message.images]

    def with_images(self, images: Iterable[ImageItem]) -> Conversation:
        """The same conversation with others in their places, in order."""
        left = iter(images)

        def changed(message: Message) -> Message:
            parts = [p if isinstance(p, str) else next(left) for p in message.parts]
            return Message.of(message.role, parts) if parts else message

        return Conversation(self.system, [(changed(a), changed(b)) for a, b in self.exchanges])

    def add(self, turn: Message, answer: str) -> None:
        """Keeps an exchange: the user's turn and the answer's text."""
        self.exchanges.append((turn, Message("assistant", answer)))


def of_messages(messages: Sequence[Message], place: JsonPlace) -> Conversation:
    """Returns the conversation of a list of messages.

    Raises RequestError unless they are a system message at most, without images, then users and
    assistants in turn with an assistant last.
    """
    system, rest = "", list(messages)
    if rest and rest[0].role == "system":
        if rest[0].images:
            place.item(0).refuse(
                "has an image, and the system prompt of a chat is a text", "Move it to a user's."
            )
        system = rest.pop(0).content
    for index, message in enumerate(rest, start=len(messages) - len(rest)):
        due = "assistant" if (index - (len(messages) - len(rest))) % 2 else "user"
        if message.role != due:
            place.item(index).refuse(f"is of the role {message.role}, not {due}", SHAPE)
    if len(rest) % 2:
        place.refuse("ends with a turn that has no answer", "Remove the last message.")
    return Conversation(system, list(zip(rest[::2], rest[1::2], strict=True)))


def save(conversation: Conversation, path: Path) -> None:
    """Writes a conversation as an input.json with one request, atomically.

    Images are in it with their bytes. Raises RequestError, also for more of them than a file may
    have, and OverwriteError for a file in the directory of a model.
    """
    refuse_overwriting(path, ())
    turns = [message.to_dict(whole=True) for message in conversation.messages]
    if sum(len(image.source) for image in conversation.images) > MAX_FILE_BYTES - ROOM:
        raise RequestError(
            f"the images of the conversation make a file of more than {MAX_FILE_BYTES} bytes, which"
            " would not be read again",
            "Take smaller ones: /undo drops the last exchange.",
        )
    try:
        write_json(path, {"requests": [{"messages": turns}]})
    except OSError as error:
        raise RequestError(
            f"{path} cannot be written: {error.strerror}.", "Name a file in an existing directory."
        ) from error


def load(path: Path) -> Conversation:
    """Returns the conversation of a file: what `save` wrote, an object with `messages`, or a list
    of messages. Raises RequestError that names the place."""
    source = str(path)
    place, raw = JsonPlace(source), parse_json(read_bytes(path), source)
    if isinstance(raw, dict) and "requests" in raw:
        requests = raw["requests"]
        if not isinstance(requests, list) or len(requests) != 1:
            place.key("requests").refuse("is not a list of one request", "Keep one request.")
        place, raw = place.key("requests").item(0), requests[0]
    if isinstance(raw, dict):
        place, raw = place.key("messages"), raw.get("messages")
    return of_messages(parse_messages(raw, place), place)


def home_path(text: str) -> Path:
    """Returns the path that a user typed, with ~ for the home directory. Raises RequestError for an
    empty one."""
    if not text:
        raise RequestError("no file was named", 'Write it behind the command: "/save talk.json".')
    return Path(text).expanduser()
