"""Control tokens that are spelled in texts of users, told from those that a chat template writes.

A mark inside each of the former goes with its text through the template. Afterwards what is spelled
whole is the template's, and is written as a stand-in; the marks go, and a tokenizer on the same
model that knows the stand-ins, and no control token, encodes the whole. So no id of one comes out
of a text, and words, first tokens and added spaces are those of any text.

Knows a tokenizer. Knows no template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import tokenizers

from edgespec.errors import RequestError

MARK, STAND_IN, END = "\ufdd0", "\ufdd1", "\ufdd2"  # noncharacters of Unicode, which no text has
MARKS = frozenset((MARK, STAND_IN, END))


class Spellings:
    """Finds tokens in texts by how they are spelled."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = frozenset(filter(None, tokens))
        self.lengths = sorted({len(token) for token in self.tokens}, reverse=True)
        self.openings = {token[:2] for token in self.tokens}
        self.prefixes = {token[:end] for token in self.tokens for end in range(1, len(token))}
        first = "".join({token[0] for token in self.tokens})
        self.first = re.compile(f"[{re.escape(first)}]") if first else re.compile(r"(?!)")

    def find(self, text: str) -> Iterator[tuple[int, str]]:
        """Every place where a token begins, with the longest that does."""
        for match in self.first.finditer(text):
            start = match.start()
            if text[start : start + 2] not in self.openings and text[start] not in self.tokens:
                continue
            for length in self.lengths:
                if (token := text[start : start + length]) in self.tokens:
                    yield start, token
                    break

    def open_end(self, text: str) -> int | None:
        """Where a token begins that what follows the text, or the trimmed one, may complete."""
        end = len(text.rstrip())
        starts = range(max(0, end - max(self.lengths, default=0) + 1), end)
        return next((start for start in starts if text[start:end] in self.prefixes), None)


class ControlTokens:
    """The control tokens of a tokenizer: its special ones."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.special = Spellings(token.content for token in added.values() if token.special)
        self.added = Spellings(token.content for token in added.values())
        self.reader = tokenizers.Tokenizer(tokenizer.model)  # which both share
        for rule in ("normalizer", "pre_tokenizer"):
            if (own := getattr(tokenizer, rule)) is not None:
                setattr(self.reader, rule, own)
        spelled = {key: stand_in(key, token) for key, token in added.items()}
        self.reader.add_tokens([*spelled.values()])
        ids = {key: self.reader.token_to_id(token.content) for key, token in spelled.items()}
        self.ids = {new: key for key, new in ids.items()}  # the reader's -> the tokenizer's
        self.stand_ins = {token.content: spelled[key].content for key, token in added.items()}
        self.affixes = affixes(tokenizer)
        # What the model itself can make of a text, such as a unigram's </s>; not the unknown token
        model, unknown = tokenizer.model, self.reader.encode(MARK, add_special_tokens=False).ids
        self.forbidden = {model.token_to_id(token) for token in self.special.tokens}
        self.forbidden -= {None, *unknown}

    def marked(self, value: Any) -> Any:
        """A value of JSON, in whose texts control tokens are marked. Raises RequestError for a text
        with a mark of its own."""
        if isinstance(value, str):
            return self.marked_text(value)
        if isinstance(value, dict):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        return [self.marked(item) for item in value] if isinstance(value, list | tuple) else value

    def marked_text(self, text: str) -> str:
        """A text with a mark behind the first character of each control token in it, and of what
        might become one at its end."""
        if not MARKS.isdisjoint(text):
            message = "A text has one of the characters U+FDD0 to U+FDD2, which mark control tokens"
            raise RequestError(f"{message}.", "Remove it: Unicode has no such characters.")
        places = {start + 1 for start, _ in self.special.find(text)}
        if (start := self.special.open_end(text)) is not None:
            places.add(start + 1)
        ends = [0, *sorted(places), len(text)]
        return MARK.join(text[start:end] for start, end in pairwise(ends))

    def encode(self, marked: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text, in which a marked control token is text. Raises RequestError where the
        model has a single token for that text, which is the control token."""
        pieces, done = list[str](), 0
        for start, token in self.added.find(marked):
            end = start + len(token)
            if start >= done and marked[end : end + 1] != MARK:
                pieces += [marked[done:start], self.stand_ins[token]]
                done = end
        text = "".join([*pieces, marked[done:]]).replace(MARK, "")
        found = self.reader.encode(text, add_special_tokens=False).ids
        if not self.forbidden.isdisjoint(found):
            message = "The model's tokenizer makes a control token of a text that spells it"
            raise RequestError(f"{message}.", "Remove it, or set `allow_control_tokens`.")
        before, behind = self.affixes if add_special_tokens else ([], [])
        return [*before, *(self.ids.get(token, token) for token in found), *behind]


def unmarked(text: str) -> str:
    """A text without marks."""
    return text.replace(MARK, "")


def stand_in(token_id: int, token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    """What the reader knows instead of a control token; other added tokens as they are."""
    return tokenizers.AddedToken(
        f"{STAND_IN}{token_id}{END}" if token.special else token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


def affixes(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before a text, and behind it."""
    found = tokenizer.encode("a", add_special_tokens=True)
    own = [index for index, special in enumerate(found.special_tokens_mask) if not special]
    return (found.ids[: own[0]], found.ids[own[-1] + 1 :]) if own else (found.ids, [])
