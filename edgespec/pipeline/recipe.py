"""Reads a configuration file in YAML: a bounded file, plain values only.

Knows YAML and how keys of a file are overridden. What the keys mean is not known here.

Of YAML's features those are refused that turn a small file into much or into something else:
anchors and aliases, tags, several documents, duplicate keys and `<<`. Words are read as in YAML
1.2: true and false alone are booleans, 1e-5 is a number, 010 is ten, and a date is a text.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import OptionError, RequestError
from edgespec.safe_read.regular import read_regular

if TYPE_CHECKING:
    from yaml.nodes import Node

MAX_BYTES = 2**18
MAX_DEPTH = 16
MAX_DIGITS = 400  # of a number; the largest float has 309

STR = "tag:yaml.org,2002:str"
SEQ, MAP = "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"
NULL = re.compile(r"null|Null|NULL|~|")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
INT = re.compile(r"[-+]?[0-9]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")

SAVE_AS = "Save it as YAML in UTF-8."


def read_config(path: Path | None, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The keys and values of a YAML file, or of none, with `key.sub=value` overrides applied.

    Raises RequestError that names the place, and OptionError for what is no override.
    """
    values = {} if path is None else parse(read(path), str(path))
    return overridden(values, overrides)


def read(path: Path) -> str:
    """The text of a file. Raises RequestError for what is no regular file, for more than MAX_BYTES
    and for what is not UTF-8."""
    try:
        return read_regular(path, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}"
        raise RequestError(message, SAVE_AS) from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise RequestError(f"{path} cannot be read: {why}", "Give a file in YAML.") from None


def parse(text: str, source: str) -> dict[str, Any]:
    """The mapping that a YAML text holds; an empty text is an empty mapping. Raises RequestError
    with line and column."""
    values = value_of(text, source)
    if values is None:
        return {}
    if not isinstance(values, dict):
        message = f"{source} holds {kind_of(values)}, not keys and values"
        raise RequestError(message, "Write lines such as key: value.")
    return values


def value_of(text: str, source: str) -> Any:
    """The value of one YAML document. Raises RequestError."""
    import yaml

    try:
        check_events(text, source)
        node = yaml.compose(text, Loader=yaml.BaseLoader)
        return None if node is None else constructed(node, source)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        message = f"{source} is not YAML: {error.problem or error.context}{where}"
        raise RequestError(message, "Correct the file there.") from None
    except yaml.YAMLError as error:
        raise RequestError(f"{source} is not YAML: {error}", SAVE_AS) from None


def check_events(text: str, source: str) -> None:
    """Raises RequestError for what a file may not have, before anything is built of it."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=yaml.BaseLoader):
        line = f"{source}, line {event.start_mark.line + 1 if event.start_mark else 1}"
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        if anchor is not None:
            message = f"{line}: an anchor or alias, {anchor}"
            raise RequestError(message, "Write the value out where it is needed.")
        if tag is not None:
            raise RequestError(f"{line}: a tag, {tag}", "Write plain values without tags.")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise RequestError(f"{line}: nested deeper than {MAX_DEPTH}", "Flatten it.")


def constructed(node: Node, source: str) -> Any:
    """The value of a node. Raises RequestError for duplicate keys, `<<` and keys that are lists or
    mappings."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        return [constructed(item, source) for item in node.value]
    if isinstance(node, yaml.ScalarNode):
        return scalar(node.value, source, node) if node.style is None else node.value
    assert isinstance(node, yaml.MappingNode)
    mapping: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        line = f"{source}, line {key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise RequestError(f"{line}: a key that is a list or a mapping", "Write a name.")
        key = constructed(key_node, source)
        if key == "<<" and key_node.style is None:
            raise RequestError(f"{line}: a merge key, <<", "Write the keys out.")
        if key in mapping:
            raise RequestError(f"{line}: {shown(key)} occurs twice", "Keep one of the two.")
        mapping[key] = constructed(value_node, source)
    return mapping


def scalar(text: str, source: str, node: Node | None = None) -> Any:
    """The value of a plain scalar, as YAML 1.2's core schema has it: null, a boolean, a number, or
    the text itself."""
    if NULL.fullmatch(text):
        return None
    if BOOL.fullmatch(text):
        return text.lower() == "true"
    if len(text) > MAX_DIGITS and FLOAT.fullmatch(text):
        line = "" if node is None else f", line {node.start_mark.line + 1}"
        raise RequestError(
            f"{source}{line}: a number of {len(text)} digits", "Write a shorter one."
        )
    if INT.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
        return number
    return text


def overridden(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Values with `key=value` and `key.sub=value` applied, in their order. A value is YAML: 3,
    true, [[0], [1]] or a text. Raises OptionError
    for what is none, RequestError for a value that is not YAML."""
    out = dict(values)
    for text in overrides:
        path, equals, value = text.partition("=")
        names = path.split(".")
        if not equals or not all(names):
            message = f"{shown(text)} is no override of the configuration"
            raise OptionError(
                message, "Write key=value, such as speculative_config.max_draft_len=4."
            )
        target = out
        for name in names[:-1]:
            inner = target.get(name)
            if inner is not None and not isinstance(inner, dict):
                raise OptionError(f"{shown(text)}: {name} has no keys", f"Write {name}=value.")
            target[name] = dict(inner or {})
            target = target[name]
        target[names[-1]] = value_of(value, shown(text))
    return out


def nearest(name: str, known: Iterable[str]) -> str:
    """ "Did you mean X? " with the nearest known name; empty where none is near."""
    close = difflib.get_close_matches(name[:80], [*known], n=1)
    return f"Did you mean {close[0]}? " if close else ""


def kind_of(value: object) -> str:
    """What a value is, in YAML's words."""
    return "a list" if isinstance(value, list) else f"the value {shown(value)}"


def shown(value: object) -> str:
    """A value as a message shows it."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
