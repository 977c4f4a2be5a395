"""Options of a drafting method: a frozen dataclass a method, with defaults, bounds and one sentence
for each key.

Knows keys and values. Knows no method. Configuration files, flags, requests and the Python API all
end in `read_options`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from edgespec.errors import OptionError
from edgespec.prompts.checks import is_finite

MAX_SHOWN = 60  # characters of a value in a message
NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
# Annotation of a field -> the types of its values; a number may be written as an integer
ACCEPTED = {bool: (bool,), int: (int,), float: (float, int), str: (str,)}


def option(
    default: Any,
    text: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    unused: str = "",
    read: Callable[[str, Any], Any] | None = None,
    schema: Mapping[str, Any] | None = None,
) -> Any:
    """A field of DrafterOptions: its default, what it means, and the values that it may have
    (bounds are inclusive).

    `unused` says why a key of other programs means nothing here. For values that are neither bool,
    int, float nor str `read` checks one, given its key, and returns what is kept; it raises
    OptionError. `schema` is then their JSON schema.
    """
    metadata = {
        "text": text,
        "low": low,
        "high": high,
        "choices": choices,
        "unused": unused,
        "read": read,
        "schema": schema,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions:
    """The base of all methods' options: a frozen dataclass whose fields are made by `option`.

    A field is a bool, int, float or str, or one of them or None. Raises OptionError for a value of
    another type or beyond its bounds. A class with rules of its own calls
    `DrafterOptions.__post_init__(self)` first in its own.
    """

    def __post_init__(self) -> None:
        fields = fields_of(type(self))
        for name, kinds in types_of(type(self)).items():
            value, allowed = getattr(self, name), fields[name].metadata
            if allowed["read"] is None:
                check_value(name, value, kinds, allowed)
            elif value is not None:
                object.__setattr__(self, name, allowed["read"](name, value))


Options = TypeVar("Options", bound=DrafterOptions)


def fields_of(kind: type[DrafterOptions]) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a class of options, by key."""
    return {field.name: field for field in dataclasses.fields(kind)}


def types_of(kind: type[DrafterOptions]) -> dict[str, tuple[type, ...]]:
    """The types that each key's value may have: bool, int, float, str, NoneType; of a key with a
    `read` of its own whatever its annotation says."""
    hints = get_type_hints(kind)
    return {
        name: get_args(hints[name]) if isinstance(hints[name], UnionType) else (hints[name],)
        for name in fields_of(kind)
    }


def check_value(
    name: str, value: object, kinds: tuple[type, ...], allowed: Mapping[str, Any]
) -> None:
    """Raises OptionError for a value of another type, or one that is not allowed."""
    if value is None and NoneType in kinds:
        return
    (kind,) = (kind for kind in kinds if kind is not NoneType)
    if type(value) not in ACCEPTED[kind]:
        refuse(name, value, f"Give {NAMES[kind]}{describe(allowed)}.")
    if allowed["choices"] and value not in allowed["choices"]:
        refuse(name, value, f"Give one of {', '.join(allowed['choices'])}.")
    low, high = allowed["low"], allowed["high"]
    if isinstance(value, int | float) and not isinstance(value, bool):
        too_low, too_high = low is not None and value < low, high is not None and value > high
        if too_low or too_high or not is_finite(value):
            refuse(name, value, f"Give {NAMES[kind]}{describe(allowed)}.")


def describe(allowed: Mapping[str, Any]) -> str:
    """The bounds of a number as they end a sentence; empty where there are none."""
    low, high = allowed["low"], allowed["high"]
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" of {low} or more"
    return "" if high is None else f" of {high} or less"


def refuse(name: str, value: object, remedy: str, place: str = "") -> NoReturn:
    """Raises OptionError with the key, the place in it, its value and the remedy."""
    raise OptionError(f"`{name}`{place} is {shown(value)}", remedy)


def shown(value: object) -> str:
    """A value as a message shows it."""
    try:
        text = repr(value)
    except ValueError:
        text = "a value with thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def read_options(
    kind: type[Options] | None, given: Options | Mapping[str, object] | None, title: str
) -> Options | None:
    """The options of a method by what was given: an object of its class, keys and values, or
    nothing for the defaults.

    None where the method has no options. Raises OptionError for an unknown key, with the nearest
    known one, for a value that cannot be, and for options of another method.
    """
    if kind is None:
        if given:
            raise OptionError(f"{title} has no options, and some were given", "Leave them out.")
        return None
    if given is None:
        return kind()
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        message = f"the options of {title} are of type {type(given).__name__}"
        raise OptionError(message, f"Give keys and values, or {kind.__name__}(...).")
    known = fields_of(kind)
    for name in given:
        if name not in known:
            raise unknown_key(str(name), [*known], f"the options of {title}")
    return kind(**given)


def unknown_key(name: str, known: list[str], where: str) -> OptionError:
    """The error for a key that nothing knows, with the nearest known one."""
    close = difflib.get_close_matches(name[:80], known, n=1)
    remedy = f"Did you mean {close[0]}? If not, remove it." if close else ""
    shown = name if len(name) <= MAX_SHOWN else f"{name[: MAX_SHOWN - 3]}..."
    message = f"{where}: {shown} is not a known key"
    return OptionError(message, remedy or f"Remove it. Known keys: {', '.join(known)}.")
