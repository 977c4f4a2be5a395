"""A tokenizer.json, opened and tried: what is damaged or never comes to an end is refused before a
text goes through it.

Knows the file and its rules. Knows nothing of models and chat templates.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers

from edgespec.errors import BundleError
from edgespec.prompts.template import COPY_AGAIN, read_text
from edgespec.stored.tokenizer import (
    MAX_AFFIX,
    MAX_GROWTH,
    added_tokens,
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
    with panics_as(lambda why: BundleError(f"{path} is damaged: {why}.", COPY_AGAIN), quiet=True):
        try:
            tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises the class Exception itself
            raise BundleError(f"{path} is damaged: {error}.", COPY_AGAIN) from error
    check_rules(tokenizer, path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


# Runs of one character, by which expressions with nested repetitions are found
SAMPLES = ("a" * 40 + "!", "1" * 40 + "!", " " * 40 + "!")


def check_rules(tokenizer: tokenizers.Tokenizer, path: Path) -> None:
    """Raises BundleError for rules that make texts many times longer, or never come to an end."""
    for name in ("normalizer", "decoder"):
        if text_growth(_rule(tokenizer, name)) > MAX_GROWTH:
            what = f"{path}: the {name} makes a text more than {MAX_GROWTH} times as long."
            raise BundleError(what, COPY_AGAIN)
    if added_tokens(_rule(tokenizer, "post_processor")) > MAX_AFFIX:
        what = f"{path}: the post_processor adds more than {MAX_AFFIX} tokens to a text."
        raise BundleError(what, COPY_AGAIN)
    for sample in SAMPLES:
        with panics_as(lambda why: cannot_split(path, why), quiet=True):
            tokenizer.encode(sample, add_special_tokens=False)


def cannot_split(path: Path, why: str) -> BundleError:
    """The error for a regular expression that gives up on a short text."""
    reason = " ".join(why.split())
    what = f"{path}: a regular expression of the pre_tokenizer cannot split a short text: {reason}."
    return BundleError(what, SIMPLER)


def _rule(tokenizer: tokenizers.Tokenizer, name: str) -> object:
    """The JSON of one of the tokenizer's rules; None where it has none."""
    rule = getattr(tokenizer, name)
    return None if rule is None else json.loads(rule.__getstate__())
