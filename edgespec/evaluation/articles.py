"""Articles with their summaries, from a JSONL file with the keys of cnn_dailymail.

Knows the file. Knows nothing of tokens.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

from edgespec.prompts.checks import text_size
from edgespec.prompts.parse import as_object
from edgespec.prompts.places import JsonPlace
from edgespec.prompts.source import parse_json, read_bytes

MAX_ARTICLE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Article:
    """A text and the summary that people wrote for it."""

    number: int  # of its line, from 1
    text: str
    summary: str


def read_articles(path: Path, most: int | None = None) -> list[Article]:
    """The articles of a file, or its first `most`. Raises RequestError that names the line."""
    articles: list[Article] = []
    for number, line in enumerate(io.BytesIO(read_bytes(path).removeprefix(b"\xef\xbb\xbf")), 1):
        if most is not None and len(articles) == most:
            break
        if line.strip():
            here = JsonPlace(f"{path}, line {number}")
            parts = as_object(parse_json(line, str(path), line=number), here)
            text, summary = (text_of(parts, key, here) for key in ("article", "highlights"))
            articles.append(Article(number, text, summary))
    if not articles:
        JsonPlace(str(path)).refuse(
            "has no articles",
            'Write one per line, such as {"article": "...", "highlights": "..."}.',
        )
    return articles


def text_of(parts: dict[str, object], key: str, here: JsonPlace) -> str:
    """A text of an article. Raises RequestError where it is none, empty or too long."""
    place, value = here.key(key), parts.get(key)
    if not isinstance(value, str) or not value.strip():
        place.refuse("is no text", "Each line has an article and its highlights, as cnn_dailymail.")
    if text_size(value, place) > MAX_ARTICLE_BYTES:
        place.refuse(f"is longer than {MAX_ARTICLE_BYTES} bytes", "Shorten it.")
    return value
