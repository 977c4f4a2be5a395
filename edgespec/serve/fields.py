"""Fields of requests as a table: how each is taken, and what JSON schema it has.

A field is taken, changes nothing here and is named in the answer's `adjusted`, or is refused with
the reason. Nothing is ignored in silence. Knows values; what is made of them stands with each
protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgespec.prompts import checks
from edgespec.prompts.checks import Check
from edgespec.prompts.places import JsonPlace, did_you_mean, show
from edgespec.serve.bodies import SOURCE

Schema = Mapping[str, Any]
Values = dict[str, Any]
ANY: Schema = {}
BOOLEAN: Schema = {"type": "boolean"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
STRING: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
STRINGS: Schema = {"type": "array", "items": STRING}
INTEGERS: Schema = {"type": "array", "items": INTEGER}


@dataclass(frozen=True, slots=True)
class Field:
    """A row: `check` makes a value of what is taken. Without one, values in `neutral` ask for what
    is done anyway, and `why` says of others that they change nothing (`harmless`), or why they are
    refused."""

    schema: Schema
    check: Check[object] | None = None
    why: str = ""
    neutral: tuple[object, ...] = ()
    harmless: bool = False
    required: bool = field(default=False, kw_only=True)


Fields = Mapping[str, Field]


def taken(check: Check[object], schema: Schema, *, required: bool = False) -> Field:
    """A field that is taken as `check` makes it."""
    return Field(schema, check, required=required)


def harmless(why: str, schema: Schema = ANY, *neutral: object) -> Field:
    """A field that changes no answer here: it is accepted and named in `adjusted`, but for values
    that ask for what is done anyway."""
    return Field(schema, why=why, neutral=neutral, harmless=True)


def refused(why: str, *neutral: object) -> Field:
    """A field that this server does not have."""
    return Field({"enum": [None, *neutral]}, why=why, neutral=neutral)


def read(body: Mapping[str, object], fields: Fields) -> tuple[Values, list[str]]:
    """The values of a body by their names, and what changes nothing. null is a field left out.

    Raises RequestError that names the field.
    """
    here, values, adjusted = JsonPlace(SOURCE), Values(), list[str]()
    for name, value in body.items():
        row = fields.get(name)
        if row is None:
            remedy = did_you_mean(name, fields, "Did you mean {}? If not, remove it.")
            here.key(name).refuse("is not a known field", remedy or "Remove it.")
        if value is None:
            continue
        if row.check is not None:
            values[name] = row.check(value, here.key(name))
        elif any(value == known and type(value) is type(known) for known in row.neutral):
            continue
        elif row.harmless:
            adjusted.append(f"{name}: {row.why}")
        else:
            here.key(name).refuse(f"is {show(value)}, which is not taken: {row.why}", "Remove it.")
    for name, row in fields.items():
        if row.required and name not in values:
            here.key(name).refuse("is missing", "Add it.")
    return values, adjusted


def schema_of(fields: Fields) -> dict[str, Any]:
    """The JSON schema of a body. null is a field left out."""
    required = [name for name, row in fields.items() if row.required]
    return {
        "type": "object",
        "properties": {
            name: {
                **(row.schema if row.required else {"anyOf": [row.schema, {"type": "null"}]}),
                **({"description": row.why} if row.why else {}),
            }
            for name, row in fields.items()
        },
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


# ---- checks


def one_of(*names: str) -> Check[str]:
    """A check for one of some words."""

    def check(value: object, here: JsonPlace) -> str:
        if not isinstance(value, str) or value not in names:
            here.refuse(f"is {show(value)}", f"Write one of {', '.join(names)}.")
        return value

    return check


def token_ids(value: object, here: JsonPlace) -> list[int]:
    """Returns a list of token ids."""
    if not isinstance(value, list):
        here.refuse(f"is {show(value)}, not a list of token ids", "Write [1, 2, 3].")
    check = checks.integer(0, checks.MAX_COUNT)
    return [check(item, here.item(index)) for index, item in enumerate(value)]


def stream_options(value: object, here: JsonPlace) -> Values:
    """Returns what a stream has beside text."""
    if not isinstance(value, dict):
        here.refuse(f"is {show(value)}, not an object", 'Write {"include_usage": true}.')
    known = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    for name in value:
        if name not in known:
            here.key(name).refuse("is not a known field", f"Known are {', '.join(known)}.")
    return {name: checks.flag(item, here.key(name)) for name, item in value.items()}
