"""Pictures of a report: the cost curve, acceptance by position, speed against the tree's size and
against acceptance.

Knows reports and matplotlib, which is imported when a picture is drawn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from edgespec.artifacts import atomic
from edgespec.benchmark.cases import plan_kind, plan_sizes
from edgespec.benchmark.compare import sizes, words
from edgespec.benchmark.modes import SERVED, SERVED_PLAIN, SPECULATIVE
from edgespec.benchmark.report import Report
from edgespec.benchmark.rows import OVER_PLAIN, Row
from edgespec.benchmark.serving.figures import ITL, THROUGHPUT, TTFT
from edgespec.benchmark.statistics import Figure
from edgespec.errors import MissingDependency, OptionError, RequestError
from edgespec.methods.names import ADAPTIVE
from edgespec.runtime.trees.tree import DraftPlan

Panel = Callable[[Any, Report], None]  # draws on an axis
FORMATS = ("png", "svg")
DPI, WIDTH, HEIGHT = 150, 6.4, 4.2  # inches
COLORS = ("#1f6f8b", "#c8553d", "#588157", "#6d597a", "#b08900", "#4a4e69", "#8f2d56", "#2f3e46")
FEW_LINES = 3  # that leave room for the legend
STYLE: Any = {  # of matplotlib, whose types need not be installed
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "edgespec",
}


# ---- files


def format_of(path: Path) -> str:
    """The format of a picture by the ending of its name. Raises OptionError."""
    ending = path.suffix.removeprefix(".").lower()
    if ending not in FORMATS:
        raise OptionError(
            f"{path} ends in neither .png nor .svg", "Name the picture x.png or x.svg."
        )
    return ending


def check_installed() -> None:
    """Raises MissingDependency where no pictures can be drawn; before any work."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        message = "pictures are drawn by matplotlib, which is not installed"
        raise MissingDependency(message, "Run: pip install 'edgespec[pictures]'.") from error


def draw_file(report: Report, path: Path) -> None:
    """One picture with all panels for which there are rows. Raises OptionError, RequestError where
    there are none, OutputError."""
    kind = format_of(path)
    draw_panels(report, panels_of(report).values(), {path: kind})


def draw_directory(report: Report, directory: Path) -> list[Path]:
    """Each panel as a PNG and an SVG file in a directory, which is made. Returns the files. Raises
    RequestError where there are no rows for any, OutputError."""
    panels = panels_of(report)
    with atomic.writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    files = {name: {directory / f"{name}.{kind}": kind for kind in FORMATS} for name in panels}
    for name, draw in panels.items():
        draw_panels(report, [draw], files[name])
    return [path for own in files.values() for path in own]


def draw_panels(report: Report, panels: Collection[Panel], files: Mapping[Path, str]) -> None:
    """One picture of these panels, into each of the files by its format."""
    with figure(len(panels)) as (whole, axes):
        for axis, draw in zip(axes, panels, strict=True):
            draw(axis, report)
        whole.suptitle(caption(report), fontsize=8.5, color="#555555", x=0.01, ha="left")
        for path, kind in files.items():
            save(whole, path, kind)


