"""What a request is made of in the form of OpenAI's Responses: items, tools, text and reasoning.

Knows their shapes, and the form that chat has for them. Items of the assistant that follow each
other are one message, as the model wrote them. A check raises RequestError with its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from edgespec.prompts import checks
from edgespec.prompts import tools as functions
from edgespec.prompts.parse import (
    MAX_MESSAGES,
    as_list,
    as_object,
    check_images,
    check_names,
    check_total,
    message,
    message_text,
)
from edgespec.prompts.places import JsonPlace, show
from edgespec.serve.fields import one_of
from edgespec.serve.openai_chat import CHOICES, EFFORTS
from edgespec.serve.openai_common import data_images_only
from edgespec.serve.structured import text_format

# Type of an item of the input -> its keys, beside those that answers give to all
ITEMS = {
    "message": ("role", "content", "phase"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output", "name"),
    "reasoning": ("summary", "content", "encrypted_content"),
}
GIVEN = ("type", "id", "status")
SILENT = (None, False)  # values of other keys that ask for nothing
# Keys of `reasoning` that change nothing here -> why
UNREAD = {
    "summary": "thoughts are sent as they are",
    "generate_summary": "thoughts are sent as they are",
    "context": "the chat template says what it keeps of thoughts",
    "mode": "there is one mode",
}
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "encrypted_content: only who encrypted thoughts can read them"
PLAIN = {"format": {"type": "text"}}


class Told(NamedTuple):
    """What was made of a field, what answers repeat of it, and what of it changes nothing."""

    value: Any
    told: Any = None
    notes: tuple[str, ...] = ()


def conversation(value: object, here: JsonPlace) -> Told:
    """Returns the messages of a text or of items."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    items = as_list(value, here, 'write a text, or [{"role": "user", "content": "Hello"}]')
    here.at_most(MAX_MESSAGES, len(items), "items", "Send fewer.")
    found: list[tuple[dict[str, Any], JsonPlace]] = []
    notes: dict[str, None] = {}
    for index, item in enumerate(items):
        there = here.item(index)
        kind, parts = item_of(item, there)
        made = MADE[kind](parts, there)
        if kind == "reasoning" and not made["reasoning_content"]:
            notes |= {ENCRYPTED: None} if "encrypted_content" in parts else {}
            continue
        if found and made["role"] == found[-1][0]["role"] == "assistant":
            before, place = found[-1]
            found[-1] = merged(before, made), there if kind == "message" else place
        else:
            found.append((made, there))
    messages = [message(*one) for one in found]
    for one, (_, there) in zip(messages, found, strict=True):
        data_images_only([image.source for image in one.images], there)
    check_total((f"{one.content}{one.more or ''}" for one in messages), here)
    check_images(messages, here)
    return Told(messages, notes=(*notes,))


def item_of(item: object, here: JsonPlace) -> tuple[str, dict[str, Any]]:
    """The type of an item, and its parts."""
    parts = {name: own for name, own in as_object(item, here).items() if own not in SILENT}
    kind = parts.get("type", "message" if "role" in parts else None)
    if kind == "item_reference":
        here.refuse("refers to an item, and nothing is stored", "Send the item itself.")
    kind = one_of(*ITEMS)(kind, here.key("type"))
    check_names(parts, (*GIVEN, *ITEMS[kind]), here)
    return kind, parts


def said(parts: Mapping[str, Any], here: JsonPlace) -> dict[str, Any]:
    """A message as chat has it."""
    return {"role": parts.get("role"), "content": blocks_of(parts.get("content"))}


