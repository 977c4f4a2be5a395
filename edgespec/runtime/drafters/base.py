"""What a drafter is: it proposes trees and is told what became of them. How drafts are judged is
not its concern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LaneRows
from edgespec.runtime.tree import DraftPlan, DraftTree


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A lane that wants a tree rooted at its pending token."""

    lane: int
    pending: int
    plan: DraftPlan


@dataclass(frozen=True, slots=True)
class Observation:
    """What was committed in a lane: the base's features of m positions, each with the token that
    came after it."""

    lane: int
    features: NDArray[np.float32]  # [m, k*H]
    tokens: NDArray[np.int64]  # [m]


class Drafter(Protocol):
    """The drafter of as many sequences as there are lanes."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A tree a wish, within its plan; root only where nothing can be drafted."""

    def observe(self, seen: Sequence[Observation]) -> None: ...

    def reset(self, lane: int) -> None: ...

    def move(self, source: int, target: int) -> None:
        """The sequence of one lane goes on in another."""

    def snapshot(self, lane: int, count: int) -> LaneRows:
        """What it remembers of a lane's first `count` pairs, or of as many as it has seen."""

    def restore(self, lane: int, rows: LaneRows) -> None:
        """Begin a lane with what `snapshot` gave; at least one more pair is observed before
        anything is proposed."""

    @property
    def engine_s(self) -> float:
        """Seconds spent inside engines so far."""
