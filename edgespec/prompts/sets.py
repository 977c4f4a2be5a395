"""Prompt sets: one JSON object per line, the format of MT-Bench, Spec-Bench and HumanEval, or of
SPEED-Bench, which is published as Parquet too.

Knows their keys. The first turn opens the conversation; each later turn is sent after the response
to the one before. Knows nothing of tokens.
"""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from edgespec.errors import RequestError
from edgespec.prompts.checks import text_size
from edgespec.prompts.parquet import is_parquet, parquet_rows
from edgespec.prompts.parse import (
    BATCH_OF_ONE,
    MAX_MESSAGES,
    PLAIN_REQUEST,
    as_list,
    as_object,
    check_names,
    check_total,
    checked_overrides,
    message_text,
    with_values,
)
from edgespec.prompts.places import JsonPlace, show
from edgespec.prompts.source import parse_json, read_bytes
from edgespec.prompts.types import Message, Overrides, Request, RequestFile

MAX_TURNS = MAX_MESSAGES // 2  # each turn has a response

NAMES = ("question_id", "task_id", "id")  # the first one present is the request's name
CATEGORIES = ("category", "sub_category")
IGNORED = ("reference", "entry_point", "canonical_solution", "test")  # for graders
OF_SPEED_BENCH = ("source", "src_id", "difficulty", "multiturn")
KNOWN = ("turns", "prompt", *NAMES, *CATEGORIES, *IGNORED, *OF_SPEED_BENCH)
# What SPEED-Bench has in the place of texts whose licence forbids that they are passed on
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


def read_prompt_set(
    path: str | os.PathLike[str],
    *,
    categories: Collection[str] = (),
    **overrides: Unpack[Overrides],
) -> RequestFile:
    """Reads a prompt set, JSONL or Parquet: `turns` or one `prompt` per line or row.

    `categories` keeps those of these categories or sub-categories alone. Sampling defaults are
    those of `input.json`. Raises RequestError that names the line, MissingDependency where Parquet
    cannot be read here.
    """
    data, source = read_bytes(path), str(path)
    if is_parquet(data):
        places = ((JsonPlace(f"{source}, row {n}"), row) for n, row in parquet_rows(data, source))
        return _request_file(places, source, categories, overrides)
    return parse_prompt_set(data, source, categories=categories, **overrides)


def parse_prompt_set(
    data: bytes, source: str, *, categories: Collection[str] = (), **overrides: Unpack[Overrides]
) -> RequestFile:
    """Returns the requests of a prompt set as JSONL; `source` is its name in messages.

    Raises RequestError that names the line.
    """
    places = (
        (JsonPlace(f"{source}, line {number}"), parse_json(line, source, line=number))
        for number, line in _lines(data)
    )
    return _request_file(places, source, categories, overrides)


def _request_file(
    parsed: Iterable[tuple[JsonPlace, object]],
    source: str,
    categories: Collection[str],
    overrides: Overrides,
) -> RequestFile:
    given = checked_overrides(overrides)
    base = with_values(PLAIN_REQUEST, given, JsonPlace(source))
    requests, known = list[Request](), set[str]()
    for place, raw in parsed:
        own = _categories(raw, place) if categories else set[str]()
        known |= own
        if not categories or own.intersection(categories):
            requests.append(_request(len(requests), raw, base, place))
    if not requests and known:
        message = f"{source} has no prompts of the category {' or '.join(categories)}"
        raise RequestError(message, f"Its categories: {', '.join(sorted(known))}.")
    if not requests:
        JsonPlace(source).refuse(
            "has no prompts", 'Write one per line, such as {"turns": ["Hello"]}.'
        )
    batch_size = (BATCH_OF_ONE | given)["batch_size"]
    return RequestFile(Path(source), tuple(requests), batch_size)


def _categories(raw: object, here: JsonPlace) -> set[str]:
    parts = as_object(raw, here)
    return {str(parts[key]) for key in CATEGORIES if parts.get(key) is not None}


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank, with their numbers.

    Only \\n ends a line: strings may contain other line separators, such as U+2028.
    """
    for number, line in enumerate(io.BytesIO(data.removeprefix(b"\xef\xbb\xbf")), 1):
        if line.strip():
            yield number, line


def _request(index: int, raw: object, base: Request, here: JsonPlace) -> Request:
    parts = as_object(raw, here)
    check_names(parts, KNOWN, here)
    first, *later = _turns(parts, here)
    return replace(
        base,
        index=index,
        messages=(Message("user", first),),
        turns=tuple(later),
        name=_name(parts, here),
    )


def _turns(parts: dict[str, object], here: JsonPlace) -> list[str]:
    if "turns" in parts and "prompt" in parts:
        here.refuse('has both "turns" and "prompt"', "Keep one of the two.")
    if "prompt" in parts:
        return [_text(parts["prompt"], here.key("prompt"))]
    there = here.key("turns")
    items = as_list(
        parts.get("turns"), there, 'write a list of strings, such as "turns": ["Hello"]'
    )
    there.at_most(MAX_TURNS, len(items), "turns", "Send fewer turns.")
    texts = [_text(item, there.item(index)) for index, item in enumerate(items)]
    check_total(texts, there)
    return texts


def _text(value: object, here: JsonPlace) -> str:
    if not isinstance(value, str):
        here.refuse(f"is {show(value)}, not a string", "Write a string.")
    if value.startswith(PLACEHOLDER):
        remedy = "Prepare the set as its publisher says (specdec_bench), or choose a `category`."
        here.refuse("is a placeholder of SPEED-Bench, not a prompt", remedy)
    return message_text(value, here)


def _name(parts: dict[str, object], here: JsonPlace) -> str | None:
    key = next((key for key in NAMES if key in parts), None)
    if key is None:
        return None
    value = parts[key]
    if isinstance(value, bool) or not isinstance(value, str | int):
        here.key(key).refuse(f"is {show(value)}", "Write a string or an integer.")
    text_size(str(value), here.key(key))
    return str(value)
