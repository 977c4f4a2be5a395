"""What a request is made of in Anthropic's form: content blocks, system, tools, thinking and the
form of the answer.

Knows their shapes, and the form that the rest of the package has for them. A check returns what it
made, with what of the value changes nothing here, or raises RequestError with its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from edgespec.prompts import ImageItem, Message, checks
from edgespec.prompts import tools as functions
from edgespec.prompts.guided import guided
from edgespec.prompts.image_item import check_source
from edgespec.prompts.parse import (
    MAX_CONTENT_ITEMS,
    MAX_MESSAGES,
    as_list,
    as_object,
    check_images,
    check_names,
    check_total,
    message_text,
)
from edgespec.prompts.places import JsonPlace, show
from edgespec.serve.fields import one_of

# Keys that change nothing here -> why
UNREAD = {
    "cache_control": "prompts that begin alike share what was read",
    "citations": "answers cite nothing",
    "signature": "thoughts are taken as they come",
    "is_error": "what a tool returned says so itself",
    "caller": "tools run where the client is",
    "eager_input_streaming": "answers are streamed as they come",
    "display": "thoughts are sent as they are",
    "effort": "the model does not know it",
    "budget_tokens": "max_tokens alone limits thoughts",
}
SILENT: tuple[object, ...] = (None, "", False, [])  # values of these that ask for nothing
# Type of a block -> its keys, and who may send it
BLOCKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ("user", "assistant", "system", "tool")),
    "image": (("source",), ("user", "tool")),
    "tool_result": (("tool_use_id", "content"), ("user",)),
    "tool_use": (("id", "name", "input"), ("assistant",)),
    "thinking": (("thinking",), ("assistant",)),
    "redacted_thinking": (("data",), ("assistant",)),
}
REDACTED = "redacted_thinking: only who encrypted thoughts can read them"
MEDIA = ("image/jpeg", "image/png", "image/gif", "image/webp")
ID_PREFIX = "toolu_"  # of calls in answers; some templates take no id but the model's own
CHOICES = {"auto": "auto", "none": "none", "any": "required"}


Blocks = list[tuple[str, dict[str, object], JsonPlace]]  # type, values, place


class Noted(NamedTuple):
    """What was made of a field, and what of it changes nothing."""

    value: Any
    notes: tuple[str, ...] = ()


class Reader:
    """Reads the blocks of one field; `notes` are what of them changes nothing."""

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}

    def keys(self, raw: object, known: tuple[str, ...], here: JsonPlace) -> dict[str, object]:
        """An object's values but for those that change nothing; RequestError for others than the
        known ones."""
        parts = {name: value for name, value in as_object(raw, here).items() if value is not None}
        for name in UNREAD.keys() & parts.keys() - {*known}:
            if parts.pop(name) not in SILENT:
                self.notes[f"{name}: {UNREAD[name]}"] = None
        check_names(parts, known, here)
        return parts

    def blocks(self, raw: object, role: str, here: JsonPlace) -> Blocks:
        """The blocks of a content with their types and places; a string is one of text."""
        if isinstance(raw, str):
            return [("text", {"text": raw}, here)]
        items = as_list(raw, here, 'write a string, or [{"type": "text", "text": "Hello"}]')
        here.at_most(MAX_CONTENT_ITEMS, len(items), "blocks", "Join the blocks of text.")
        found = []
        for index, item in enumerate(items):
            there = here.item(index)
            kind = as_object(item, there).get("type")
            allowed = [name for name, (_, roles) in BLOCKS.items() if role in roles]
            kind = one_of(*allowed)(kind, there.key("type"))
            found.append((kind, self.keys(item, ("type", *BLOCKS[kind][0]), there), there))
        return found

    def part(self, kind: str, parts: Mapping[str, object], here: JsonPlace) -> str | ImageItem:
        """A block of text or an image."""
        if kind == "text":
            return checks.text(parts.get("text"), here.key("text"))
        there = here.key("source")
        source = self.keys(parts.get("source"), ("type", "media_type", "data", "url"), there)
        if one_of("base64", "url")(source.get("type"), there.key("type")) == "url":
            remedy = "Send it as base64."
            there.refuse("is a URL, and only images in the request are taken", remedy)
        media = one_of(*MEDIA)(source.get("media_type"), there.key("media_type"))
        data = checks.text(source.get("data"), there.key("data"))
        return ImageItem(check_source(f"data:{media};base64,{data}", there.key("data")))

    def message(self, role: str, raw: object, here: JsonPlace, **more: Any) -> Message:
        """A message of text and images."""
        return joined(
            role, [self.part(*block) for block in self.blocks(raw, role, here)], here, **more
        )

    def turn(self, role: str, blocks: Blocks, here: JsonPlace) -> list[Message]:
        """The messages of a turn: results of tools have some of their own."""
        found: list[Message] = []
        parts: list[str | ImageItem] = []
        calls: list[dict[str, Any]] = []
        thoughts = ""
        for kind, block, there in blocks:
            if kind in ("text", "image"):
                parts.append(self.part(kind, block, there))
            elif kind == "thinking":
                thoughts += message_text(
                    checks.text(block.get("thinking"), there.key("thinking")), there
                )
            elif kind == "redacted_thinking":
                self.notes[REDACTED] = None
            elif kind == "tool_use":
                calls.append(call_of(block, there))
            else:
                if parts:
                    found.append(joined(role, parts, here))
                    parts = []
                whose = own_id(block.get("tool_use_id"), there.key("tool_use_id"))
                content = block.get("content") or ""
                given = self.message("tool", content, there.key("content"), tool_call_id=whose)
                found.append(given)
        if parts or not found:
            more: dict[str, Any] = {"reasoning_content": thoughts} if thoughts else {}
            found.append(joined(role, parts, here, **more, tool_calls=calls))
        return found


def joined(role: str, parts: list[str | ImageItem], here: JsonPlace, **more: Any) -> Message:
    """A message of parts, of a bounded length."""
    message_text("".join(part for part in parts if isinstance(part, str)), here)
    return Message.of(role, parts, **more)


def call_of(block: Mapping[str, object], here: JsonPlace) -> dict[str, Any]:
    """A call of a tool as OpenAI's clients write it."""
    name = checks.text(block.get("name"), here.key("name"))
    given = as_object(block.get("input"), here.key("input"))
    function = {"name": name, "arguments": given}
    return {
        "id": own_id(block.get("id"), here.key("id")),
        "type": "function",
        "function": function,
    }


