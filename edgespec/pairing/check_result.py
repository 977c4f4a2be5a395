"""What was found of a pair: one result a line, each with its remedy. Knows no checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgespec.config.model_cost import PairWork

Level = Literal["ok", "warning", "refused"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of a report: what was found of a topic, and a remedy where it is not ok."""

    level: Level
    topic: str
    what: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Share:
    """How often draft and base agreed for one reading of the hidden states.

    No aux layers: the state after the last norm.

    `gained` are positions where they agree in this reading and not in the stated one, `lost` the
    contrary.
    """

    name: str
    aux_layers: tuple[int, ...]
    share: float
    gained: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Compared:
    """How often a draft agrees with other weights of its base, at the positions of the probe.

    `difference` of both shares, and how far chance may move it, up or down, at a `confidence`.
    """

    name: str
    share: float
    difference: float
    margin: float
    confidence: float
    gained: int
    lost: int


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe found; the first of `shares` is the reading that the checkpoints state.

    `chance` is the share at which they would agree if the draft's tokens stood at other positions.
    Positions are those of text; `without_images` is the share on the text alone, where it has
    images.
    """

    positions: int
    shares: tuple[Share, ...]
    chance: float = 0.0
    images: int = 0
    without_images: float | None = None
    unrelated: bool = False  # no reading agrees beyond chance: not made for this base
    against: Compared | None = None


@dataclass(frozen=True, slots=True)
class PairReport:
    """`method` is the name of the way of drafting; empty where it is unknown."""

    method: str
    results: tuple[CheckResult, ...]
    probe: Probed | None = None
    work: PairWork | None = None  # of what fits

    def count(self, level: Level) -> int:
        """How many results have a level."""
        return sum(result.level == level for result in self.results)
