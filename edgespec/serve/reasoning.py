"""Thoughts apart from the answer, as the text comes.

Knows the marks that models put around thoughts, as text or as special tokens, which make none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.runtime.text.thinking import THOUGHTS
from edgespec.runtime.text.tokenizer import Tokenizer

TAIL = 8  # tokens of a prompt among which its last mark is looked for


@dataclass(frozen=True, slots=True)
class Marks:
    """What begins and ends thoughts; the ids where they are special tokens."""

    begin: str
    end: str
    begin_id: int | None = None
    end_id: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Marks | None:
        """Those of a model; None where it has none."""
        for begin, end in THOUGHTS:
            first, last = tokenizer.token_id(begin), tokenizer.token_id(end)
            if first is not None and last is not None:
                is_text = not tokenizer.is_special(last)
                return cls(begin, end) if is_text else cls(begin, end, first, last)
        return None


class ThoughtSplitter:
    """Divides an answer. `marks` None: all of it is the answer."""

    def __init__(self, marks: Marks | None, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.marks, self.held = marks, ""
        tail = tokenizer.decode(list(prompt[-TAIL:]), skip_special_tokens=False)
        self.inside = marks is not None and tail.rstrip().endswith(marks.begin)
        self.begun = self.inside  # thoughts come first, so that only blanks are before their mark
        self.over = marks is None
        self.num_thoughts = 0  # tokens

    def push(self, token_ids: Sequence[int], pieces: Sequence[str]) -> tuple[str, str]:
        """What a step adds to thoughts and answer."""
        thoughts, answer = "", ""
        for index in range(max(len(token_ids), len(pieces))):
            token = token_ids[index] if index < len(token_ids) else None
            piece = pieces[index] if index < len(pieces) else ""
            self.num_thoughts += self.inside and token is not None
            more = self.divided(piece)
            thoughts, answer = thoughts + more[0], answer + more[1]
            if self.marks is not None and token is not None and not self.over:
                if token == self.marks.begin_id and not self.begun:
                    self.inside = self.begun = True
                elif token == self.marks.end_id and self.inside:
                    self.inside, self.over = False, True
        return thoughts, answer

    def flush(self) -> tuple[str, str]:
        """What was held back, as it might have become a mark."""
        held, self.held = self.held, ""
        return (held, "") if self.inside else ("", held)

    def divided(self, piece: str) -> tuple[str, str]:
        """A piece of text as thoughts and answer."""
        if self.over or self.marks is None:
            return "", piece
        text, self.held = self.held + piece, ""
        if not self.begun:
            start = text.lstrip()
            if start.startswith(self.marks.begin):
                self.inside = self.begun = True
                text = start.removeprefix(self.marks.begin)
            elif self.marks.begin.startswith(start):
                self.held = text
                return "", ""
            else:
                self.over = True
                return "", text
        before, mark, after = text.partition(self.marks.end)
        if mark:
            self.inside, self.over = False, True
            return before, after
        kept = ending(text, self.marks.end)
        self.held = text[len(text) - kept :]
        return text[: len(text) - kept], ""


def ending(text: str, mark: str) -> int:
    """How many characters at the end of a text a mark could begin with."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(mark[:n])), 0)