def own_id(value: object, here: JsonPlace) -> str:
    """The id of a call as the model's form has it."""
    return checks.text(value, here).removeprefix(ID_PREFIX)


# ---- checks of fields


def conversation(value: object, here: JsonPlace) -> Noted:
    """Returns the messages of a conversation that the user ended."""
    reader, turns, role = Reader(), list[tuple[str, Blocks, JsonPlace]](), ""
    items = as_list(value, here, 'add a list such as [{"role": "user", "content": "Hello"}]')
    here.at_most(MAX_MESSAGES, len(items), "messages", "Send fewer messages.")
    for index, item in enumerate(items):
        there = here.item(index)
        parts = reader.keys(item, ("role", "content"), there)
        last, check = role, one_of("user", "assistant", "system")
        role = check(parts.get("role"), there.key("role"))
        blocks = reader.blocks(parts.get("content"), role, there.key("content"))
        if role != last:
            turns.append((role, blocks, there.key("content")))
            continue
        merged = turns[-1][1]
        if merged[-1][0] == blocks[0][0] == "text":
            merged.append(("text", {"text": "\n\n"}, there))
        merged += blocks
    if role == "assistant":
        problem = "is the assistant's, and an answer begins a message of its own"
        here.item(len(items) - 1).refuse(problem, "End with a message of the user.")
    messages = [message for turn in turns for message in reader.turn(*turn)]
    check_total((f"{message.content}{message.more or ''}" for message in messages), here)
    check_images(messages, here)
    return Noted(messages, (*reader.notes,))


def system(value: object, here: JsonPlace) -> Noted:
    """Returns the system message of a string or of blocks of text."""
    reader = Reader()
    return Noted([reader.message("system", value, here)], (*reader.notes,))


def offered(value: object, here: JsonPlace) -> Noted:
    """Returns tools as OpenAI's clients write them."""
    reader, found = Reader(), []
    items = value if value == [] else as_list(value, here, "write a list of tools")
    for index, item in enumerate(items):
        there = here.item(index)
        kind = as_object(item, there).get("type")
        if kind not in (None, "custom"):
            there.key("type").refuse(f"is {show(kind)}, and there are no tools here", "Remove it.")
        known = ("type", "name", "description", "input_schema")
        parts = reader.keys(item, known, there)
        function = {"name": checks.text(parts.get("name"), there.key("name"))}
        if "description" in parts:
            function["description"] = checks.text(parts["description"], there.key("description"))
        schema = as_object(parts.get("input_schema"), there.key("input_schema"))
        found.append({"type": "function", "function": {**function, "parameters": schema}})
    return Noted(functions.tools(found, here), (*reader.notes,))


def tool_choice(value: object, here: JsonPlace) -> tuple[str | tuple[str], bool]:
    """Returns which function is to be called, as `Calling` has it, and whether several may be."""
    parts = as_object(value, here)
    kind = one_of(*CHOICES, "tool")(parts.get("type"), here.key("type"))
    known = ("type", "name")[: 1 + (kind == "tool")]
    check_names(parts, (*known, "disable_parallel_tool_use"), here)
    there = here.key("disable_parallel_tool_use")
    single = checks.flag(parts.get("disable_parallel_tool_use", False), there)
    if kind == "tool":
        return (checks.text(parts.get("name"), here.key("name")),), not single
    return CHOICES[kind], not single


def thinking(value: object, here: JsonPlace) -> Noted:
    """Returns how thinking is asked for: enabled, disabled or adaptive."""
    reader = Reader()
    parts = reader.keys(value, ("type",), here)
    kind = one_of("enabled", "disabled", "adaptive")(parts.get("type"), here.key("type"))
    return Noted(kind, (*reader.notes,))


def output_config(value: object, here: JsonPlace) -> Noted:
    """Returns the form that an answer is to have; None for a text."""
    reader, there = Reader(), here.key("format")
    asked = reader.keys(value, ("format",), here).get("format")
    if asked is None:
        return Noted(None, (*reader.notes,))
    parts = reader.keys(asked, ("type", "schema"), there)
    one_of("json_schema")(parts.get("type"), there.key("type"))
    schema = as_object(parts.get("schema"), there.key("schema"))
    return Noted(guided({"json_schema": schema}, there), (*reader.notes,))
