"""Names by which a user chooses how drafts are accepted and how far each step drafts.

Knows names alone. Rules stand in `runtime.acceptance`, policies in `runtime.plans.policy`.
"""

from __future__ import annotations

from typing import Final, Literal

EXACT, REJECTION, TYPICAL, RELAXED = RULES = ("exact", "rejection", "typical", "relaxed")

SpecPolicy = Literal["fixed", "adaptive"]
FIXED: Final = "fixed"
ADAPTIVE: Final = "adaptive"
POLICIES: tuple[SpecPolicy, ...] = (FIXED, ADAPTIVE)
