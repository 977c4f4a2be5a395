"""What `bench` shows: a table of each mode, and the comparison of two runs.

Knows how values look. What they mean stands in docs/benchmark.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import click
from rich.table import Table

from edgespec.backends.divergence import Divergence
from edgespec.backends.engine_config import EngineFields
from edgespec.benchmark.compare import Change, Unlike, sizes, words
from edgespec.benchmark.modes import SERVED
from edgespec.benchmark.report import Report
from edgespec.benchmark.rows import Row
from edgespec.benchmark.serving.figures import ITL, REQUESTS, THROUGHPUT, TTFT
from edgespec.benchmark.statistics import NOISE, UNKNOWN
from edgespec.cli import tables
from edgespec.cli.tables import print_table
from edgespec.cli.terminal import harmless, say
from edgespec.errors import LimitError, counted

if TYPE_CHECKING:
    from edgespec.runtime.engine import Engine

CLOSE = 0.1  # a prediction within so much of what was measured is said to hold
Cell = Callable[[Row], str | None]


# ---- values


def number(row: Row, name: str, form: str, factor: float = 1.0) -> str | None:
    """The median of a figure; None where it was not measured."""
    figure = row.figure(name)
    return None if figure is None else form.format(factor * figure.median)


def over(row: Row) -> str | None:
    """The speed over plain decoding, or what a pass costs over one row, with its interval."""
    if row.over_plain is None:
        return None
    middle, ends = f"{row.over_plain.median:.2f}", row.over_plain.interval
    return middle if ends is None else f"{middle} [{ends.low:.2f}, {ends.high:.2f}]"


def decimal(value: float | None) -> str | None:
    """A number with two places; None where there is none."""
    return None if value is None else f"{value:.2f}"


def positions(row: Row) -> str | None:
    """Acceptance by position."""
    rates = row.speculation.per_position_acceptance if row.speculation else ()
    return " ".join(f"{rate:.2f}" for rate in rates[:MAX_POSITIONS]) or None


MAX_POSITIONS = 6


def way(row: Row) -> str:
    """What was done."""
    return words(row).removesuffix(f" {sizes(row)}")


def percentile(row: Row, name: str, which: str) -> str | None:
    """A percentile of what the clients of a server saw."""
    found = None if row.served is None else row.served.metrics.get(name)
    return None if found is None else f"{getattr(found, which):.1f}"


def failed(row: Row) -> str | None:
    """How many requests failed; None where none did."""
    count = sum(row.served.errors.values()) if row.served else 0
    return f"{count}/{row.served.requests}" if row.served and count else None


def equal(row: Row) -> str | None:
    """How many answers are the plain ones."""
    beside_none = row.served is not None and row.over_plain is None
    if row.mode == "decode" or beside_none or not row.answers:
        return None
    return f"{row.answers_equal_to_plain}/{row.answers}"


WAY: tuple[tuple[str, Cell], ...] = (("", way), ("tokens", sizes))
PREFILL = (
    *WAY,
    ("tokens/s", lambda r: number(r, "prefill_tokens_per_s", "{:.1f}")),
    ("time to first token", lambda r: number(r, "time_to_first_token_s", "{:.3f} s")),
    ("over plain", over),
)
VERIFY = (
    *WAY,
    ("ms", lambda r: number(r, "pass_s", "{:.2f}", 1000)),
    ("over one row", over),
)
DECODE = (
    *WAY,
    ("tokens/s", lambda r: number(r, "tokens_per_s", "{:.1f}")),
    ("over plain", over),
    ("predicted", lambda r: decimal(r.predicted)),
    ("tokens/step", lambda r: decimal(r.speculation.acceptance_length if r.speculation else None)),
    ("by position", positions),
    ("first token", lambda r: number(r, "time_to_first_token_s", "{:.3f} s")),
    ("between tokens", lambda r: number(r, "inter_token_latency_s", "{:.2f} ms", 1000)),
    ("as plain", equal),
)
SERVE = (
    *WAY,
    ("tokens/s", lambda r: number(r, THROUGHPUT, "{:.1f}")),
    ("over plain", over),
    ("requests/s", lambda r: number(r, REQUESTS, "{:.2f}")),
    ("first token p50", lambda r: percentile(r, TTFT, "p50")),
    ("p99", lambda r: percentile(r, TTFT, "p99")),
    ("between tokens p50", lambda r: percentile(r, ITL, "p50")),
    ("p99", lambda r: percentile(r, ITL, "p99")),
    ("tokens/step", lambda r: decimal(r.speculation.acceptance_length if r.speculation else None)),
    ("as plain", equal),
    ("failed", failed),
)
TABLES: tuple[tuple[str, tuple[str, ...], tuple[tuple[str, Cell], ...]], ...] = (
    ("reading prompts", ("prefill",), PREFILL),
    ("base passes", ("verify",), VERIFY),
    ("decoding", ("decode", "speculative"), DECODE),
    ("a server with so many clients (c), ms", SERVED, SERVE),
)


# ---- a report


def show(report: Report, *, err: bool = False) -> None:
    """Print the tables of a report, and where it was measured; with `err` on stderr."""
    for title, modes, columns in TABLES:
        rows = [row for row in report.rows if row.mode in modes]
        if rows:
            print_table(table(title, rows, columns), err=err)
            click.echo("", err=err)
    for line in below(report):
        say(line, err=err)
    if not report.complete:
        say("not complete: the run ended before all was measured", err=True)


def table(title: str, rows: Sequence[Row], columns: Sequence[tuple[str, Cell]]) -> Table:
    """A row for each; columns in which nothing was measured are left out."""
    cells = [[cell(row) for _, cell in columns] for row in rows]
    kept = [i for i in range(len(columns)) if any(line[i] for line in cells)]
    left = sum(i < len(WAY) for i in kept)
    out = tables.columns(*(columns[i][0] for i in kept), left=left, title=title)
    for line in cells:
        out.add_row(*(harmless(line[i] or "-") for i in kept))
    return out


def below(report: Report) -> Iterator[str]:
    """Where it was measured, and what is to be known of the figures."""
    here, state = report.environment, report.state
    known = [
        here.get("device"),
        f"{here.get('threads')} of {here.get('cores')} cores",
        *(f"{label} {here[key]}" for label, key in NAMED if here.get(key)),
    ]
    yield ", ".join(str(part) for part in known if part)
    yield from report.notes if any(row.served for row in report.rows) else ()
    for row in report.rows:
        for reason, count in row.served.errors.items() if row.served else ():
            yield f"{words(row)}: {count} x {reason}"
    if report.crossover is not None:
        yield str(report.crossover)
    before, after = ((state[when] or {}).get("load_average") for when in ("before", "after"))
    if before and after:
        yield f"load average before {before[0]}, after {after[0]}"
    for role, engine in (report.engine.get("engines") or {}).items():
        if found := engine.get("divergence"):
            divergence = Divergence.read(EngineFields(found, "the report"))
            yield f"{role}: {divergence.text(engine['weights'])}"
    yield f"peak memory {report.peak_memory_bytes / 1e6:.0f} MB"
    speeds = (row.over_plain for row in report.rows if row.mode != "verify")
    if any(speed is not None and speed.interval is None for speed in speeds):
        more = "" if any(row.served for row in report.rows) else " or --num-prompts"
        yield f"an exact 95 % interval needs 6 runs: raise --repeats{more}"
    differing = sum(
        row.answers - row.answers_equal_to_plain for row in report.rows if row.mode == "speculative"
    )
    if differing and report.settings.get("acceptance") == "exact":
        yield (
            f"{counted(differing, 'answer')} with drafts differ from the plain ones: see edgespec"
            " infer --check-lossless"
        )


NAMED = (("power mode", "power_mode"), ("governor", "governors"))


def predictions(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence for each row that has a prediction."""
    for row in rows:
        predicted, over = row.predicted, row.over_plain
        if predicted is None or over is None:
            continue
        apart = over.median / predicted - 1
        more = "more" if apart > 0 else "less"
        told = "as predicted" if abs(apart) <= CLOSE else f"{100 * abs(apart):.0f} % {more}"
        yield f"{words(row)}: {over.median:.2f} x plain, predicted {predicted:.2f} ({told})."


