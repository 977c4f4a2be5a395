"""What was found of a pair: one verdict a line, each with its remedy. Knows no checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "refused"]


@dataclass(frozen=True, slots=True)
class Verdict:
    level: Level
    topic: str
    what: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """`method` is the name of the way of drafting; empty where it could not be told."""

    method: str
    verdicts: tuple[Verdict, ...]

    def count(self, level: Level) -> int:
        return sum(verdict.level == level for verdict in self.verdicts)
