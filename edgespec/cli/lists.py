"""Flags that take several values, with commas: each is measured, and all are crossed.

Knows spelling. What the values mean is known by the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    Parsed = click.ParamType[tuple[Any, ...]]
else:
    Parsed = click.ParamType  # not generic in all versions

SEPARATOR = ","
MOST = 64  # values of one flag


class Texts(Parsed):
    """Values with commas, each once, as `read` makes them of their texts; it raises ValueError."""

    name = "list"

    def __init__(self, read: Callable[[str], Any] = str) -> None:
        self.read = read

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """The values; click.BadParameter for anything else, and for too many."""
        if isinstance(value, tuple):
            return value
        texts = [part.strip() for part in str(value).split(SEPARATOR)]
        try:
            values = [self.read(text) for text in texts]
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not all(texts):
            self.fail("a value is empty: write them with commas, such as 1,4,8", param, ctx)
        if len(values) > MOST:
            self.fail(f"{len(values)} values, and {MOST} is the limit", param, ctx)
        return tuple(dict.fromkeys(values))


class Counts(Texts):
    """Whole numbers from `least` on: `1,4,8`."""

    schema = ("integer", "string")

    def __init__(self, least: int = 1) -> None:
        def count(text: str) -> int:
            if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < least:
                raise ValueError(f"{text!r:.40} is not a whole number from {least} on")
            return int(text)

        super().__init__(count)


class Names(Texts):
    """Names of a few: `prefill,decode`."""

    def __init__(self, known: Collection[str]) -> None:
        known = tuple(known)

        def name(text: str) -> str:
            if text not in known:
                raise ValueError(f"{text!r:.40} is none of {', '.join(known)}")
            return text

        super().__init__(name)
