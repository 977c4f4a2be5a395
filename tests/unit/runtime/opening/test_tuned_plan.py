"""tuned.json: what is kept, what of it is refused, and when it is dropped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.contract import Role
from edgespec.errors import BundleError
from edgespec.runtime.opening.tuned_plan import (
    FILE,
    TunedPlan,
    belonging,
    drop_stale_plan,
    find_tuned,
    read_tuned,
    write_tuned,
)
from edgespec.runtime.trees.static_tree import StaticPlan
from edgespec.runtime.trees.tree import BlockPlan, DraftPlan
from tests.small_pair import copied, small_pair


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    return copied(small_pair().engine, tmp_path / "engines")


def tuned(engines: Path, plan: DraftPlan | None) -> TunedPlan:
    return TunedPlan(
        role=Role.BASE,
        method=None if plan is None else "eagle3",
        plan=plan,
        over_plain=1.25,
        acceptance=((0.5, 0.25), (0.4, 0.0)),
        prior=(0.75, 0.4),
        words="chain of 3",
        **belonging(engines, Role.BASE, with_draft=True),
    )


@pytest.mark.parametrize(
    "plan",
    [
        DraftPlan(1, 3, 4, adaptive=True),
        DraftPlan(4, 3, 16),
        BlockPlan(2, 7, 12, 1, adaptive=True),
        StaticPlan.of([[0], [1], [0, 0]]),
        replace(StaticPlan.of([[0], [0, 1]]), adaptive=True),
        None,
    ],
)
def test_a_plan_is_read_as_it_was_written(engines: Path, plan: DraftPlan | None) -> None:
    written = tuned(engines, plan)
    write_tuned(engines, written)
    assert read_tuned(engines) == written
    assert find_tuned(engines).tuned == written
    assert type((found := read_tuned(engines)) and found.plan) is type(plan)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 2),
        ("role", "draft2"),
        ("method", "nothing"),
        ("plan", {"top_k": 0, "steps": 1, "verify_size": 2, "adaptive": False}),
        ("plan", {"top_k": 1, "steps": True, "verify_size": 2, "adaptive": False}),
        ("plan", {"top_k": 1, "steps": 1, "verify_size": 2, "adaptive": False, "choices": [[1]]}),
        ("plan", None),
        ("options", []),
        ("over_plain", "fast"),
        ("acceptance", [[1.5]]),
        ("prior", [-0.1]),
        ("words", "x" * 1000),
        ("engines", None),
    ],
)
def test_a_damaged_file_is_named_with_a_remedy(engines: Path, key: str, value: Any) -> None:
    write_tuned(engines, tuned(engines, StaticPlan.of([[0], [0, 0]])))
    raw = json.loads((engines / FILE).read_text())
    if key == "plan" and value is not None and "choices" in value:
        value["choices"] = [[0, 1]]  # without its parent
    (engines / FILE).write_text(json.dumps(raw | {key: value}))
    with pytest.raises(BundleError, match="is no tuned plan") as refused:
        read_tuned(engines)
    assert "edgespec tune" in refused.value.remedy
    assert find_tuned(engines).tuned is None
    assert "is no tuned plan" in (find_tuned(engines).note or "")


def test_one_of_other_engines_is_not_taken_and_dropped(engines: Path) -> None:
    write_tuned(engines, replace(tuned(engines, DraftPlan(1, 2, 3)), engines={"base": "0"}))
    found = find_tuned(engines)
    assert found.tuned is None
    assert "built again" in (found.note or "")
    drop_stale_plan(engines)
    assert not (engines / FILE).exists()
    drop_stale_plan(engines)  # nothing to drop


def test_one_of_another_device_is_kept_and_not_taken(engines: Path) -> None:
    write_tuned(engines, replace(tuned(engines, DraftPlan(1, 2, 3)), device={"cores": 999}))
    assert "another device" in (find_tuned(engines).note or "")
    drop_stale_plan(engines)
    assert (engines / FILE).exists()
