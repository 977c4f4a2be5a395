"""Which graphs TensorRT-RTX was asked about in a run of these tests, and what it and the linter say
of each: the table at the end of `make test-tensorrt`.

Knows no library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx

from edgespec.backends.tensorrt.linter import lint, lint_file
from edgespec.backends.tensorrt.rules import Level
from edgespec.backends.tensorrt.versions import Capabilities

COLUMNS = (
    *("graphs of", "test", "asked", "parsed", "compiled", "parser refuses", "compiler refuses"),
    *("linter takes", "linter takes, RTX refuses"),
)
TEST = re.compile(r"test_(\w+)\.py::test_(\w+)")


@dataclass(frozen=True, slots=True)
class Asked:
    """One question: the test that asked, whether a build was asked for, what refused, and whether
    the linter's rules refuse it too."""

    test: str
    build: bool
    step: str
    linted: bool

    @property
    def place(self) -> tuple[str, str]:
        """The file and the test in words."""
        found = TEST.search(self.test)
        assert found is not None, self.test
        return found[1].replace("_", " "), found[2].replace("_", " ")


ASKED: list[Asked] = []


def note(model: bytes | Path, version: Capabilities, step: str, *, build: bool) -> None:
    """Remember what was said of a graph, with what the linter says of it."""
    if isinstance(model, bytes):
        report = lint(onnx.ModelProto.FromString(model), version)
    else:
        report = lint_file(model, version)
    refused = report.count(Level.REFUSED) > 0
    ASKED.append(Asked(os.environ.get("PYTEST_CURRENT_TEST", ""), build, step, refused))


def rows(asked: Iterable[Asked]) -> list[tuple[object, ...]]:
    """A row for each test."""
    by_place: dict[tuple[str, str], list[Asked]] = {}
    for one in asked:
        by_place.setdefault(one.place, []).append(one)
    return [(*place, *counts(found)) for place, found in by_place.items()]


def counts(found: list[Asked]) -> list[int]:
    """The numbers of a row."""
    steps = [one.step for one in found]
    return [
        len(found),
        len(found) - steps.count("parse"),
        sum(one.build and not one.step for one in found),
        steps.count("parse"),
        steps.count("build"),
        sum(not one.linted for one in found),
        sum(not one.linted and bool(one.step) for one in found),
    ]


def table(asked: list[Asked], title: str) -> list[str]:
    """The table in Markdown, with all of it in its last row."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    whole = ("all", title, *counts(asked))
    lines += [f"| {' | '.join(map(str, row))} |" for row in (*rows(asked), whole)]
    return lines
