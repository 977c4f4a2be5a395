"""How long work reports its progress. Knows no bars and no terminals."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """`start` names a stage and its total, in bytes or pieces, 0 where it is not known; `advance`
    adds to it."""

    def start(self, stage: str, total: int) -> None:
        """A stage of `total` units begins; the one before it has ended."""

    def advance(self, amount: int) -> None:
        """So many more units of the stage are done."""


class Silent:
    """A Progress that shows nothing."""

    def start(self, stage: str, total: int) -> None:
        """Shows nothing."""
        del stage, total

    def advance(self, amount: int) -> None:
        """Shows nothing."""
        del amount