# ---- what steps cost


def say_costs(engine: Engine) -> None:
    """Print what the kept costs mean. Raises LimitError where there are none."""
    if engine.costs is None:
        why = engine.why_no_costs or "nothing drafts"
        raise LimitError(f"--explain: {why}", "Measure it: --measure-costs.")
    for line in sentences(engine, None):
        say(line)


def sentences(engine: Engine, report: Report | None) -> Iterator[str]:
    """What the kept costs mean, and of a report how its figures compare with them."""
    from edgespec.runtime.measuring.cost_description import explained

    if engine.costs is None:
        yield f"no prediction: {engine.why_no_costs or 'nothing drafts'}"
        return
    yield from explained(engine.costs.profile)
    if report is not None:
        yield from predictions(report.rows)


# ---- two reports


def show_changes(rows: Sequence[Change], allowed: Sequence[Unlike]) -> None:
    """Print the rows that both reports have, and a line on the control."""
    for one in allowed:
        say(f"allowed: {one.words}")
    out = tables.columns("", "figure", "after/before", "95 % interval", "result", left=5)
    for row in rows:
        bounds = row.interval
        name = f"{words(row.row)} (control)" if row.is_control else words(row.row)
        interval = "-" if bounds is None else f"[{bounds.low:.3f}, {bounds.high:.3f}]"
        out.add_row(harmless(name), row.figure, f"{row.ratio:.3f}", interval, row.result)
    print_table(out)
    moved = [row for row in rows if row.is_control and row.result not in (NOISE, UNKNOWN)]
    if moved and not any(one.name == "engines" for one in allowed):
        say(
            "plain decoding itself is "
            + " and ".join(sorted({row.result for row in moved}))
            + ": the machine was not the same. Read speed_over_plain, which was measured side by"
            " side."
        )
    if any(row.result == UNKNOWN for row in rows):
        say("too few samples: 4 against 4 are needed; raise --repeats")
