"""Flags that take several values, with commas: each is measured, and all are crossed.

Knows spelling. What the values mean is known by the commands.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    Parsed = click.ParamType[tuple[Any, ...]]
else:
    Parsed = click.ParamType  # not generic in all versions

SEPARATOR = ","
MOST = 64  # values of one flag


class Counts(Parsed):
    """Whole numbers from `least` on: `1,4,8`."""

    name = "list"
    schema = ("integer", "string")

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The numbers, each once; click.BadParameter for anything else."""
        if isinstance(value, tuple):
            return value
        counts = []
        for part in parts(str(value)):
            if not part.isascii() or not part.isdigit() or len(part) > 9 or int(part) < self.least:
                self.fail(f"{part!r:.40} is not a whole number from {self.least} on", param, ctx)
            counts.append(int(part))
        return once(self, counts, param, ctx)


class Names(Parsed):
    """Names of a few: `prefill,decode`."""

    name = "list"

    def __init__(self, known: Collection[str]) -> None:
        self.known = tuple(known)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """The names, each once; click.BadParameter for anything else."""
        if isinstance(value, tuple):
            return value
        names = parts(str(value))
        for part in names:
            if part not in self.known:
                self.fail(f"{part!r:.40} is none of {', '.join(self.known)}", param, ctx)
        return once(self, names, param, ctx)


class Texts(Parsed):
    """Any texts."""

    name = "list"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """The texts, each once."""
        if isinstance(value, tuple):
            return value
        return once(self, parts(str(value)), param, ctx)


def parts(text: str) -> list[str]:
    """The values of a list, without the spaces around them."""
    return [part.strip() for part in text.split(SEPARATOR)]


def once(
    kind: Any, values: list[Any], param: click.Parameter | None, ctx: click.Context | None
) -> tuple[Any, ...]:
    """The values, each once; click.BadParameter for too many, and for one that is empty."""
    if not all(str(value) for value in values):
        kind.fail("a value is empty: write them with commas, such as 1,4,8", param, ctx)
    if len(values) > MOST:
        kind.fail(f"{len(values)} values, and {MOST} is the limit", param, ctx)
    return tuple(dict.fromkeys(values))