def called(parts: Mapping[str, Any], here: JsonPlace) -> dict[str, Any]:
    """The message of a call."""
    own_id, name, written = (
        checks.text(parts.get(name), here.key(name)) for name in ITEMS["function_call"]
    )
    try:
        arguments = json.loads(written or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        problem = f"is {show(written)}, which is no object of JSON"
        here.key("arguments").refuse(problem, "Write an object as a text.")
    function = {"name": name, "arguments": arguments}
    call = {"id": own_id, "type": "function", "function": function}
    return {"role": "assistant", "content": [], "tool_calls": [call]}


def returned(parts: Mapping[str, Any], here: JsonPlace) -> dict[str, Any]:
    """The message of a call's result."""
    own_id = checks.text(parts.get("call_id"), here.key("call_id"))
    content = blocks_of(parts.get("output"))
    return {"role": "tool", "content": content, "tool_call_id": own_id, "name": parts.get("name")}


def thought(parts: Mapping[str, Any], here: JsonPlace) -> dict[str, Any]:
    """The message of thoughts: their summary where there are no others."""
    name = "content" if parts.get("content") else "summary"
    blocks, there = parts.get(name, []), here.key(name)
    if not isinstance(blocks, list):
        there.refuse(f"is {show(blocks)}, not a list", "Send the item as it came.")
    texts = (as_object(block, there.item(i)).get("text") for i, block in enumerate(blocks))
    own = "".join(checks.text(text, there.item(i).key("text")) for i, text in enumerate(texts))
    return {"role": "assistant", "content": [], "reasoning_content": own}


MADE = {
    "message": said,
    "function_call": called,
    "function_call_output": returned,
    "reasoning": thought,
}


def blocks_of(content: Any) -> Any:
    """A content as chat has it: what answers say is text."""
    return [*map(block_of, content)] if isinstance(content, list) else content


def block_of(block: Any) -> Any:
    """A block of a content as chat has it."""
    kind = block.get("type") if isinstance(block, dict) else None
    names = {"output_text": "text", "refusal": "refusal"}
    return {"type": "text", "text": block.get(names[kind])} if kind in names else block


def merged(before: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """Two messages of the assistant as one."""
    both = [listed(own["content"]) for own in (before, made)]
    between = [{"type": "text", "text": "\n\n"}] if all(both) else []
    return {
        "role": "assistant",
        "content": [*both[0], *between, *both[1]],
        "tool_calls": [*before.get("tool_calls", ()), *made.get("tool_calls", ())],
        "reasoning_content": "".join(own.get("reasoning_content", "") for own in (before, made)),
    }


def listed(content: Any) -> list[Any]:
    """A content as blocks."""
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def offered(value: object, here: JsonPlace) -> Told:
    """Returns functions as chat has them."""
    found, told = [], []
    for index, item in enumerate(
        value if value == [] else as_list(value, here, "write a list of functions")
    ):
        there = here.item(index)
        parts = {name: own for name, own in as_object(item, there).items() if own is not None}
        if (kind := parts.get("type")) != "function":
            there.key("type").refuse(
                f"is {show(kind)}, and functions alone are called", "Remove it."
            )
        if "function" in parts:
            like = '{"type": "function", "name": "...", "parameters": {...}}'
            there.refuse("is in the form of /v1/chat/completions", f"Write {like}.")
        strict = checks.flag(parts.pop("strict", False), there.key("strict"))
        own = {name: own for name, own in parts.items() if own is not False and name != "type"}
        check_names(own, ("name", "description", "parameters"), there)
        for name in {"name"} | {"description"} & own.keys():
            checks.text(own.get(name), there.key(name))
        if "parameters" in own:
            as_object(own["parameters"], there.key("parameters"))
        found.append({"type": "function", "function": own})
        told.append({"type": "function", "parameters": None, **own, "strict": strict})
    return Told(functions.tools(found, here), told)


def tool_choice(value: object, here: JsonPlace) -> str | tuple[str]:
    """Returns a word, or the name of the one function that is to be called."""
    if isinstance(value, str) and value in CHOICES:
        return value
    if not isinstance(value, dict) or value.get("type") != "function":
        remedy = f'Write one of {", ".join(CHOICES)}, or {{"type": "function", "name": "..."}}.'
        here.refuse(f"is {show(value)}", remedy)
    check_names(value, ("type", "name"), here)
    return (checks.text(value.get("name"), here.key("name")),)


def text(value: object, here: JsonPlace) -> Told:
    """Returns the form of the answer; None for a text."""
    parts = {name: own for name, own in as_object(value, here).items() if own is not None}
    check_names(parts, ("format", "verbosity"), here)
    form = parts.get("format", PLAIN["format"])
    loud = parts.get("verbosity", "medium") != "medium"
    notes = ("text.verbosity: the model does not know it",) if loud else ()
    return Told(text_format(form, here.key("format")), {"format": form}, notes)


def reasoning(value: object, here: JsonPlace) -> Told:
    """Returns the effort; None where none is asked for."""
    parts = {name: own for name, own in as_object(value, here).items() if own is not None}
    check_names(parts, ("effort", *UNREAD), here)
    effort = parts.get("effort")
    if effort is not None:
        one_of(*EFFORTS, "max")(effort, here.key("effort"))
    notes = tuple(f"reasoning.{name}: {why}" for name, why in UNREAD.items() if name in parts)
    return Told(effort, {"effort": effort, "summary": None}, notes)


def include(value: object, here: JsonPlace) -> Told:
    """Returns nothing: what there is comes without being asked for."""
    names = value if isinstance(value, list) else [value]
    for index, name in enumerate(names):
        checks.text(name, here.item(index))
        if name == LOGPROBS:
            here.item(index).refuse("is not there", "Ask /v1/chat/completions for logprobs.")
    return Told(None, notes=("include: answers have all that there is",) if names else ())


def instructions(value: object, here: JsonPlace) -> str:
    """Returns the text of the system message."""
    return message_text(checks.text(value, here), here)
