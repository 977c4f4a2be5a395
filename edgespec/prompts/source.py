"""Parses untrusted JSON: a bounded file, UTF-8, no duplicate keys, no NaN, bounded depth.

Knows JSON. Knows nothing of requests.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NoReturn

from edgespec.errors import RequestError
from edgespec.prompts.places import show
from edgespec.safe_read.regular import open_regular

MAX_FILE_BYTES = 64 * 2**20


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Returns the bytes of a request file. Raises RequestError if unreadable or above 64 MiB."""
    try:
        with open_regular(Path(path)) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RequestError(
            f"{path} cannot be read: {reason}.",
            "Pass the path of a regular file that exists and is readable.",
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise RequestError(
            f"{path} is larger than {MAX_FILE_BYTES} bytes.", "Split it into several input files."
        )
    return data


def parse_json(data: bytes, source: str, *, line: int | None = None) -> object:
    """Parses one JSON document.

    `source` is its name in messages, and `line` its line number in a JSONL file. Raises
    RequestError.
    """
    here = source if line is None else f"{source}, line {line}"
    text = _decode(data, here, line)

    def refuse_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) < len(pairs):
            raise RequestError(
                f"{here}: the key {show(_first_repeated(pairs))} occurs twice in one object.",
                "Keep one of the two.",
            )
        return values

    def refuse_constant(name: str) -> NoReturn:
        raise RequestError(f"{here}: {name} is not JSON.", "Write a finite number.")

    try:
        parsed: object = json.loads(
            text, object_pairs_hook=refuse_duplicates, parse_constant=refuse_constant
        )
    except json.JSONDecodeError as error:
        raise RequestError(
            f"{here} is not JSON: {error.msg.removesuffix(' at')} at"
            f" {_position(error.lineno, error.colno, line)}.",
            "Fix the file there; a missing comma or quote just before is the usual cause."
            if line is None
            else "Write one complete JSON object per line.",
        ) from error
    except RecursionError as error:
        raise RequestError(
            f"{here} is nested too deeply.", "Requests need at most five levels."
        ) from error
    except ValueError as error:  # an integer of thousands of digits
        raise RequestError(
            f"{here} has a number that is too long: {error}.", "Write a shorter number."
        ) from error
    return parsed


def _decode(data: bytes, here: str, line: int | None) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        position = _position(*_line_and_column(error.object[: error.start]), line)
        raise RequestError(
            f"{here} is not UTF-8: byte 0x{error.object[error.start]:02x} at {position}.",
            "Save the file as UTF-8.",
        ) from error


def _first_repeated(pairs: list[tuple[str, object]]) -> str:
    seen: set[str] = set()
    return next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]


def _position(line: int, column: int, only_line: int | None) -> str:
    return f"line {line}, column {column}" if only_line is None else f"column {column}"


def _line_and_column(before: bytes) -> tuple[int, int]:
    """Returns line and column, from 1, of the byte after `before`, which is valid UTF-8."""
    last_line = before.rpartition(b"\n")[2]
    return before.count(b"\n") + 1, len(last_line.decode("utf-8-sig")) + 1
