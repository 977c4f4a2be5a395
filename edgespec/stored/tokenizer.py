"""What a tokenizer.json may do to a text: how much longer its rules make one, and what becomes of a
panic of the library that runs them.

Knows the JSON of normalizers, decoders and post-processors. Knows no tokenizer library.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from edgespec.errors import EdgeSpecError

MAX_GROWTH = 128  # characters that a rule makes of one; NFKC makes 18 of U+FDFA
MAX_AFFIX = 1024  # characters, or tokens, that are put before or behind a text
# As Rust reports a panic: where, why, and how to see more
PANIC = re.compile(rb"\n?thread '[^\n]*panicked at .*?(?:note: run with[^\n]*\n|\Z)", re.DOTALL)
REDIRECTING = threading.Lock()
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


def text_growth(rule: object) -> float:
    """How many characters a normalizer or a decoder makes of one at most, by its JSON; infinity for
    a rule that cannot be read."""
    if rule is None:
        return 1.0
    if not isinstance(rule, Mapping):
        return math.inf
    kind = rule.get("type")
    if kind == "Sequence":
        inner = rule.get("normalizers", rule.get("decoders"))
        if not isinstance(inner, list):
            return math.inf
        product = 1.0
        for one in inner:
            product *= text_growth(one)
        return product
    if kind == "Replace":
        return _replace_growth(rule)
    if kind == "Precompiled":
        return _precompiled_growth(rule.get("precompiled_charsmap"))
    if kind == "Prepend":
        return 1.0 if _length(rule.get("prepend")) <= MAX_AFFIX else math.inf
    return float(UNICODE_GROWTH.get(str(kind), 1))


def _replace_growth(rule: Mapping[str, Any]) -> float:
    """Of one replacement; an expression may match between any two characters."""
    pattern, content = rule.get("pattern"), _length(rule.get("content"))
    literal = pattern.get("String") if isinstance(pattern, Mapping) else None
    if isinstance(literal, str) and literal:
        return max(1.0, content / len(literal))
    return 1.0 + content


def _length(text: object) -> float:
    return len(text) if isinstance(text, str) else math.inf


def _precompiled_growth(encoded: object) -> float:
    """Of SentencePiece's table: a trie behind its length in bytes, then the replacements, each with
    a zero at its end."""
    if not isinstance(encoded, str):
        return math.inf
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return math.inf
    replacements = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return float(max(1, *map(len, replacements)))


def added_tokens(rule: object) -> float:
    """How many tokens a post-processor puts around a text at most; infinity for a rule that cannot
    be read."""
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
    longest = [len(t.get("ids", ())) for t in tokens.values() if isinstance(t, Mapping)]
    return float(len(pieces) * max(1, *longest, 1))


@contextmanager
def panics_as(make: Callable[[str], EdgeSpecError], *, quiet: bool = False) -> Iterator[None]:
    """Turns a panic of the tokenizer library, which is no Exception, into the error that `make`
    makes of its message. With `quiet` what the library prints of it on stderr is dropped."""
    try:
        if not quiet:
            yield
        else:
            with without_panics():
                yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise make(str(error)) from None


@contextmanager
def without_panics() -> Iterator[None]:
    """Holds back what is printed on stderr, by whatever thread, and prints it at the end without
    the reports of panics. One at a time."""
    with REDIRECTING, tempfile.TemporaryFile() as kept:
        real = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(real, 2)
            os.close(real)
            kept.seek(0)
            if rest := PANIC.sub(b"", kept.read()):
                os.write(2, rest)
