"""What `bench` shows: a table of each mode, and the comparison of two runs.

Knows how values look. What they mean stands in docs/benchmark.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from edgespec.cli.terminal import harmless, say
from edgespec.errors import counted

if TYPE_CHECKING:
    from edgespec.benchmark.compare import Change, Unlike

MAX_WIDTH = 400  # characters
Row = Mapping[str, Any]
Cell = Callable[[Row], str | None]


# ---- values


def number(row: Row, name: str, form: str, factor: float = 1.0) -> str | None:
    """The median of a figure; None where it was not measured."""
    found = row["figures"].get(name)
    return None if found is None else form.format(factor * found["median"])


def with_interval(found: Mapping[str, Any] | None, form: str = "{:.2f}") -> str | None:
    """A median, and its interval where it has one."""
    if found is None:
        return None
    middle = form.format(found["median"])
    if found["low"] is None:
        return middle
    return f"{middle} [{form.format(found['low'])}, {form.format(found['high'])}]"


def of_speculation(row: Row, name: str, form: str = "{:.2f}") -> str | None:
    """A figure of what was drafted and accepted."""
    value = None if row["speculation"] is None else row["speculation"].get(name)
    return None if value is None else form.format(value)


def positions(row: Row) -> str | None:
    """Acceptance by position."""
    rates = (row["speculation"] or {}).get("per_position_acceptance")
    return " ".join(f"{rate:.2f}" for rate in rates[:MAX_POSITIONS]) if rates else None


MAX_POSITIONS = 6


def size(row: Row) -> str:
    """How long prompts and answers are, and how many at a time."""
    from edgespec.benchmark.compare import sizes

    return " ".join(sizes(row))


def way(row: Row) -> str:
    """What was done."""
    from edgespec.benchmark.compare import words

    return words(row).removesuffix(f" {size(row)}")


def equal(row: Row) -> str | None:
    """How many answers are the plain ones."""
    if row["plan"] is None or not row["answers"]:
        return None
    return f"{row['answers_equal_to_plain']}/{row['answers']}"


WAY: tuple[tuple[str, Cell], ...] = (("", way), ("tokens", size))
PREFILL = (
    *WAY,
    ("tokens/s", lambda r: number(r, "prefill_tokens_per_s", "{:.1f}")),
    ("time to first token", lambda r: number(r, "time_to_first_token_s", "{:.3f} s")),
    ("over plain", lambda r: with_interval(r["speed_over_plain"])),
)
VERIFY = (
    *WAY,
    ("ms", lambda r: number(r, "pass_s", "{:.2f}", 1000)),
    ("over one row", lambda r: with_interval(r["cost_over_one_row"])),
)
DECODE = (
    *WAY,
    ("tokens/s", lambda r: number(r, "tokens_per_s", "{:.1f}")),
    ("over plain", lambda r: with_interval(r["speed_over_plain"])),
    (
        "predicted",
        lambda r: (
            None
            if r["predicted_speed_over_plain"] is None
            else f"{r['predicted_speed_over_plain']:.2f}"
        ),
    ),
    ("tokens/step", lambda r: of_speculation(r, "acceptance_length")),
    ("by position", positions),
    ("first token", lambda r: number(r, "time_to_first_token_s", "{:.3f} s")),
    ("between tokens", lambda r: number(r, "inter_token_latency_s", "{:.2f} ms", 1000)),
    ("as plain", equal),
)
TABLES: tuple[tuple[str, tuple[str, ...], tuple[tuple[str, Cell], ...]], ...] = (
    ("reading prompts", ("prefill",), PREFILL),
    ("base passes", ("verify",), VERIFY),
    ("decoding", ("decode", "speculative"), DECODE),
)


# ---- a report


def show(report: Mapping[str, Any], *, err: bool = False) -> None:
    """Print the tables of a report, and where it was measured; with `err` on stderr."""
    for title, modes, columns in TABLES:
        rows = [row for row in report["rows"] if row["mode"] in modes]
        if rows:
            console = console_of(err=err)
            print_table(console, fitting(console, title, rows, columns))
    for line in below(report):
        say(line, err=err)
    if not report["complete"]:
        say("not complete: the run ended before all was measured", err=True)


def table(title: str, rows: Sequence[Row], columns: Sequence[tuple[str, Cell]]) -> Table:
    """A row for each; columns in which nothing was measured are left out."""
    cells = [[cell(row) for _, cell in columns] for row in rows]
    kept = [i for i in range(len(columns)) if any(line[i] for line in cells)]
    out = Table(show_header=True, header_style="bold", box=None, pad_edge=False, title=title)
    out.title_justify, out.title_style = "left", "bold"
    for i in kept:
        out.add_column(columns[i][0], justify="left" if i < len(WAY) else "right", no_wrap=True)
    for line in cells:
        out.add_row(*(harmless(line[i] or "-") for i in kept))
    return out


def fitting(
    console: Console, title: str, rows: Sequence[Row], columns: Sequence[tuple[str, Cell]]
) -> Table:
    """The table; on a terminal that is too narrow for it without the columns that say least."""
    dropped = iter(DROPPED_FIRST if console.is_terminal else ())
    out = table(title, rows, columns)
    while width_of(console, out) > console.width and (name := next(dropped, None)) is not None:
        columns = [column for column in columns if column[0] != name]
        out = table(title, rows, columns)
    return out


DROPPED_FIRST = ("by position", "first token", "between tokens", "as plain", "predicted")


def width_of(console: Console, out: Table) -> int:
    """Characters that a table takes."""
    return console.measure(out, options=console.options.update(max_width=MAX_WIDTH)).maximum


def console_of(*, err: bool = False) -> Console:
    """Stdout or stderr."""
    return Console(file=sys.stderr if err else sys.stdout, markup=False, highlight=False)


def print_table(console: Console, out: Table) -> None:
    """As wide as it needs."""
    console.width = max(console.width, width_of(console, out))
    console.print(out)
    console.print()


def below(report: Mapping[str, Any]) -> Iterator[str]:
    """Where it was measured, and what is to be known of the figures."""
    here, state = report["environment"], report["state"]
    known = [
        here.get("device"),
        f"{here.get('threads')} of {here.get('cores')} cores",
        *(f"{label} {here[key]}" for label, key in NAMED if here.get(key)),
    ]
    yield ", ".join(str(part) for part in known if part)
    before, after = ((state[when] or {}).get("load_average") for when in ("before", "after"))
    if before and after:
        yield f"load average before {before[0]}, after {after[0]}"
    yield f"peak memory {report['peak_memory_bytes'] / 1e6:.0f} MB"
    few = [row for row in report["rows"] if (over := row["speed_over_plain"]) and not over["low"]]
    if few:
        yield "an exact 95 % interval needs 6 runs: raise --repeats or --num-prompts"
    differing = sum(
        row["answers"] - row["answers_equal_to_plain"]
        for row in report["rows"]
        if row["mode"] == "speculative"
    )
    if differing and report["settings"].get("acceptance") == "exact":
        yield (
            f"{counted(differing, 'answer')} with drafts differ from the plain ones: see edgespec"
            " infer --check-lossless"
        )


NAMED = (("power mode", "power_mode"), ("governor", "governors"))


# ---- two reports


def show_changes(rows: Sequence[Change], allowed: Sequence[Unlike]) -> None:
    """Print the rows that both reports have, and a line on the control."""
    from edgespec.benchmark.compare import words
    from edgespec.benchmark.statistics import NOISE, UNKNOWN

    for one in allowed:
        say(f"allowed: {one.words}")
    out = Table(show_header=True, header_style="bold", box=None, pad_edge=False)
    for heading in ("", "figure", "after/before", "95 % interval", "result"):
        out.add_column(heading, no_wrap=True)
    for row in rows:
        found = row.interval
        name = f"{words(row.row)} (control)" if row.is_control else words(row.row)
        interval = "-" if found is None else f"[{found.low:.3f}, {found.high:.3f}]"
        out.add_row(harmless(name), row.figure, f"{row.ratio:.3f}", interval, row.result)
    print_table(console_of(), out)
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
