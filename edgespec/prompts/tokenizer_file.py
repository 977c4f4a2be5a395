"""A tokenizer.json, opened and tried: what is damaged or never comes to an end is refused before a
text goes through it.

Knows the file and its rules. Knows nothing of models and chat templates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

import tokenizers

from edgespec.errors import BundleError, RequestError
from edgespec.prompts.template import COPY_AGAIN, read_text
from edgespec.safe_read.tokenizer import (
    MAX_AFFIX,
    MAX_DECODED_GROWTH,
    MAX_GROWTH,
    MAX_PREFIX,
    MAX_SPLIT_GROWTH,
    added_tokens,
    has_byte_level,
    joined_chars,
    oversized,
    panics_as,
    text_growth,
)

SIMPLER = (
    "It is the model's own tokenizer that does this. Repair the regular expression in the"
    " tokenizer.json of the checkpoint, and export and build it again."
)


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json, which neither cuts nor pads a text, whatever it says.

    Raises BundleError for a file that is missing or damaged, and for rules that make texts many
    times longer or never come to an end.
    """
    text = read_text(path)
    if text is None:
        raise BundleError(
            f"{path.parent} has no {path.name}.",
            "Copy tokenizer.json from the model's checkpoint; where it has none, save it once with"
            " transformers: AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY).",
        )
    check_strings(text, path)
    with panics_as(lambda why: BundleError(f"{path} is damaged: {why}.", COPY_AGAIN)):
        try:
            tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises the class Exception itself
            raise BundleError(f"{path} is damaged: {error}.", COPY_AGAIN) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    check_rules(tokenizer, path)
    return tokenizer


def check_strings(text: str, path: Path) -> None:
    """Raises BundleError for what is not JSON, and for tokens that are longer than any in use: the
    library needs many times their size to look for them."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is damaged: {error}.", COPY_AGAIN) from error
    if not isinstance(document, dict):
        raise BundleError(f"{path} is damaged: it is not a JSON object.", COPY_AGAIN)
    if problem := oversized(document):
        raise BundleError(f"{path}: {problem}.", COPY_AGAIN)


# Runs of one character, by which expressions with nested repetitions are found
SAMPLES = ("a" * 40 + "!", "1" * 40 + "!", " " * 40 + "!")


def check_rules(tokenizer: tokenizers.Tokenizer, path: Path) -> None:
    """Raises BundleError for rules that make texts many times longer, or never come to an end."""
    for name, limit in RULE_LIMITS.items():
        if text_growth(rule_of(tokenizer, name), decoding=name == "decoder") > limit:
            message = f"{path}: the {name} makes a text more than {limit} times as long."
            raise BundleError(message, COPY_AGAIN)
    if text_growth(rule_of(tokenizer, "normalizer"), 0) > MAX_PREFIX:
        message = f"{path}: the normalizer puts more than {MAX_PREFIX} characters before a text."
        raise BundleError(message, COPY_AGAIN)
    if added_tokens(rule_of(tokenizer, "post_processor")) > MAX_AFFIX:
        message = f"{path}: the post_processor adds more than {MAX_AFFIX} tokens to a text."
        raise BundleError(message, COPY_AGAIN)
    with panics_as(lambda why: cannot_split(path, why)):
        for sample in SAMPLES:
            tokenizer.encode(sample, add_special_tokens=False)


RULE_LIMITS = {
    "normalizer": MAX_GROWTH,
    "pre_tokenizer": MAX_SPLIT_GROWTH,
    "decoder": MAX_DECODED_GROWTH,
}
FREE_CHARS = 2**20  # that a normalizer may make of any text,
MAX_TIMES = 4  # and beyond them so many times the text's; published ones stay below 2


def normalizer_growth(tokenizer: tokenizers.Tokenizer) -> float:
    """How many characters the normalizer makes of one at most."""
    return text_growth(rule_of(tokenizer, "normalizer"))


def check_growth(tokenizer: tokenizers.Tokenizer, text: str, growth: float) -> None:
    """Raises RequestError where the normalizer, of such a growth, makes a text many times as long
    as it is. It is tried piece by piece, each small, and only for a text that is long enough."""
    allowed, made = FREE_CHARS + MAX_TIMES * len(text), 0
    if len(text) * growth <= allowed:
        return
    piece = max(1, int(FREE_CHARS / growth))
    for start in range(0, len(text), piece):
        made += len(tokenizer.normalizer.normalize_str(text[start : start + piece]))
        if made > allowed:
            raise RequestError(
                f"The normalizer of tokenizer.json makes more than {allowed} characters of a text"
                f" of {len(text)}.",
                f"Shorten the text. If it is ordinary text, the file is damaged. {COPY_AGAIN}",
            )


def chars_per_token(tokenizer: tokenizers.Tokenizer) -> float:
    """How many characters of a text one token stands for at most; infinity where that has no bound:
    rules that drop characters, words that become one unknown token."""
    model, vocabulary = tokenizer.model, tokenizer.get_vocab()
    rules = [rule_of(tokenizer, name) for name in ("normalizer", "pre_tokenizer")]
    added = tokenizer.get_added_tokens_decoder().values()
    if not isinstance(model, tokenizers.models.BPE) or any(t.lstrip or t.rstrip for t in added):
        return math.inf
    if any(map(has_byte_level, rules)):
        bytes_of: Iterable[str] = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:
        bytes_of = [f"<0x{byte:02X}>" for byte in range(256)] if model.byte_fallback else [""]
    if not all(token in vocabulary for token in bytes_of):
        return math.inf
    return max(map(len, vocabulary)) * joined_chars(*rules)


def cannot_split(path: Path, why: str) -> BundleError:
    """The error for a regular expression that gives up on a short text."""
    reason = " ".join(why.split())
    message = (
        f"{path}: a regular expression of the pre_tokenizer cannot split a short text: {reason}."
    )
    return BundleError(message, SIMPLER)


def rule_of(tokenizer: tokenizers.Tokenizer, name: str) -> object:
    """The JSON of one of the tokenizer's rules; None where it has none."""
    rule = getattr(tokenizer, name)
    return None if rule is None else json.loads(rule.__getstate__())
