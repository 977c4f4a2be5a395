"""What a tokenizer.json may do to a text: how long its tokens are, how much longer its rules make a
text, and what becomes of a panic of the library that runs them.

Knows the JSON of tokenizers. Knows no tokenizer library.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from edgespec.errors import EdgeSpecError

MAX_TOKEN_CHARS = 2**13  # the longest tokens in use have some hundreds
MAX_ADDED_CHARS = 2**22  # of all added tokens; 100,000 audio tokens have 2 million
# An expression; and SentencePiece's table of characters, of which its usual one has 320,000
MAX_STRING_CHARS = {"Regex": 2**16, "precompiled_charsmap": 2**22}
MAX_RULES = 64  # one after the other
MAX_GROWTH = 128  # characters that a normalizer makes of one; NFKC makes 18 of U+FDFA
MAX_SPLIT_GROWTH = 32  # that a pre_tokenizer makes of one; ByteLevel makes 4 of an emoji
MAX_DECODED_GROWTH = 4  # that a decoder makes of one; most make 1
MAX_PREFIX = 4  # characters that a normalizer puts before a text, and between two added tokens
MAX_AFFIX = 1024  # tokens that are put before or behind a text
# Unicode's own rules, by the most characters that they make of one
UNICODE_GROWTH = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 3,
    "BertNormalizer": 12,
    "ByteLevel": 4,
}
# Rules that leave characters out only where several become one, by the most that do
KEPT_CHARS = {
    "ByteLevel": 1,
    "Digits": 1,
    "Lowercase": 1,
    "Metaspace": 1,
    "NFC": 4,
    "NFD": 1,
    "NFKC": 4,
    "NFKD": 1,
    "Prepend": 1,
}
CONTAINERS = (str, dict, list)
SEQUENCES = ("normalizers", "decoders", "pretokenizers")


def oversized(document: Mapping[str, Any]) -> str | None:
    """The field of a tokenizer.json with a longer token or text than tokenizers have, and both
    sizes; None where there is none. Merges are of tokens, and need no look."""
    waiting: list[tuple[str, object]] = [("", document)]
    while waiting:
        place, item = waiting.pop()
        if isinstance(item, str):
            limit = MAX_STRING_CHARS.get(place.rpartition(".")[2], MAX_TOKEN_CHARS)
            if len(item) > limit:
                return f"{place} has {len(item)} characters, and {limit} is the limit"
        elif isinstance(item, Mapping):
            longest = max(map(len, item), default=0)
            if longest > MAX_TOKEN_CHARS:
                limit = MAX_TOKEN_CHARS
                return f"{place} has a token of {longest} characters, and {limit} is the limit"
            parts = ((key, part) for key, part in item.items() if isinstance(part, CONTAINERS))
            waiting += (
                (f"{place}.{key}".lstrip("."), part) for key, part in parts if key != "merges"
            )
        elif isinstance(item, list):
            waiting += ((place, part) for part in item if isinstance(part, CONTAINERS))
    added = document.get("added_tokens")
    tokens = [one for one in added if isinstance(one, Mapping)] if isinstance(added, list) else []
    total = sum(len(token["content"]) for token in tokens if isinstance(token.get("content"), str))
    if total > MAX_ADDED_CHARS:
        return f"added_tokens has {total} characters in all, and {MAX_ADDED_CHARS} is the limit"
    return None


def text_growth(rule: object, length: float = 1, *, decoding: bool = False) -> float:
    """How many characters a normalizer, a pre_tokenizer or, `decoding`, a decoder makes of so many
    at most, by its JSON; infinity for a rule that cannot be read."""
    steps = list(_steps(rule))
    if len(steps) > MAX_RULES:
        return math.inf
    for step in steps:
        length = _step_growth(step, length, decoding)
    return float(length)


def _steps(rule: object) -> Iterator[object]:
    """The rules of a sequence, and of the sequences in it, in their order."""
    if rule is None:
        return
    inner: object = None
    if isinstance(rule, Mapping) and rule.get("type") == "Sequence":
        inner = next((rule[key] for key in SEQUENCES if key in rule), None)
        inner = inner if isinstance(inner, list) else [math.inf]  # unreadable
    if not isinstance(inner, list):
        yield rule
        return
    for one in inner:
        yield from _steps(one)


def _step_growth(rule: object, length: float, decoding: bool) -> float:
    if not isinstance(rule, Mapping):
        return math.inf
    kind = str(rule.get("type"))
    if kind == "Replace":
        return _replace_growth(rule, length)
    if kind == "Precompiled":
        return length * _precompiled_growth(rule.get("precompiled_charsmap"))
    if kind == "Prepend":
        return length + _length(rule.get("prepend"))
    if kind in EMPTY_MATCHES:  # a space for what it looks for, between any two characters if empty
        return length if rule.get(EMPTY_MATCHES[kind]) != "" else 2 * length + 1
    if kind == "WordPiece":
        return length + 1
    if kind == "ByteLevel" and decoding:
        return length
    prefix = 1 if rule.get("add_prefix_space") else 0
    return length * UNICODE_GROWTH.get(kind, 1) + prefix


EMPTY_MATCHES = {"BPEDecoder": "suffix", "CTC": "word_delimiter_token"}


def _replace_growth(rule: Mapping[str, Any], length: float) -> float:
    """After one replacement; an expression may match between any two characters."""
    pattern, content = rule.get("pattern"), _length(rule.get("content"))
    literal = pattern.get("String") if isinstance(pattern, Mapping) else None
    if isinstance(literal, str) and literal:
        return max(1.0, content / len(literal)) * length
    return length + content * (length + 1)


def _length(text: object) -> float:
    return len(text) if isinstance(text, str) else math.inf


def _precompiled_growth(encoded: object) -> float:
    if not isinstance(encoded, str):
        return math.inf
    try:
        return charsmap_growth(base64.b64decode(encoded, validate=True))
    except (binascii.Error, ValueError):
        return math.inf


def charsmap_growth(data: bytes) -> float:
    """Of SentencePiece's table: a trie behind its length in bytes, then the replacements, each with
    a zero at its end."""
    replacements = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return float(max(1, *map(len, replacements)))


def joined_chars(*rules: object) -> float:
    """How many characters of a text these rules make one of at most; infinity where they may drop
    any number."""
    return math.prod((_joined(step) for rule in rules for step in _steps(rule)), start=1.0)


def has_byte_level(rule: object) -> bool:
    """Whether a normalizer or a pre_tokenizer makes bytes of characters."""
    return any(
        isinstance(step, Mapping) and step.get("type") == "ByteLevel" for step in _steps(rule)
    )


def _joined(rule: object) -> float:
    if not isinstance(rule, Mapping):
        return math.inf
    kind, pattern, content = str(rule.get("type")), rule.get("pattern"), rule.get("content")
    if kind == "Split":
        return math.inf if rule.get("behavior") == "Removed" else 1
    literal = pattern.get("String") if isinstance(pattern, Mapping) else None
    if kind == "Replace" and literal and isinstance(content, str) and content:
        return max(1.0, len(literal) / len(content))
    return KEPT_CHARS.get(kind, math.inf)


def added_tokens(rule: object) -> float:
    """How many tokens a post-processor puts around a text at most; infinity for a rule that repeats
    the text or cannot be read."""
    if rule is None:
        return 0.0
    if not isinstance(rule, Mapping):
        return math.inf
    if rule.get("type") == "Sequence":
        inner = rule.get("processors")
        return sum(map(added_tokens, inner)) if isinstance(inner, list) else math.inf
    if rule.get("type") != "TemplateProcessing":
        return 4.0
    pieces, tokens = rule.get("single"), rule.get("special_tokens")
    if not isinstance(pieces, list) or not isinstance(tokens, Mapping):
        return math.inf
    if sum(isinstance(piece, Mapping) and "Sequence" in piece for piece in pieces) > 1:
        return math.inf
    longest = [len(t.get("ids", ())) for t in tokens.values() if isinstance(t, Mapping)]
    return float(len(pieces) * max(1, *longest, 1))


@contextmanager
def panics_as(make: Callable[[str], EdgeSpecError]) -> Iterator[None]:
    """Turns a panic of the tokenizer library, which is no Exception, into the error that `make`
    makes of its message."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise make(str(error)) from None
