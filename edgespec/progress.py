"""How long work tells how far it is. Knows no bars and no terminals."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """`start` names a stage and its total, in bytes or pieces; `advance` adds to it."""

    def start(self, stage: str, total: int) -> None: ...

    def advance(self, amount: int) -> None: ...


class Silent:
    """A Progress that shows nothing."""

    def start(self, stage: str, total: int) -> None:
        del stage, total

    def advance(self, amount: int) -> None:
        del amount
