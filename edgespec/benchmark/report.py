"""A report of a run: what was measured, where and how, as JSON (docs/benchmark.md).

Knows the keys of the file. Reads reports of its own format alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edgespec.artifacts import atomic, json_files, provenance
from edgespec.benchmark.environment import engines_of, environment, state
from edgespec.benchmark.measure import BenchPlan
from edgespec.benchmark.modes import SERVED_SPECULATIVE
from edgespec.benchmark.report_fields import ReportFields
from edgespec.benchmark.rows import Row
from edgespec.benchmark.serving.figures import Crossover
from edgespec.errors import BundleError, RequestError
from edgespec.runtime.engine import Engine
from edgespec.runtime.requests.memory import peak_bytes
from edgespec.safe_read.regular import read_regular

if TYPE_CHECKING:
    from edgespec.benchmark.serving.measure import ServePlan

FORMAT, KIND = 1, "benchmark"
MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a report says, in the order of its keys. `failed` is what ended the run too early."""

    complete: bool
    failed: str | None
    began: str
    ended: str
    command: Sequence[str]
    environment: Mapping[str, Any]
    state: Mapping[str, Any]
    engine: Mapping[str, Any]
    settings: Mapping[str, Any]
    costs_known: bool
    notes: Sequence[str]
    peak_memory_bytes: int
    rows: Sequence[Row]

    @classmethod
    def read(cls, fields: ReportFields) -> Report:
        """From its JSON. Raises BundleError."""
        rows = fields.get("rows")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise fields.wrong("rows", "a list of objects")
        names = [f"{fields.source} (rows[{index}])" for index in range(len(rows))]
        read = [Row.read(ReportFields(*row)) for row in zip(rows, names, strict=True)]
        return cls(**fields.values(cls), rows=read)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        rows, crossover = [row.to_dict() for row in self.rows], self.crossover
        return {
            "format": FORMAT,
            "kind": KIND,
            **vars(self),
            "crossover": None if crossover is None else asdict(crossover),
            "rows": rows,
        }

    @property
    def crossover(self) -> Crossover | None:
        """At how many clients of a server drafts stop paying; None where that was not measured."""
        return Crossover.of(
            {
                row.cell.batch_size: row.over_plain.median
                for row in self.rows
                if row.mode == SERVED_SPECULATIVE and row.over_plain is not None
            }
        )


class Measured(Protocol):
    """What was measured: all of it where `complete`."""

    complete: bool

    def rows(self) -> Iterable[Row]:
        """What was measured so far."""


@dataclass
class Recorder:
    """Takes the state of the machine before a run, and makes the report after it."""

    engine: Mapping[str, Any]
    settings: Mapping[str, Any]
    costs_known: bool = False
    notes: Sequence[str] = ()
    began: datetime = field(default_factory=lambda: datetime.now(UTC))
    before: dict[str, Any] = field(default_factory=state)

    @classmethod
    def of(
        cls, engine: Engine, engine_dir: Path, plan: BenchPlan, notes: Sequence[str]
    ) -> Recorder:
        """Of a run on an open engine."""
        asked = {**settings(plan), "acceptance": engine.acceptance.rule}
        return cls(engines_of(engine, engine_dir), asked, engine.costs is not None, notes)

    def report(self, run: Measured, failed: str | None = None) -> Report:
        """The report of what was measured so far; `failed` says what ended it."""
        return Report(
            complete=run.complete,
            failed=failed,
            began=self.began.isoformat(timespec="seconds"),
            ended=datetime.now(UTC).isoformat(timespec="seconds"),
            command=provenance.provenance()["command"],
            environment=environment(),
            state={"before": self.before, "after": state()},
            engine=self.engine,
            settings=self.settings,
            costs_known=self.costs_known,
            notes=[*self.notes],
            peak_memory_bytes=peak_bytes(),
            rows=[*run.rows()],
        )


def settings(plan: BenchPlan | ServePlan) -> dict[str, Any]:
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


def write_report(path: Path, report: Report) -> None:
    """Writes a report whole or not at all; a link's target is replaced. Raises OutputError."""
    path = Path(os.path.realpath(path))
    with atomic.writing(path):
        json_files.write_json(path, report.to_dict())


def read_report(path: Path) -> Report:
    """A report of this format. Raises RequestError for anything else."""
    try:
        data = read_regular(path, MAX_BYTES)
        raw = json.loads(data, parse_constant=no_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise no_report(path, str(error)) from None
    if not isinstance(raw, dict) or raw.get("kind") != KIND:
        raise no_report(path, f"its kind is not {KIND}")
    if raw.get("format") != FORMAT:
        raise no_report(path, f"its format is {raw.get('format')!r:.20}, and {FORMAT} is read")
    try:
        return Report.read(ReportFields(raw, str(path)))
    except BundleError as error:
        raise RequestError(error.what, error.remedy) from None


def no_constant(name: str) -> None:
    """Raises ValueError for NaN and infinities, which are not JSON."""
    raise ValueError(f"{name} is not JSON")


def no_report(path: Path, why: str) -> RequestError:
    """The error for a file that is no report."""
    return RequestError(f"{path} is no benchmark report: {why:.200}", ReportFields.remedy)
