"""Costs of steps that were not measured: so much a row and a level, in plain steps."""

from __future__ import annotations

import shutil
from pathlib import Path

from edgespec.backends.manifest import EngineManifest
from edgespec.contract import Role
from edgespec.runtime.costs.cost_model import CostModel, StepCosts
from edgespec.runtime.costs.cost_profile import (
    CostProfile,
    ObserveTime,
    PassTime,
    ProposeTime,
    device_of,
    hashes_of,
    roles_of,
    write_profile,
)

COUNTS = (1, 2, 64)


def costs(row: float = 0.1, level: float = 0.1, observe: float = 0.0) -> StepCosts:
    """A plain step takes 1 second, each further row `row`, each level drafted `level`, and each
    token observed `observe`."""
    return CostModel(profile(row, level, observe)).at(0)


def profile(
    row: float = 0.1, level: float = 0.1, observe: float = 0.0, role: Role = Role.BASE
) -> CostProfile:
    """The same as it would have been measured, for batches of 1 and 8 whose passes cost alike."""
    place = [{"context": 128, "batch": batch} for batch in (1, 8)]
    return CostProfile(
        role=role,
        base=tuple(
            PassTime(rows=n, seconds=1 + row * (n - 1), **at) for at in place for n in COUNTS
        ),
        propose=tuple(
            ProposeTime(levels=n, top_k=1, seconds=max(level * n, 1e-9), **at)
            for at in place
            for n in COUNTS
        ),
        observe=tuple(
            ObserveTime(rows=n, seconds=observe * n, **at) for at in place for n in COUNTS
        ),
    )


def with_costs(source: Path, target: Path, method: str, row: float, level: float) -> Path:
    """A copy of an engine directory with a cost profile of its own engines and of this machine."""
    shutil.copytree(source, target)
    role = next(role for role in EngineManifest.read(target).engines if role is not Role.DRAFT)
    made = profile(row, level, role=role)
    write_profile(
        target,
        CostProfile(
            role=role,
            base=made.base,
            method=method,
            propose=made.propose,
            observe=made.observe,
            engines=hashes_of(target, roles_of(role, with_draft=True)),
            device=device_of(target, role),
        ),
    )
    return target
