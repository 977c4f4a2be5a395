"""Tools as OpenAI's clients write them: the functions that a request offers, and the calls in a
conversation, whose arguments are texts of JSON there and objects for chat templates.

Knows their shapes and limits. A check returns the parsed value, or raises RequestError with its
place. Knows no template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.prompts import checks
from edgespec.prompts.places import JsonPlace, show

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 2**20
MAX_CALLS_BYTES = 2**20  # of a message
MAX_KWARGS_BYTES = 2**16
FUNCTION = '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
CALL = '{"type": "function", "id": "...", "function": {"name": "...", "arguments": "{...}"}}'

Objects = tuple[Mapping[str, Any], ...]


def tools(value: object, here: JsonPlace) -> Objects:
    """The functions that a request offers; null is none."""
    found = _items(value, here, MAX_TOOLS_BYTES, FUNCTION)
    for index, item in enumerate(found):
        _function(item, here.item(index), FUNCTION)
    return tuple(found)


def tool_calls(value: object, here: JsonPlace) -> Objects:
    """The calls of a message, their arguments as objects; null is none."""
    found = _items(value, here, MAX_CALLS_BYTES, CALL)
    return tuple(_call(item, here.item(index)) for index, item in enumerate(found))


def chat_template_kwargs(value: object, here: JsonPlace) -> dict[str, Any]:
    """Variables for a chat template by their names; null is none."""
    found = {} if value is None else _json(value, here, MAX_KWARGS_BYTES)
    if not isinstance(found, dict):
        here.refuse(f"is {show(value)}, not an object", 'Write such as {"reasoning_effort": "low"}')
    return found


def calls_as_text(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Calls as OpenAI's clients write them: the arguments are a text."""
    return [call | {"function": _written(call["function"])} for call in map(dict, calls)]


def _written(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


def _call(item: Mapping[str, Any], here: JsonPlace) -> dict[str, Any]:
    function = _function(item, here, CALL)
    there, given = here.key("function").key("arguments"), function.get("arguments") or {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            there.refuse(f"is {show(given)}, which is no JSON", "Write an object as a text.")
    if not isinstance(given, dict):
        there.refuse(f"is {show(given)}, not an object", "Write an object as a text.")
    checks.text(item.get("id", ""), here.key("id"))
    own = {"id": item["id"]} if "id" in item else {}
    return own | {"type": "function", "function": {"name": function["name"], "arguments": given}}


def _function(item: object, here: JsonPlace, like: str) -> dict[str, Any]:
    if not isinstance(item, Mapping) or item.get("type", "function") != "function":
        here.refuse(f"is {show(item)}, not a function", f"Write {like}.")
    function = item.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        here.key("function").refuse(f"is {show(function)}, not a named function", f"Write {like}.")
    return function


def _items(value: object, here: JsonPlace, max_bytes: int, like: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        here.refuse(f"is {show(value)}, not a list", f"Write [{like}].")
    here.at_most(MAX_TOOLS, len(value), "functions", "Send fewer.")
    found: list[Any] = _json(value, here, max_bytes)
    return found


def _json(value: object, here: JsonPlace, max_bytes: int) -> Any:
    """A copy of a value of JSON, of a bounded size."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        here.refuse(f"is no JSON: {error}", "Write objects, lists, texts, numbers, true or null.")
    here.at_most(max_bytes, len(text), "bytes of JSON", "Shorten it.")
    return json.loads(text)
