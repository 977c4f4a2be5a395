"""Files of articles: what is read, and how bad lines are answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.errors import RequestError
from edgespec.evaluation.articles import MAX_ARTICLE_BYTES, read_articles

GOOD = json.dumps({"article": "A long text.", "highlights": "Short.", "id": "7"})


def test_articles_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "articles.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{GOOD}\n\n{GOOD}\n{GOOD}".encode())
    assert [a.number for a in read_articles(path)] == [1, 3, 4]
    (first,) = read_articles(path, 1)
    assert (first.text, first.summary) == ("A long text.", "Short.")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("", "has no articles"),
        ("[1]", "line 2"),
        ('{"article": "A"', "line 2"),
        ('{"article": "A"}', "highlights is no text"),
        ('{"article": 7, "highlights": "B"}', "article is no text"),
        ('{"article": " ", "highlights": "B"}', "article is no text"),
        ('{"article": "\\ud800", "highlights": "B"}', "unpaired surrogate"),
        (json.dumps({"article": "x" * (MAX_ARTICLE_BYTES + 1), "highlights": "B"}), "longer than"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str, wanted: str) -> None:
    path = tmp_path / "articles.jsonl"
    path.write_text(f"{GOOD}\n{line}\n" if line else "\n")
    with pytest.raises(RequestError, match=wanted):
        read_articles(path)
