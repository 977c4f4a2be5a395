"""Parses `input.json`: the place, default and precedence of each key.

Knows the keys of the file, and rejects those that this version does not support. Knows nothing of
tokens, templates or engines: the engine checks whether a request fits it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Unpack

from edgespec.prompts import checks
from edgespec.prompts.checks import Check, flag, integer, text_size, unsupported
from edgespec.prompts.image_item import MAX_IMAGES, ImageItem, check_source
from edgespec.prompts.places import JsonPlace, did_you_mean, show
from edgespec.prompts.rendering import RENDERING
from edgespec.prompts.source import parse_json, read_bytes
from edgespec.prompts.types import (
    MESSAGE_PARTS,
    Message,
    Overrides,
    Request,
    RequestFile,
    SamplingParams,
)

# A server takes the same: an agent sends hundreds of messages, and files in some of them
MAX_MESSAGES = 4096
MAX_CONTENT_ITEMS = 1024  # of a message
MAX_MESSAGE_BYTES = 2**20
MAX_REQUEST_BYTES = 2**22

# Of a message, or of a part of it, in the dumps of OpenAI's clients
CLIENT_KEYS = {
    "annotations",
    "audio",
    "cache_control",
    "function_call",
    "refusal",
}
REASONING = "reasoning"  # as some servers name it, vLLM among them
NOTHING: tuple[object, ...] = (None, "", [], {})
TALKER = "talker_*"
Values = dict[str, Any]  # checked values by key


def read_requests(path: str | os.PathLike[str], **overrides: Unpack[Overrides]) -> RequestFile:
    """Reads `input.json`. Overrides take precedence over all values in the file.

    Raises RequestError that names the place in the file.
    """
    return parse_requests(parse_json(read_bytes(path), str(path)), str(path), **overrides)


def parse_requests(raw: object, source: str, **overrides: Unpack[Overrides]) -> RequestFile:
    """Returns the requests of the parsed JSON of an input file.

    `source` is the file's name in messages. Raises RequestError that names the place.
    """
    given = checked_overrides(overrides)
    here = JsonPlace(source)
    top = _values(as_object(raw, here), TOP, here)
    base = with_values(PLAIN_REQUEST, top | given, here)
    items = as_list(
        top.get("requests"),
        here.key("requests"),
        "add a non-empty list of requests, each with messages",
    )
    requests = tuple(
        _request(index, item, base, given, here.key("requests").item(index))
        for index, item in enumerate(items)
    )
    return RequestFile(
        Path(source), requests, batch_size=(BATCH_OF_ONE | top | given)["batch_size"]
    )


def checked_overrides(overrides: Overrides) -> Values:
    """Returns the overrides that are not None, checked like the file.

    Raises RequestError for an invalid value and TypeError for an unknown name.
    """
    if unknown := sorted(set(overrides) - set(Overrides.__annotations__)):
        raise TypeError(
            f"{unknown[0]} is not an override; known: {', '.join(Overrides.__annotations__)}"
        )
    here = JsonPlace("command line")
    return {
        key: KEYS[key].check(value, here.key(key))
        for key, value in overrides.items()
        if value is not None
    }


def with_values(base: Request, values: Values, here: JsonPlace) -> Request:
    """Returns `base` with the given values replaced. Raises RequestError where they do not go
    together."""
    most, least, scored = (
        values.get(name, getattr(base.sampling, name))
        for name in ("max_generate_length", "min_tokens", "prompt_logprobs")
    )
    checks.check_lengths(most, least, scored, here)
    sampling = {key: values[key] for key in checks.SAMPLING if key in values}
    own = {field: values[key] for key, field in FIELDS.items() if key in values}
    rendering = {key: values[key] for key in RENDERING if key in values}
    # Most requests have neither: they share the file's, which are checked once
    return replace(
        base,
        sampling=replace(base.sampling, **sampling) if sampling else base.sampling,
        rendering=replace(base.rendering, **rendering) if rendering else base.rendering,
        **own,
    )


def _request(index: int, raw: object, base: Request, given: Values, here: JsonPlace) -> Request:
    parts = as_object(raw, here)
    own = _values({**parts, "messages": parts.get("messages")}, REQUEST, here)
    if own.get("disable_spec_decode") and own.get("speculative") is not None:
        here.key("speculative").refuse(
            "says how to draft, and disable_spec_decode is true", "Leave one of the two out."
        )
    not_given = {key: own[key] for key in own if key not in given}
    return replace(with_values(base, not_given, here), index=index)


# --- messages


def messages(raw: object, here: JsonPlace) -> tuple[Message, ...]:
    """Returns the messages of a request. Raises RequestError that names the place."""
    items = as_list(raw, here, 'add a list such as [{"role": "user", "content": "Hello"}]')
    here.at_most(MAX_MESSAGES, len(items), "messages", "Send fewer messages.")
    parsed = tuple(message(item, here.item(index)) for index, item in enumerate(items))
    check_total((f"{message.content}{message.more or ''}" for message in parsed), here)
    check_images(parsed, here)
    return parsed


def message_text(text: str, here: JsonPlace) -> str:
    """Returns the text of a message. Raises RequestError if it is too long."""
    size_bytes = text_size(text, here)
    here.at_most(MAX_MESSAGE_BYTES, size_bytes, "bytes of text", "Shorten the message.")
    return text


def check_total(texts: Iterable[str], here: JsonPlace) -> None:
    """Raises RequestError if the texts of a request are too long in total."""
    size_bytes = sum(len(text.encode()) for text in texts)
    remedy = "Send fewer messages, or shorter ones."
    here.at_most(MAX_REQUEST_BYTES, size_bytes, "bytes of text in all", remedy)


def check_images(messages: Iterable[Message], here: JsonPlace) -> None:
    """Raises RequestError if the messages of a request have too many images in total."""
    num_images = sum(len(message.images) for message in messages)
    here.at_most(MAX_IMAGES, num_images, "images in all", "Send fewer images.")


def message(raw: object, here: JsonPlace) -> Message:
    """Returns a message of the file, or one as OpenAI's clients dump it: what is null or empty
    there says nothing. Raises RequestError that names the place."""
    parts = without_empty(as_object(raw, here), here)
    check_names(parts, ("role", "content", *MESSAGE_PARTS, REASONING), here)
    role, content = checks.role(parts.get("role"), here.key("role")), parts.get("content")
    given = {name: parts[name] for name in MESSAGE_PARTS if parts.get(name) not in NOTHING}
    if parts.get(REASONING) not in NOTHING:
        given.setdefault("reasoning_content", parts[REASONING])
    more: Values = {
        name: MESSAGE_PARTS[name](value, here.key(name)) for name, value in given.items()
    }
    if role == "assistant" and content in NOTHING:
        return Message(role, "", **more)  # it called tools, or thought alone
    return Message.of(role, _content(content, here.key("content")), **more)


def without_empty(parts: Mapping[str, object], here: JsonPlace) -> dict[str, object]:
    """An object without the keys of clients that hold nothing; RequestError for one of them that
    holds something."""
    for name in CLIENT_KEYS.intersection(parts):
        if parts[name] not in NOTHING:
            message = f"is {show(parts[name])}, which this version does not take"
            here.key(name).refuse(message, "Remove it.")
    return {name: value for name, value in parts.items() if name not in CLIENT_KEYS}


def _content(raw: object, here: JsonPlace) -> list[str | ImageItem]:
    if isinstance(raw, str):
        return [message_text(raw, here)]
    items = as_list(
        raw, here, 'write a string, or a list such as [{"type": "text", "text": "Hello"}]'
    )
    here.at_most(MAX_CONTENT_ITEMS, len(items), "items", "Join the text items.")
    parts = [_content_item(item, here.item(index)) for index, item in enumerate(items)]
    message_text("".join(part for part in parts if isinstance(part, str)), here)
    return parts


def _content_item(raw: object, here: JsonPlace) -> str | ImageItem:
    parts = as_object(raw, here)
    kind = parts.get("type")
    if isinstance(kind, str) and kind in REFUSED_ITEMS:
        message = f"is of type {kind}, and this version reads texts and images"
        here.refuse(message, REFUSED_ITEMS[kind])
    if not isinstance(kind, str) or kind not in ITEMS:
        here.key("type").refuse(f"is {show(kind)}", f"Write {TEXT_ITEM}, or {IMAGE_ITEM}.")
    return ITEMS[kind](without_empty(parts, here), here)


def _text_item(parts: Mapping[str, object], here: JsonPlace) -> str:
    check_names(parts, ("type", "text"), here)
    text = parts.get("text")
    if not isinstance(text, str):
        here.key("text").refuse(f"is {show(text)}, not a string", f"Write {TEXT_ITEM}.")
    return text


def _image_item(parts: Mapping[str, object], here: JsonPlace) -> ImageItem:
    check_names(parts, ("type", "image"), here)
    if "image" not in parts:
        here.key("image").refuse("is missing", f"Write {IMAGE_ITEM}.")
    return ImageItem(check_source(parts["image"], here.key("image")))


def _image_url_item(parts: Mapping[str, object], here: JsonPlace) -> ImageItem:
    """As OpenAI's clients write it: the URL itself, or in an object with its detail."""
    check_names(parts, ("type", "image_url", "detail", "file_id"), here)
    if parts.get("file_id") is not None:
        here.key("file_id").refuse("names a file on a server", f"Write {IMAGE_ITEM}.")
    _check_detail(parts, here)
    there, url = here.key("image_url"), parts.get("image_url")
    if isinstance(url, dict):
        check_names(url, ("url", "detail"), there)
        _check_detail(url, there)
        there, url = there.key("url"), url.get("url")
    if url is None:
        there.refuse("is missing", f"Write {IMAGE_ITEM}.")
    return ImageItem(check_source(url, there))


