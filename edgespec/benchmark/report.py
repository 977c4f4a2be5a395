"""A report of a run: what was measured, where and how, as JSON (docs/benchmark.md).

Knows the keys of the file. Reads reports of its own format alone.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from edgespec.artifacts import atomic, json_files, provenance
from edgespec.benchmark.environment import engines_of, environment, state
from edgespec.benchmark.measure import Benchmark, Plan
from edgespec.benchmark.modes import MODES
from edgespec.errors import RequestError, command
from edgespec.runtime.engine import Engine
from edgespec.runtime.requests.memory import peak_bytes
from edgespec.safe_read.regular import open_regular

FORMAT, KIND = 1, "benchmark"
MAX_BYTES = 64 * 2**20
SECTIONS = ("environment", "state", "engine", "settings")
REMEDY = f"Give a report that {command('bench', json=True)} wrote."


@dataclass
class Recorder:
    """Takes the state of the machine before a run, and makes the report after it."""

    engine: Engine
    engine_dir: Path
    plan: Plan
    notes: Sequence[str] = ()
    began: datetime = field(default_factory=lambda: datetime.now(UTC))
    before: dict[str, Any] = field(default_factory=state)

    def report(self, run: Benchmark, failed: str | None = None) -> dict[str, Any]:
        """The report of what was measured so far; `failed` says what ended it."""
        return {
            "format": FORMAT,
            "kind": KIND,
            "complete": run.complete,
            "failed": failed,
            "began": self.began.isoformat(timespec="seconds"),
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": provenance.provenance()["command"],
            "environment": environment(),
            "state": {"before": self.before, "after": state()},
            "engine": engines_of(self.engine, self.engine_dir),
            "settings": {**settings(self.plan), "acceptance": self.engine.acceptance.rule},
            "costs_known": self.engine.costs is not None,
            "notes": [*self.notes],
            "peak_memory_bytes": peak_bytes(),
            "rows": [row.to_dict() for row in run.rows()],
        }


def settings(plan: Plan) -> dict[str, Any]:
    """How it was measured: what two runs must have in common to be compared, and their length."""
    source, sampling = plan.source, asdict(plan.source.sampling)
    own = source.requests is not None  # of each request, which the hash of the file covers
    return {
        "modes": [*plan.modes],
        "prompts": source.to_dict(),
        "sampling": None if own else {name: sampling[name] for name in SAMPLING},
        "repeats": plan.repeats,
        "warmup": plan.warmup,
    }


SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


# ---- on disk


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Writes a report whole or not at all; a link's target is replaced. Raises OutputError."""
    path = Path(os.path.realpath(path))
    with atomic.writing(path):
        json_files.write_json(path, report)


def read_report(path: Path) -> dict[str, Any]:
    """A report of this format. Raises RequestError for anything else."""
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES} bytes")
        found = json.loads(data, parse_constant=no_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise no_report(path, str(error)) from None
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise no_report(path, f"its kind is not {KIND}")
    if found.get("format") != FORMAT:
        raise no_report(path, f"its format is {found.get('format')!r:.20}, and {FORMAT} is read")
    for name in SECTIONS:
        if not isinstance(found.get(name), dict):
            raise no_report(path, f"{name} is no object")
    rows = found.get("rows")
    if not isinstance(rows, list):
        raise no_report(path, "rows is no list")
    for index, row in enumerate(rows):
        check_row(row, path, f"rows[{index}]")
    return found


def check_row(row: object, path: Path, where: str) -> None:
    """Raises RequestError for a row without the keys that are read of it."""
    if not isinstance(row, dict) or row.get("mode") not in MODES:
        raise no_report(path, f"{where} has none of the modes {', '.join(MODES)}")
    figures = row.get("figures")
    if not isinstance(figures, dict):
        raise no_report(path, f"{where}.figures is no object")
    named = {**figures, **{name: row.get(name) for name in RATIOS}}
    for name, figure in named.items():
        if figure is not None and not is_figure(figure):
            raise no_report(path, f"{where}.{name} is no figure")
    for name in ("output_tokens", "batch_size"):
        if not isinstance(row.get(name), int):
            raise no_report(path, f"{where}.{name} is no whole number")


RATIOS = ("speed_over_plain", "cost_over_one_row")


def is_figure(value: object) -> bool:
    """Whether a value has samples above 0, and a median."""
    if not isinstance(value, dict) or not isinstance(value.get("samples"), list):
        return False
    numbers = [value.get("median"), *value["samples"]]
    return bool(value["samples"]) and all(is_number(number) for number in numbers)


def is_number(value: object) -> bool:
    """Whether it is a finite number that is not negative."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]


def no_constant(name: str) -> None:
    """Raises ValueError for NaN and infinities, which are not JSON."""
    raise ValueError(f"{name} is not JSON")


def no_report(path: Path, why: str) -> RequestError:
    """The error for a file that is no report."""
    return RequestError(f"{path} is no benchmark report: {why:.200}", REMEDY)
