"""Claims about stored/tokenizer.py: how long tokens are, and how much longer rules make a text."""

from __future__ import annotations

import base64
import math
from typing import Any

import pytest

from edgespec.errors import BundleError
from edgespec.safe_read.tokenizer import (
    MAX_ADDED_CHARS,
    MAX_AFFIX,
    MAX_DECODED_GROWTH,
    MAX_GROWTH,
    MAX_PREFIX,
    MAX_RULES,
    MAX_SPLIT_GROWTH,
    MAX_TOKEN_CHARS,
    added_tokens,
    oversized,
    panics_as,
    text_growth,
)

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
    assert text_growth(rule, 0) <= MAX_PREFIX


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


def test_prefixes_add_up_and_are_grown_by_the_rules_that_follow() -> None:
    mark = {"type": "Prepend", "prepend": "ab"}
    assert text_growth(sequence(mark, mark)) == 5
    ten = {**LONGER, "content": "a" * 10}
    assert text_growth(sequence(mark, ten), 0) == 20
    assert text_growth(sequence(*[mark] * (MAX_RULES + 1)), 0) == math.inf


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}
SPLIT = {"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Isolated"}
WORDS = {"type": "WordPiece", "prefix": "##", "cleanup": True}
SPACES = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}


@pytest.mark.parametrize(
    ("rules", "is_bounded"),
    [([SPLIT, BYTES], True), ([BYTES] * 2, True), ([BYTES] * 3, False), ([SPLIT] * 65, False)],
)
def test_a_pre_tokenizer_that_writes_bytes_again_and_again_is_beyond_the_bound(
    rules: list[object], is_bounded: bool
) -> None:
    growth = text_growth({"type": "Sequence", "pretokenizers": rules})
    assert (growth <= MAX_SPLIT_GROWTH) == is_bounded


@pytest.mark.parametrize(
    ("rules", "is_bounded"),
    [
        ([BYTES], True),
        ([SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip"}], True),
        ([WORDS], True),
        ([WORDS] * 4, False),
        ([{"type": "BPEDecoder", "suffix": "</w>"}], True),
        ([{"type": "BPEDecoder", "suffix": ""}] * 2, False),
        ([{"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": ""}] * 2, False),
        ([{**SPACES, "content": " " * 5}], False),
    ],
)
def test_a_decoder_hardly_makes_a_token_longer(rules: list[object], is_bounded: bool) -> None:
    growth = text_growth({"type": "Sequence", "decoders": rules}, decoding=True)
    assert (growth <= MAX_DECODED_GROWTH) == is_bounded


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
    text = {"Sequence": {"id": "A", "type_id": 0}}
    assert added_tokens(rule | {"single": [piece, text]}) == 4
    assert added_tokens(rule | {"single": [text, piece, text]}) == math.inf


LONG = "x" * (MAX_TOKEN_CHARS + 1)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"model": {"vocab": {"a": 0, LONG: 1}}}, "model.vocab"),
        ({"model": {"vocab": [["a", 0.0], [LONG, -1.0]]}}, "model.vocab"),
        ({"model": {"continuing_subword_prefix": LONG}}, "model.continuing_subword_prefix"),
        ({"added_tokens": [{"content": LONG}]}, "added_tokens.content"),
        ({"padding": {"pad_token": LONG}}, "padding.pad_token"),
        ({"normalizer": sequence({"pattern": {"Regex": LONG * 9}})}, "normalizers.pattern.Regex"),
        ({"added_tokens": [{"content": "x" * 8000}] * (MAX_ADDED_CHARS // 8000 + 1)}, "in all"),
    ],
)
def test_a_field_that_is_longer_than_any_in_use_is_named(document: Any, field: str) -> None:
    found = oversized(document)
    assert found is not None
    assert field in found
    assert "is the limit" in found


def test_long_tokens_long_expressions_and_many_merges_are_within_the_bound() -> None:
    token, pair = "x" * MAX_TOKEN_CHARS, f"{LONG} {LONG}"
    model = {"vocab": {token: 0}, "merges": [pair, [LONG, LONG]], "unk_token": None}
    table = {"type": "Precompiled", "precompiled_charsmap": "A" * 320_000}
    split = {"type": "Split", "pattern": {"Regex": LONG}}
    added = [{"id": 0, "content": token}, {"content": 5}, 5]
    assert oversized({"model": model, "normalizer": table, "pre_tokenizer": split}) is None
    assert oversized({"added_tokens": added}) is None
    assert oversized({"added_tokens": 5}) is None


class PanicException(BaseException):
    """As pyo3 raises it."""


def test_a_panic_becomes_an_error_and_nothing_else_does() -> None:
    with pytest.raises(BundleError, match="over"), panics_as(BundleError):
        raise PanicException("retry-limit over")
    with pytest.raises(KeyboardInterrupt), panics_as(BundleError):
        raise KeyboardInterrupt
