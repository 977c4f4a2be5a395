"""`input.json` to requests: which key may stand where, what it defaults to, and which wins.

Knows the keys of the file, and refuses what this version cannot honor. Knows nothing of tokens,
templates or engines: whether a request fits an engine is asked where the engine is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Unpack

from edgespec.prompts import checks
from edgespec.prompts.checks import Check, flag, text_size, unsupported, whole
from edgespec.prompts.places import Place, did_you_mean, show
from edgespec.prompts.source import parse_json, read_bytes
from edgespec.prompts.types import Message, Overrides, Request, RequestFile, SamplingParams

MAX_MESSAGES = 64
MAX_CONTENT_ITEMS = 18
MAX_MESSAGE_BYTES = 128 * 2**10
MAX_REQUEST_BYTES = 2**20

ROLES = ("system", "developer", "user", "assistant", "tool")
TALKER = "talker_*"
Values = dict[str, Any]  # by key, each as its check returned it


def read_requests(path: str | os.PathLike[str], **overrides: Unpack[Overrides]) -> RequestFile:
    """Read `input.json`; a value given here wins over the file, per-request values included.

    Raises RequestError, naming the place in the file and what to do.
    """
    return parse_requests(parse_json(read_bytes(path), str(path)), str(path), **overrides)


def parse_requests(raw: object, source: str, **overrides: Unpack[Overrides]) -> RequestFile:
    """Turn the parsed JSON of an input file into requests; `source` is its name in errors. Raises
    RequestError."""
    given = checked_overrides(overrides)
    here = Place(source)
    top = _values(as_object(raw, here), TOP, here)
    base = with_values(PLAIN_REQUEST, top | given)
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
    """The overrides that are given, checked like the file. Raises RequestError."""
    if strangers := sorted(set(overrides) - set(Overrides.__annotations__)):
        raise TypeError(
            f"{strangers[0]} is not an override; there are {', '.join(Overrides.__annotations__)}"
        )
    here = Place("command line")
    return {
        key: KEYS[key].check(value, here.key(key))
        for key, value in overrides.items()
        if value is not None
    }


def with_values(base: Request, values: Values) -> Request:
    """`base` with what the values say instead."""
    sampling = {key: values[key] for key in checks.SAMPLING if key in values}
    own = {field: values[key] for key, field in FIELDS.items() if key in values}
    # Most requests say nothing of sampling: they share the file's, and nothing is checked again.
    return replace(
        base, sampling=replace(base.sampling, **sampling) if sampling else base.sampling, **own
    )


def _request(index: int, raw: object, base: Request, given: Values, here: Place) -> Request:
    said = as_object(raw, here)
    own = _values({**said, "messages": said.get("messages")}, REQUEST, here)
    return replace(
        with_values(base, {key: own[key] for key in own if key not in given}), index=index
    )


# --- messages


def messages(raw: object, here: Place) -> tuple[Message, ...]:
    items = as_list(raw, here, 'add a list such as [{"role": "user", "content": "Hello"}]')
    if len(items) > MAX_MESSAGES:
        here.refuse(
            f"holds {len(items)} messages, and {MAX_MESSAGES} is the limit", "Send fewer messages."
        )
    found = tuple(_message(item, here.item(index)) for index, item in enumerate(items))
    check_total((message.content for message in found), here)
    return found


def message_text(text: str, here: Place) -> str:
    """The text of one message, within its limit."""
    size_bytes = text_size(text, here)
    if size_bytes > MAX_MESSAGE_BYTES:
        here.refuse(
            f"is {size_bytes} bytes of text, and {MAX_MESSAGE_BYTES} is the limit",
            "Shorten the message.",
        )
    return text


def check_total(texts: Iterable[str], here: Place) -> None:
    size_bytes = sum(len(text.encode()) for text in texts)
    if size_bytes > MAX_REQUEST_BYTES:
        here.refuse(
            f"holds {size_bytes} bytes of text in all, and {MAX_REQUEST_BYTES} is the limit of a"
            " request",
            "Send fewer messages, or shorter ones.",
        )


def _message(raw: object, here: Place) -> Message:
    parts = as_object(raw, here)
    check_names(parts, ("role", "content"), here)
    role = parts.get("role")
    if not isinstance(role, str) or role not in ROLES:
        # Many chat templates skip a role that they do not know without a word, so the door has to
        # be here.
        here.key("role").refuse(
            f"is {show(role)}",
            f"Write one of {', '.join(ROLES)}.{did_you_mean(role, ROLES, ' Did you mean {}?')}",
        )
    return Message(role=role, content=_content(parts.get("content"), here.key("content")))


def _content(raw: object, here: Place) -> str:
    if isinstance(raw, str):
        return message_text(raw, here)
    items = as_list(
        raw, here, 'write a string, or a list such as [{"type": "text", "text": "Hello"}]'
    )
    if len(items) > MAX_CONTENT_ITEMS:
        here.refuse(
            f"holds {len(items)} items, and {MAX_CONTENT_ITEMS} is the limit",
            "Join the text items.",
        )
    return message_text(
        "".join(_content_item(item, here.item(index)) for index, item in enumerate(items)), here
    )


def _content_item(raw: object, here: Place) -> str:
    parts = as_object(raw, here)
    kind = parts.get("type")
    if kind in ("image", "audio", "video"):
        here.refuse(
            f"is of type {kind}, and this version takes text only", f"Remove the {kind} item."
        )
    if kind != "text":
        here.key("type").refuse(f"is {show(kind)}", 'Write {"type": "text", "text": "..."}.')
    check_names(parts, ("type", "text"), here)
    text = parts.get("text")
    if not isinstance(text, str):
        here.key("text").refuse(
            f"is {show(text)}, not a string", 'Write {"type": "text", "text": "..."}.'
        )
    return text


# --- shapes


def as_object(raw: object, here: Place) -> dict[str, object]:
    if not isinstance(raw, dict):
        here.refuse(f"is {show(raw)}, not an object", "Write an object: {...}.")
    return raw


def as_list(raw: object, here: Place, remedy: str) -> list[object]:
    remedy = f"{remedy[0].upper()}{remedy[1:]}."
    if raw is None:
        here.refuse("is missing", remedy)
    if not isinstance(raw, list):
        here.refuse(f"is {show(raw)}, not a list", remedy)
    if not raw:
        here.refuse("is empty", remedy)
    return raw


def as_it_is(value: object, here: Place) -> object:
    return value


# --- the table of keys

TOP, REQUEST = "top", "request"
BOTH = (TOP, REQUEST)
BELONGS = {TOP: "at the top level of the file", REQUEST: "in each of the requests"}


class Key(NamedTuple):
    """Where a key may stand and what its value may be."""

    places: tuple[str, ...]
    check: Check[object]


KEYS: dict[str, Key] = {
    "batch_size": Key((TOP,), whole(1, checks.MAX_BATCH_SIZE)),
    "requests": Key((TOP,), as_it_is),
    "messages": Key((REQUEST,), messages),
    **{name: Key(BOTH, check) for name, check in checks.SAMPLING.items()},
    "apply_chat_template": Key(BOTH, flag),
    "add_generation_prompt": Key(BOTH, flag),
    "enable_thinking": Key(BOTH, flag),
    "disable_spec_decode": Key((REQUEST,), flag),
    "save_system_prompt_kv_cache": Key((REQUEST,), flag),
    "lora_name": Key(BOTH, unsupported("there are no LoRA adapters", "")),
    "available_lora_weights": Key(BOTH, unsupported("there are no LoRA adapters", {})),
    "streaming": Key(BOTH, unsupported("it belongs to audio output", False, {})),
    TALKER: Key(BOTH, unsupported("it belongs to audio output")),
}

# The keys that are a field of Request, by the name that they have there.
FIELDS = {
    "messages": "messages",
    "apply_chat_template": "apply_chat_template",
    "add_generation_prompt": "add_generation_prompt",
    "enable_thinking": "enable_thinking",
    "disable_spec_decode": "disable_spec_decode",
    "save_system_prompt_kv_cache": "keep_system_prompt",
}

# What other engines call them.
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


def _values(given: Mapping[str, object], place: str, here: Place) -> Values:
    values: Values = {}
    for name, value in given.items():
        key = KEYS.get(_row(name))
        if key is None:
            refuse_name(
                name,
                [known for known in KEYS if place in KEYS[known].places and known != TALKER],
                here,
            )
        if place not in key.places:
            here.key(name).refuse(
                "is in the wrong place", f'"{name}" belongs {BELONGS[key.places[0]]}.'
            )
        values[name] = key.check(value, here.key(name))
    return values


def check_names(given: Mapping[str, object], known: Iterable[str], here: Place) -> None:
    for name in given:
        if name not in known:
            refuse_name(name, known, here)


def refuse_name(name: object, known: Iterable[str], here: Place) -> NoReturn:
    meant = ALSO_CALLED.get(str(name), name)
    remedy = did_you_mean(meant, known, "Did you mean {}? If not, remove the key.")
    here.key(str(name)).refuse(
        "is not a known key", remedy or f"Remove it; the known keys are {', '.join(known)}."
    )


def _row(name: object) -> str:
    return TALKER if isinstance(name, str) and name.startswith("talker_") else str(name)
