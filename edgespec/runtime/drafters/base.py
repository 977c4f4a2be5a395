"""What a drafter is: it proposes trees and is told what became of them. How drafts are judged is not its concern."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.runtime.tree import DraftPlan, DraftTree


class Drafter(Protocol):
    """One sequence's drafter."""

    def propose(self, pending: int, plan: DraftPlan) -> DraftTree:
        """A tree rooted at the pending token, within the plan; root only where nothing can be drafted."""

    def observe(self, features: NDArray[np.float32], tokens: NDArray[np.int64]) -> None:
        """The base's features [m, k*H] of m committed positions, each with the token [m] that came after it."""

    def reset(self) -> None: ...

    @property
    def engine_s(self) -> float:
        """Seconds spent inside engines so far."""
