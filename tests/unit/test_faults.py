"""Every fault of scripts/faults.toml can still be planted, and planting them says truly what was
caught."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        yield importlib.import_module("plant_faults")
        del sys.modules["plant_faults"]


def test_every_fault_can_be_planted_and_its_tests_be_run(script: ModuleType) -> None:
    assert script.problems(script.read_faults()) == []


def test_the_engines_memory_and_the_loop_have_a_hundred_faults(script: ModuleType) -> None:
    here = ("edgespec/runtime/", "edgespec/backends/ort/")
    faults = [f for f in script.read_faults() if f.path.startswith(here) and not f.equivalent]
    assert len(faults) >= 100


# A project of one function

SUMS = """
def total(values):
    result = 0
    while values:
        result, values = result + values[0], values[1:]
    return result
"""
TEST = """
from toy.sums import total


def test_one_by_one():
    assert total([1, 2]) == 3
"""
OLD = "result + values[0]"


@pytest.fixture
def project(tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "project"
    for name, text in (("toy/sums.py", SUMS), ("tests/test_sums.py", TEST)):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    monkeypatch.setattr(script, "ROOT", root)
    monkeypatch.setattr(script, "COPIED", ("toy", "tests"))
    return root


def fault_of(script: ModuleType, new: str, **more: object) -> object:
    fault = script.Fault("a sum", "toy/sums.py", OLD, new, ("tests/test_sums.py",))
    return replace(fault, **more)


WRONG = "result - values[0]"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"old": "result - values"}, "toy/sums.py has 0 of"),
        ({"old": "result", "new": "found"}, "toy/sums.py has 4 of"),
        ({"new": OLD}, "it changes nothing"),
        ({"new": "result +"}, "toy/sums.py is no Python with it"),
        ({"tests": ("tests/test_sum.py",)}, "there is no tests/test_sum.py"),
        ({"tests": ()}, "it has no tests"),
        ({"path": "toy/sum.py"}, "there is no toy/sum.py"),
    ],
)
def test_what_cannot_be_planted_is_refused_with_the_reason(
    script: ModuleType, project: Path, changes: dict[str, object], said: str | None
) -> None:
    found = script.problems([replace(fault_of(script, WRONG), **changes)], project)
    assert len(found) == (said is not None)
    assert said is None or found[0].startswith(f"a sum: {said}")


def test_two_faults_of_one_name_are_refused(script: ModuleType, project: Path) -> None:
    fault = fault_of(script, WRONG)
    assert script.problems([fault, fault], project) == ["a sum: there are 2 of it"]


@pytest.mark.slow
def test_a_fault_is_caught_by_the_test_that_fails_or_does_not_end(
    script: ModuleType, project: Path, tmp_path: Path
) -> None:
    script.FORKS.set_forkserver_preload(["pytest", "hypothesis"])
    lines: list[str] = []
    plantation = script.Plantation(tmp_path / "copies", 1, None, lines.append)
    plantation.run_without(["tests/test_sums.py"])
    faults = [
        fault_of(script, WRONG, name="wrong"),
        fault_of(script, "values[0] + result", name="unseen"),
        fault_of(script, "values[0] + result + 0", name="same", equivalent="a sum commutes"),
        fault_of(script, "result", name="not the same", equivalent="it is said"),
    ]
    outcomes = plantation.run_with(faults)
    text, well = script.summary(faults, outcomes)
    assert text.splitlines() == [
        "1 of 2 faults are caught (50.0 %)",
        "2 more change nothing",
        "survived: unseen",
        "said to change nothing, and caught: not the same",
    ]
    assert not well
    assert outcomes[0].caught_by == "tests/test_sums.py::test_one_by_one"
    assert (project / "toy/sums.py").read_text() == SUMS
    endless = fault_of(script, "result, values", old=f"{OLD}, values[1:]")
    with plantation.tree() as tree:
        with script.planted(tree, endless):
            outcome = script.run_tests(tree, endless.tests, 1.0)
        assert (tree / "toy/sums.py").read_text() == SUMS
    assert outcome.caught_by == "no end within 1 s"
    well = script.summary(faults[:1], outcomes[:1])
    assert well == ("1 of 1 faults are caught (100.0 %)", True)
