"""What a request says of the form of its answer: a JSON schema, a regular expression, some choices,
or a grammar.

Knows the values and their sizes. Whether a schema's keys are supported, and how dear a grammar is,
the room that compiles it knows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from edgespec.prompts.places import JsonPlace, did_you_mean, show

MAX_SCHEMA_BYTES = 2**16
MAX_PATTERN_BYTES = 2**12
MAX_CHOICES = 1024
MAX_DEPTH = 32
EXAMPLE = '{"json_schema": {"type": "object"}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Guided:
    """The form of an answer: one of these.

    `json_schema` is an object, or the text of one, and is kept as text; `json_object` True is any
    JSON object; `regex` is matched by the whole answer; `choice` are the texts that it may be;
    `grammar` is one of Lark, as llguidance reads it. Raises RequestError for values that input.json
    could not have either.
    """

    json_schema: Mapping[str, object] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        here = JsonPlace("Guided")
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        name, value = the_one(given, here)
        object.__setattr__(self, name, FORMS[name](value, here.key(name)))

    def to_dict(self) -> dict[str, object]:
        """The same as JSON, in the form of input.json."""
        name, value = the_one({item.name: getattr(self, item.name) for item in fields(self)})
        return {name: json.loads(str(value)) if name == "json_schema" else value}


def guided(value: object, here: JsonPlace) -> Guided | None:
    """Returns the form of an answer; null is any. An object without one of its keys is a JSON
    schema. Raises RequestError that names the place."""
    if value is None or isinstance(value, Guided):
        return value
    if not isinstance(value, Mapping):
        here.refuse(f"is {show(value)}, not an object", f"Write {EXAMPLE}, for example.")
    if value and not any(name in FORMS for name in value):
        return Guided(json_schema=schema_text(value, here))
    for name in value:
        if name not in FORMS:
            near = did_you_mean(name, FORMS, "Did you mean {}? ")
            here.key(str(name)).refuse(
                "is not a known key", f"{near}The known keys are {', '.join(FORMS)}."
            )
    name, own = the_one(dict(value), here)
    return Guided(**{name: FORMS[name](own, here.key(name))})  # type: ignore[arg-type]


def the_one(given: Mapping[str, object], here: JsonPlace | None = None) -> tuple[str, object]:
    """The form that is given, with its value. Raises RequestError unless it is one."""
    said = [(name, value) for name, value in given.items() if value not in (None, False)]
    if len(said) != 1:
        here = here or JsonPlace("Guided")
        names = " and ".join(name for name, _ in said) or "nothing"
        here.refuse(f"says {names}", f"Give one of {', '.join(FORMS)}.")
    return said[0]


def schema_text(value: object, here: JsonPlace) -> str:
    """Returns a JSON schema as text."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema, allow_nan=False)
        size_bytes = len(text.encode())
    except (ValueError, TypeError, RecursionError) as error:
        here.refuse(f"is no JSON: {str(error)[:80]}", "Write a JSON schema as an object.")
    if not isinstance(schema, Mapping):
        here.refuse(f"is {show(schema)}, not an object", "Write a JSON schema as an object.")
    here.at_most(MAX_SCHEMA_BYTES, size_bytes, "bytes", "Shorten the schema.")
    here.at_most(MAX_DEPTH, depth(schema), "levels", "Nest the schema less, or refer to $defs.")
    return text


def depth(value: object) -> int:
    """Levels of objects and lists in each other."""
    level, count = [value], -1
    while level:
        count += 1
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    return count


def pattern(limit: int) -> Callable[[object, JsonPlace], str]:
    """Returns a check for a text of at most so many bytes."""

    def check(value: object, here: JsonPlace) -> str:
        if not isinstance(value, str) or not value:
            here.refuse(f"is {show(value)}", "Write a text that is not empty.")
        size_bytes = len(value.encode(errors="replace"))
        here.at_most(limit, size_bytes, "bytes", "Shorten it.")
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            here.refuse("has an unpaired surrogate", "Write both, or the character itself.")
        return value

    return check


def choices(value: object, here: JsonPlace) -> tuple[str, ...]:
    """Returns the texts that an answer may be."""
    if not isinstance(value, list | tuple) or not value:
        here.refuse(f"is {show(value)}, not a list of texts", 'Write ["yes", "no"], for example.')
    here.at_most(MAX_CHOICES, len(value), "choices", "Give fewer.")
    check = pattern(MAX_PATTERN_BYTES)
    return tuple(check(item, here.item(index)) for index, item in enumerate(value))


def switched_on(value: object, here: JsonPlace) -> bool:
    """Returns True."""
    if value is not True:
        here.refuse(f"is {show(value)}", "Write true, or leave it out.")
    return True


FORMS: dict[str, Callable[[object, JsonPlace], object]] = {
    "json_schema": schema_text,
    "regex": pattern(MAX_PATTERN_BYTES),
    "choice": choices,
    "grammar": pattern(MAX_SCHEMA_BYTES),
    "json_object": switched_on,
}
