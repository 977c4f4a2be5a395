"""What a row of the table of sources says. Knows no data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.prompts.chats import Turn, messages_of

Messages = tuple[Turn, ...]  # none: the record is left out


@dataclass(frozen=True, slots=True)
class Part:
    """A repository of a source on the hub. No `splits` are all of them; `cap` is the most records
    of a split. Variants are made of those that are to be `augmented`."""

    repository: str
    splits: tuple[str, ...] = ()
    cap: int | None = None
    augmented: bool = True


@dataclass(frozen=True, slots=True)
class Source:
    """A data set: where it is, and how a record becomes messages."""

    parts: tuple[Part, ...]
    read: Callable[[Mapping[str, Any]], Messages] = messages_of
