"""Prompts of benchmarks, which a draft must not learn before it is measured with them.

A turn is one of theirs where it shares thirteen words in a row with one, as is usual for language
models (arXiv 2005.14165, appendix C), or, for shorter prompts, all words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from edgespec.prompts.chats import Turn, read_chats

WORDS_IN_A_ROW = 13
WORD = re.compile(r"\w+")


class Benchmarks:
    """The prompts of some files, JSONL with turns or messages."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Raises RequestError that names the line."""
        chats = (chat for path in paths for chat in read_chats(path))
        self.known = {key for chat in chats for key in keys_of(chat.messages)}

    def has(self, messages: Iterable[Turn]) -> bool:
        """Whether a turn of the user is, or quotes, one of their prompts."""
        return bool(self.known) and not self.known.isdisjoint(keys_of(messages))


def keys_of(messages: Iterable[Turn]) -> Iterator[int]:
    """What two turns have in common where one quotes the other."""
    for message in messages:
        if message["role"] == "user":
            words = WORD.findall(message["content"].lower())
            last = max(len(words) - WORDS_IN_A_ROW, 0)
            yield from (hash(tuple(words[i : i + WORDS_IN_A_ROW])) for i in range(last + 1))