def _check_detail(parts: Mapping[str, object], here: JsonPlace) -> None:
    """Whatever it says, the size of an image follows from the model alone."""
    if (detail := parts.get("detail")) not in DETAILS:
        here.key("detail").refuse(f"is {show(detail)}", 'Write "auto", "low" or "high".')


DETAILS = (None, "auto", "low", "high")
TEXT_ITEM = '{"type": "text", "text": "..."}'
IMAGE_ITEM = '{"type": "image", "image": "picture.png"}'
ITEMS: dict[str, Callable[[Mapping[str, object], JsonPlace], str | ImageItem]] = {
    "text": _text_item,
    "input_text": _text_item,
    "image": _image_item,
    "image_url": _image_url_item,
    "input_image": _image_url_item,
}
NO_VIDEO = "Send some frames of the video as image items."
NO_AUDIO = "Send what was said as a text item."
NO_FILES = "Send what it says as a text item."
REFUSED_ITEMS = {
    "video": NO_VIDEO,
    "video_url": NO_VIDEO,
    "input_video": NO_VIDEO,
    "audio": NO_AUDIO,
    "audio_url": NO_AUDIO,
    "input_audio": NO_AUDIO,
    "file": NO_FILES,
    "input_file": NO_FILES,
}


# --- shapes