@contextmanager
def figure(count: int) -> Iterator[tuple[Any, Sequence[Any]]]:
    """A figure with so many axes side by side, two in a line; freed again afterwards."""
    check_installed()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(count, 2)
    lines = -(-count // columns)
    with matplotlib.rc_context(STYLE):
        whole = Figure(figsize=(WIDTH * columns, HEIGHT * lines + 0.3), layout="constrained")
        FigureCanvasAgg(whole)
        grid = whole.subplots(lines, columns, squeeze=False).ravel()
        for spare in grid[count:]:
            spare.set_visible(False)
        yield whole, [*grid[:count]]


def save(whole: Any, path: Path, kind: str) -> None:
    """Write a picture whole or not at all; a link's target is replaced. Raises OutputError."""
    import io

    drawn = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    whole.savefig(drawn, format=kind, dpi=DPI, metadata=metadata)
    path = Path(os.path.realpath(path))
    with atomic.writing(path):
        atomic.replace_file(path, drawn.getvalue())


# ---- panels


def panels_of(report: Report) -> dict[str, Panel]:
    """The panels for which the report has rows, by the names of their files. RequestError where
    there is none."""
    known: dict[str, tuple[Callable[[Report], object], Panel]] = {
        "cost_curve": (cost_lines, cost_curve),
        "acceptance": (acceptance_lines, acceptance_by_position),
        "speed_by_size": (size_lines, speed_by_size),
        "speed_by_acceptance": (dial_lines, speed_by_acceptance),
        **{
            f"served_{name}": (partial(served_lines, name=name), partial(served, name=name))
            for name in SERVED_UNITS
        },
    }
    panels = {name: draw for name, (rows, draw) in known.items() if rows(report)}
    if not panels:
        message = "the report has no rows of which pictures are drawn"
        raise RequestError(message, "Run edgespec bench with `mode` verify or speculative.")
    return panels


def caption(report: Report) -> str:
    """What was measured and where."""
    engine, here = report.engine, report.environment
    engines = (engine.get("engines") or {}).items()
    weights = [e.get("weights") for role, e in engines if role != "draft" and isinstance(e, dict)]
    named = *map(engine.get, ("directory", "method", "model", "url")), *weights[:1]
    parts = (*named, here.get("device"), f"{here.get('threads')} threads")
    return ", ".join(str(part) for part in parts if part)


Lines = dict[str, list[tuple[float, Figure]]]


def cost_lines(report: Report) -> dict[str, list[tuple[int, Figure, Figure | None]]]:
    """Passes by context and batch: rows, milliseconds, and their multiple of one row."""
    lines: dict[str, list[tuple[int, Figure, Figure | None]]] = {}
    for row in report.rows:
        if row.rows is not None and (seconds := row.figure("pass_s")) is not None:
            label = f"behind {row.cell.input_tokens} tokens, batch {row.cell.batch_size}"
            figure_ms = Figure(tuple(1000 * sample for sample in seconds.samples))
            lines.setdefault(label, []).append((row.rows, figure_ms, row.over_plain))
    return {label: sorted(points, key=lambda point: point[0]) for label, points in lines.items()}


def cost_curve(axis: Any, report: Report) -> None:
    """Milliseconds of a pass over N rows; at each point its multiple of one row."""
    lines = cost_lines(report)
    for color, (label, points) in zip(COLORS, lines.items(), strict=False):
        line(axis, [(rows, ms) for rows, ms, _ in points], color, label)
        for rows, ms, over in points:
            if over is not None:
                axis.annotate(
                    f"{over.median:.2f}",
                    (rows, ms.median),
                    textcoords="offset points",
                    xytext=(0, 6),
                    ha="center",
                    fontsize=7.5,
                    color=color,
                )
    ticks = sorted({rows for points in lines.values() for rows, *_ in points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(count) for count in ticks])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("rows of a pass, the root included")
    axis.set_ylabel("ms")
    axis.set_title("A base pass over N rows (numbers: over one row)")
    finish(axis, len(lines))


def drafting(report: Report) -> Iterator[tuple[Row, DraftPlan, Figure]]:
    """The rows of speculative decoding with a speed over plain, with their plan and that speed."""
    for row in report.rows:
        plan, over = row.variant.plan, row.over_plain
        if row.mode == SPECULATIVE and plan is not None and over is not None:
            yield row, plan, over


def acceptance_lines(report: Report) -> dict[str, Sequence[float]]:
    """Acceptance by position of each row that drafted."""
    return {
        words(row): row.speculation.per_position_acceptance
        for row, _, _ in drafting(report)
        if row.speculation is not None and row.speculation.per_position_acceptance
    }


def acceptance_by_position(axis: Any, report: Report) -> None:
    """The share of steps that accepted the draft at each position."""
    lines = acceptance_lines(report)
    for color, (label, rates) in zip(COLORS, lines.items(), strict=False):
        positions = range(1, len(rates) + 1)
        axis.plot(positions, rates, marker="o", markersize=4, color=color, label=label)
    axis.set_ylim(0, 1.03)
    axis.set_xticks(range(1, max(map(len, lines.values())) + 1))
    axis.set_xlabel("position in the draft")
    axis.set_ylabel("share of steps that accepted it")
    axis.set_title("Acceptance by position")
    finish(axis, len(lines))


def size_lines(report: Report) -> Lines:
    """Speed over plain by the nodes that are verified, where there are several sizes."""
    lines: Lines = {}
    for row, plan, over in drafting(report):
        dial = "" if row.variant.dial is None else f" at {row.variant.dial}"
        label = f"{plan_kind(plan)}s{policy(plan)}{dial}, {sizes(row)}"
        lines.setdefault(label, []).append((plan.verify_size, over))
    return several(lines)


def speed_by_size(axis: Any, report: Report) -> None:
    """How fast trees of each size decode."""
    lines = size_lines(report)
    speeds(axis, lines)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("nodes that are verified, the root included")
    axis.set_title("Speed over plain decoding, by the size of the draft")
    finish(axis, len(lines))


def dial_lines(report: Report) -> Lines:
    """Speed over plain by a dialled acceptance, where there are several."""
    lines: Lines = {}
    for row, plan, over in drafting(report):
        dial = row.variant.dial
        if dial is not None and len(dial.by_position) == 1:
            label = f"{plan_sizes(plan)}{policy(plan)}, {sizes(row)}"
            lines.setdefault(label, []).append((dial.by_position[0], over))
    return several(lines)


def speed_by_acceptance(axis: Any, report: Report) -> None:
    """How fast each plan decodes as its drafts are right more often."""
    lines = dial_lines(report)
    speeds(axis, lines)
    axis.set_xlabel("acceptance of a draft whose parents are accepted (dialled)")
    axis.set_title("Speed over plain decoding, by acceptance")
    finish(axis, len(lines))


def served_lines(report: Report, name: str) -> Lines:
    """A figure by the number of clients, plain and with drafts."""
    lines: Lines = {}
    for row in report.rows:
        if row.mode in SERVED and (value := row.figure(name)) is not None:
            label = "plain" if row.mode == SERVED_PLAIN else "with drafts"
            lines.setdefault(label, []).append((row.cell.batch_size, value))
    return lines


def served(axis: Any, report: Report, name: str) -> None:
    """A figure of a server by its clients, of whom each tick has twice as many."""
    lines = served_lines(report, name)
    (speeds if name == OVER_PLAIN else curves)(axis, lines)
    ticks = sorted({x for points in lines.values() for x, _ in points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{x:.0f}" for x in ticks])
    axis.set_xlabel("clients at a time")
    axis.set_title(f"{name.replace('_', ' ').capitalize()} {SERVED_UNITS[name]}, by clients")
    finish(axis, len(lines))


SERVED_UNITS = {THROUGHPUT: "(tokens/s)", OVER_PLAIN: "decoding", TTFT: "(ms)", ITL: "(ms)"}


def curves(axis: Any, lines: Lines) -> None:
    """A line for each, from 0."""
    for color, (label, points) in zip(COLORS, lines.items(), strict=False):
        line(axis, points, color, label)
    axis.set_ylim(bottom=0)


def speeds(axis: Any, lines: Lines) -> None:
    """Lines of speeds over plain, with plain decoding as a line at 1."""
    axis.axhline(1, color="#999999", linewidth=1, linestyle="--")
    curves(axis, lines)
    axis.set_ylabel("times plain decoding")


def several(lines: Lines) -> Lines:
    """The lines of at least two points, from left to right."""
    return {
        label: sorted(points, key=lambda point: point[0])
        for label, points in lines.items()
        if len({x for x, _ in points}) > 1
    }


def line(axis: Any, points: Sequence[tuple[float, Figure]], color: str, label: str) -> None:
    """Medians with their intervals as far as these are known, else with all samples."""
    places = zip(*((x, over.median) for x, over in points), strict=True)
    axis.plot(*places, marker="o", markersize=4, color=color, label=label)
    for x, over in points:
        ends = over.interval
        low, high = (ends.low, ends.high) if ends else (min(over.samples), max(over.samples))
        axis.vlines(x, low, high, color=color, linewidth=1.2, alpha=0.6)


def policy(plan: DraftPlan) -> str:
    """What a label says of the policy."""
    return f", {ADAPTIVE}" if plan.adaptive else ""


def finish(axis: Any, lines: int) -> None:
    """The legend, beside the panel where it is long; lines for which there is no color are not
    drawn, and that is said."""
    if lines > len(COLORS):
        axis.set_title(f"{axis.get_title(loc='left')} ({len(COLORS)} of {lines} lines)")
    if lines > FEW_LINES:
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
    else:
        axis.legend(loc="best")
