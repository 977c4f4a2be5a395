"""Costs that are easy to reckon with: a plain step takes a second, a further row `row`, a level of
drafts `draft`."""

from __future__ import annotations

from edgespec.contract import Role
from edgespec.runtime.costs.cost_profile import CostProfile, ObserveTime, PassTime, ProposeTime

HERE = {"context": 64, "batch": 1}


def profile(row: float, draft: float) -> CostProfile:
    return CostProfile(
        role=Role.BASE,
        base=tuple(PassTime(rows=n, seconds=1 + row * (n - 1), **HERE) for n in (1, 2, 60)),
        method="eagle3",
        propose=tuple(
            ProposeTime(levels=n, top_k=k, seconds=draft * n, **HERE)
            for n in (1, 8)
            for k in (1, 10)
        ),
        observe=tuple(ObserveTime(rows=n, seconds=0.0, **HERE) for n in (1, 8)),
    )