def as_object(raw: object, here: JsonPlace) -> dict[str, object]:
    """Returns a JSON object. Raises RequestError for other values."""
    if not isinstance(raw, dict):
        here.refuse(f"is {show(raw)}, not an object", "Write an object: {...}.")
    return raw


def as_list(raw: object, here: JsonPlace, remedy: str) -> list[object]:
    """Returns a JSON list that is not empty. Raises RequestError with `remedy` for other values."""
    remedy = f"{remedy[0].upper()}{remedy[1:]}."
    if raw is None:
        here.refuse("is missing", remedy)
    if not isinstance(raw, list):
        here.refuse(f"is {show(raw)}, not a list", remedy)
    if not raw:
        here.refuse("is empty", remedy)
    return raw


def keys_and_values(value: object, here: JsonPlace) -> dict[str, object] | None:
    """Returns an object, whose keys the engine checks; null is none. Raises RequestError."""
    return None if value is None else as_object(value, here)


def unchecked(value: object, here: JsonPlace) -> object:
    """Returns the value, which is checked later."""
    return value


# --- the table of keys

TOP, REQUEST = "top", "request"
BOTH = (TOP, REQUEST)
BELONGS = {TOP: "at the top level of the file", REQUEST: "in each of the requests"}


class Key(NamedTuple):
    """The places of a key, and the check of its value."""

    places: tuple[str, ...]
    check: Check[object]


