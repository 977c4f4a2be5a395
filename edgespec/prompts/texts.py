"""Requests that come in no file: texts of the command line, and stdin.

Tells input files from prompt sets. The keys stand in `parse` and `sets`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from edgespec.errors import RequestError
from edgespec.prompts.image_item import kind_of
from edgespec.prompts.parse import parse_requests
from edgespec.prompts.sets import parse_prompt_set
from edgespec.prompts.source import MAX_FILE_BYTES, parse_json
from edgespec.prompts.types import Overrides, RequestFile

STDIN = "stdin"  # its name in messages
PROMPT = "`prompt`"


def text_requests(
    texts: Sequence[str],
    *,
    system: str = "",
    stop: Sequence[str] = (),
    enable_thinking: bool = False,
    apply_chat_template: bool = True,
    images: Sequence[str] = (),
    **overrides: Unpack[Overrides],
) -> RequestFile:
    """Returns a request for each text: the user's only turn or, without a chat template, the whole
    prompt. The files of `images` go with each, before its text. Raises RequestError with the number
    of the text."""
    opening = [{"role": "system", "content": system}] if system else []
    shown = [{"type": "image", "image": path_of(name)} for name in images]

    def content(text: str) -> object:
        return [*shown, {"type": "text", "text": text}] if shown else text

    messages = [[*opening, {"role": "user", "content": content(text)}] for text in texts]
    raw: dict[str, object] = {"requests": [{"messages": turns} for turns in messages]}
    if stop:
        raw["stop"] = list(stop)
    if enable_thinking:
        raw["enable_thinking"] = True
    if not apply_chat_template:
        raw["apply_chat_template"] = False
    return parse_requests(raw, PROMPT, **overrides)


def path_of(name: str) -> str:
    """The name of a file as a source of an image, also where it looks like a URL."""
    return name if kind_of(name) == "path" and ":" not in name else f"{Path(name).absolute()}"


def read_stdin(**overrides: Unpack[Overrides]) -> RequestFile:
    """Reads an input file or a JSONL prompt set from stdin. Raises RequestError."""
    data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise RequestError(
            f"stdin is larger than {MAX_FILE_BYTES} bytes.", "Split it into several runs."
        )
    if is_prompt_set(data):
        return parse_prompt_set(data, STDIN, **overrides)
    return parse_requests(parse_json(data, STDIN), STDIN, **overrides)


def is_prompt_set(data: bytes) -> bool:
    """Whether the first line that is not blank is a JSON object of its own without `requests`."""
    first = next((line for line in data.split(b"\n") if line.strip()), b"")
    try:
        value = parse_json(first, STDIN, line=1)
    except RequestError:
        return False
    return isinstance(value, dict) and "requests" not in value
