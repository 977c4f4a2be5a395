"""Claims about stored/tokenizer.py: how much longer the rules of a tokenizer.json make a text."""

from __future__ import annotations

import base64
import math
from typing import Any

import pytest

from edgespec.errors import BundleError
from edgespec.stored.tokenizer import MAX_AFFIX, MAX_GROWTH, added_tokens, panics_as, text_growth

LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}


def sequence(*rules: object) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(rules)}


PUBLISHED: list[Any] = [
    None,
    {"type": "NFC"},
    # SentencePiece in Llama's form, Gemma's, and T5's
    sequence(
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ),
    {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    sequence(
        {"type": "NFKC"}, {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}
    ),
    {"type": "BertNormalizer", "lowercase": True},
]


@pytest.mark.parametrize("rule", PUBLISHED)
def test_published_normalizers_are_within_the_bound(rule: Any) -> None:
    assert 1 <= text_growth(rule) <= MAX_GROWTH


@pytest.mark.parametrize(
    "rule",
    [
        LONGER,
        sequence(*[{**LONGER, "content": "a" * 12}] * 4),
        {"type": "Sequence", "decoders": [LONGER]},
        {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 1000},
        {"type": "Replace", "pattern": {"String": ""}, "content": "a" * 1000},
        {"type": "Prepend", "prepend": "a" * (MAX_AFFIX + 1)},
        {"type": "Replace", "pattern": 5, "content": None},
        {"type": "Sequence", "normalizers": 5},
        {"type": "Precompiled", "precompiled_charsmap": "?"},
        "x",
    ],
)
def test_what_multiplies_a_text_is_beyond_it(rule: Any) -> None:
    assert text_growth(rule) > MAX_GROWTH


def test_growth_multiplies_from_rule_to_rule() -> None:
    ten = {**LONGER, "content": "a" * 10}
    assert text_growth(sequence(ten, ten, {"type": "NFC"})) == 300


def test_a_precompiled_table_grows_by_its_longest_replacement() -> None:
    table = (4).to_bytes(4, "little") + b"trie" + b"ab\0" + b"x" * 500 + b"\0"
    rule = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    assert text_growth(rule) == 500


def test_tokens_around_a_text_are_counted() -> None:
    piece = {"SpecialToken": {"id": "X", "type_id": 0}}
    rule = {
        "type": "TemplateProcessing",
        "single": [piece] * 3,
        "special_tokens": {"X": {"ids": [1, 2]}},
    }
    assert added_tokens(rule) == 6
    assert added_tokens({"type": "Sequence", "processors": [rule, rule]}) == 12
    assert added_tokens(None) == 0
    assert added_tokens({"type": "TemplateProcessing"}) == math.inf


class PanicException(BaseException):
    """As pyo3 raises it."""


def test_a_panic_becomes_an_error_and_nothing_else_does() -> None:
    with pytest.raises(BundleError, match="over"), panics_as(BundleError):
        raise PanicException("retry-limit over")
    with pytest.raises(KeyboardInterrupt), panics_as(BundleError):
        raise KeyboardInterrupt