KEYS: dict[str, Key] = {
    "batch_size": Key((TOP,), integer(1, checks.MAX_BATCH_SIZE)),
    "requests": Key((TOP,), unchecked),
    "messages": Key((REQUEST,), messages),
    **{name: Key(BOTH, check) for name, check in checks.SAMPLING.items()},
    **{name: Key(BOTH, check) for name, check in RENDERING.items()},
    "disable_spec_decode": Key((REQUEST,), flag),
    "speculative": Key(BOTH, keys_and_values),
    "save_system_prompt_kv_cache": Key((REQUEST,), flag),
    "lora_name": Key(BOTH, unsupported("there are no LoRA adapters", "")),
    "available_lora_weights": Key(BOTH, unsupported("there are no LoRA adapters", {})),
    "streaming": Key(BOTH, unsupported("it belongs to audio output", False, {})),
    TALKER: Key(BOTH, unsupported("it belongs to audio output")),
}

# Keys of the file -> fields of Request
FIELDS = {
    "messages": "messages",
    "disable_spec_decode": "disable_spec_decode",
    "speculative": "speculative",
    "save_system_prompt_kv_cache": "keep_system_prompt",
}

# Names in other engines -> ours
ALSO_CALLED = {
    "max_tokens": "max_generate_length",
    "max_new_tokens": "max_generate_length",
    "max_completion_tokens": "max_generate_length",
    "top_logprobs": "num_logprobs",
    "stop_words": "stop",
    "stop_strings": "stop",
}

PLAIN_REQUEST = Request(index=0, messages=(), sampling=SamplingParams())
BATCH_OF_ONE = {"batch_size": 1}
assert set(checks.SAMPLING) == {field.name for field in fields(SamplingParams)}


def _values(given: Mapping[str, object], place: str, here: JsonPlace) -> Values:
    values: Values = {}
    for name, value in given.items():
        key = KEYS.get(_row(name))
        if key is None:
            known = [key for key in KEYS if place in KEYS[key].places and key != TALKER]
            refuse_name(name, known, here)
        if place not in key.places:
            here.key(name).refuse(
                "is in the wrong place", f'"{name}" belongs {BELONGS[key.places[0]]}.'
            )
        values[name] = key.check(value, here.key(name))
    return values


def check_names(given: Mapping[str, object], known: Iterable[str], here: JsonPlace) -> None:
    """Raises RequestError for the first unknown key."""
    for name in given:
        if name not in known:
            refuse_name(name, known, here)


def refuse_name(name: object, known: Iterable[str], here: JsonPlace) -> NoReturn:
    """Raises RequestError for an unknown key, with the nearest known one."""
    meant = ALSO_CALLED.get(str(name), name)
    remedy = did_you_mean(meant, known, "Did you mean {}? If not, remove the key.")
    here.key(str(name)).refuse(
        "is not a known key", remedy or f"Remove it; the known keys are {', '.join(known)}."
    )


def _row(name: object) -> str:
    return TALKER if isinstance(name, str) and name.startswith("talker_") else str(name)
