"""Two reports beside each other: what is unlike in how they were made, and for each row whether the
difference is more than noise.

Knows reports. A difference is judged by ranks alone (see `statistics`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.benchmark.cases import plan_sizes
from edgespec.benchmark.modes import (
    DECODE,
    PREFILL,
    SERVED,
    SERVED_PLAIN,
    SERVED_SPECULATIVE,
    SPECULATIVE,
    VERIFY,
)
from edgespec.benchmark.report import Report
from edgespec.benchmark.rows import OVER_ONE_ROW, OVER_PLAIN, Row
from edgespec.benchmark.serving.figures import THROUGHPUT, TTFT
from edgespec.benchmark.statistics import Interval, ends, ratio_estimate, ratio_interval, result_of
from edgespec.errors import RequestError

SETTINGS = ("prompts", "sampling", "acceptance", "warmup")
ROWS = "rows"
# Of each mode what is compared, and whether more of it is faster
COMPARED: Mapping[str, tuple[tuple[str, bool], ...]] = {
    PREFILL: (("prefill_tokens_per_s", True),),
    DECODE: (("tokens_per_s", True),),
    VERIFY: (("pass_s", False), (OVER_ONE_ROW, False)),
    SPECULATIVE: (("tokens_per_s", True), (OVER_PLAIN, True)),
    SERVED_PLAIN: ((THROUGHPUT, True), (TTFT, False)),
    SERVED_SPECULATIVE: ((THROUGHPUT, True), (TTFT, False), (OVER_PLAIN, True)),
}


@dataclass(frozen=True, slots=True)
class Unlike:
    """Something in which two runs differ, by the name that lets it pass."""

    name: str
    before: object
    after: object

    @property
    def words(self) -> str:
        """For a sentence; long values are cut."""
        return f"{self.name}: {shown(self.before)} and {shown(self.after)}"


@dataclass(frozen=True, slots=True)
class Change:
    """A figure of a row in both runs. `ratio` is that of the second over the first, and `interval`
    its exact one; `is_control` where it is plain decoding."""

    row: Row
    figure: str
    ratio: float
    interval: Interval | None
    result: str
    is_control: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            **self.row.key,
            "figure": self.figure,
            "ratio": self.ratio,
            **ends(self.interval),
            "result": self.result,
            "control": self.is_control,
        }


# ---- what is unlike


def unlike(before: Report, after: Report) -> Iterator[Unlike]:
    """All in which two runs differ that should be alike, by the names of their leaves."""
    mine, its = shared(before), shared(after)
    for name in dict.fromkeys((*mine, *its)):
        yield from leaves(name, mine.get(name), its.get(name))
    keys = [{key_of(row): row for row in report.rows} for report in (before, after)]
    if keys[0].keys() != keys[1].keys():
        only = [
            [words(rows[key]) for key in rows if key not in other]
            for rows, other in (keys, keys[::-1])
        ]
        yield Unlike(ROWS, *(", ".join(lines) or "no others" for lines in only))


def shared(report: Report) -> dict[str, object]:
    """What two runs should have in common."""
    engines = report.engine.get("engines")
    return {
        **report.environment,
        "method": report.engine.get("method"),
        "engines": {
            role: {name: one.get(name) for name in ("sha256", "backend", "device")}
            for role, one in (engines if isinstance(engines, dict) else {}).items()
            if isinstance(one, dict)
        },
        **{name: report.settings.get(name) for name in SETTINGS},
    }


def leaves(name: str, mine: object, its: object) -> Iterator[Unlike]:
    """The differences of two values; of objects by key."""
    if isinstance(mine, dict) and isinstance(its, dict):
        for key in dict.fromkeys((*mine, *its)):
            yield from leaves(f"{name}.{key}", mine.get(key), its.get(key))
    elif mine != its:
        yield Unlike(name, mine, its)


def refuse_unlike(differences: Sequence[Unlike], allowed: Collection[str]) -> None:
    """Raises RequestError for differences that were not allowed; `versions` allows all whose name
    begins with it, as `versions.numpy`."""
    passes = tuple(f"{name}." for name in allowed)
    refused = [one for one in differences if not f"{one.name}.".startswith(passes)]
    if refused:
        names = dict.fromkeys(one.name.partition(".")[0] for one in refused)
        flags = " ".join(f"`allow` {name}" for name in names)
        message = "these runs are unlike: " + "; ".join(one.words for one in refused)
        raise RequestError(message, f"Measure both alike, or let it pass: {flags}.")


def shown(value: object) -> str:
    """A value in a sentence."""
    text = str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


MAX_SHOWN = 80


# ---- the rows


def changes(before: Report, after: Report) -> list[Change]:
    """The rows that both have, plain decoding first."""
    others = {key_of(row): row for row in after.rows}
    rows = [
        change
        for row in before.rows
        if key_of(row) in others
        for change in row_changes(row, others[key_of(row)])
    ]
    return sorted(rows, key=lambda change: not change.is_control)


def row_changes(mine: Row, its: Row) -> Iterator[Change]:
    """What is compared of one row."""
    for name, larger_is_faster in COMPARED[mine.mode]:
        if name == OVER_ONE_ROW and mine.rows == 1:
            continue
        first, second = samples_of(mine, name), samples_of(its, name)
        if not first or not second or min(*first, *second) <= 0:
            continue
        interval = ratio_interval(first, second)
        yield Change(
            mine,
            name,
            ratio_estimate(first, second),
            interval,
            result_of(interval, larger_is_faster=larger_is_faster),
            is_control=mine.mode in (DECODE, SERVED_PLAIN),
        )


def samples_of(row: Row, name: str) -> Sequence[float]:
    """The samples of a figure; none where there is no such figure."""
    figure = row.figure(name)
    return () if figure is None else figure.samples


def key_of(row: Row) -> Hashable:
    """What a row measures, to look it up by."""
    return row.mode, row.cell, row.rows, row.variant


def words(row: Row) -> str:
    """A row as tables and messages name it."""
    plan, dial = row.variant.plan, row.variant.dial
    size = sizes(row)
    if row.mode == VERIFY:
        return f"pass over {row.rows} {size}"
    if row.mode == PREFILL:
        return f"{'prefill' if plan is None else 'prefill with the drafter'} {size}"
    if row.mode == SERVED_SPECULATIVE:
        return f"with drafts {size}"
    if plan is None:
        return f"plain {size}"
    up_to = "up to " if plan.adaptive else ""
    return f"{up_to}{plan_sizes(plan)}{'' if dial is None else f' at {dial}'} {size}"


def sizes(row: Row) -> str:
    """The sizes of a row, shortly: `128+64 b4`; `c4` are 4 clients of a server."""
    given, made = row.cell.input_tokens, row.cell.output_tokens
    if row.mode in (VERIFY, PREFILL):
        tokens = "of a file" if given is None else f"{given}"
    else:
        tokens = f"{'file' if given is None else given}+{made}"
    return f"{tokens} {'c' if row.mode in SERVED else 'b'}{row.cell.batch_size}"
