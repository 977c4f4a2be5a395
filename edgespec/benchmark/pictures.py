"""Pictures of a report: the cost curve, acceptance by position, speed against the tree's size and
against acceptance.

Knows reports and matplotlib, which is imported when a picture is drawn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgespec.artifacts import atomic
from edgespec.benchmark.compare import words
from edgespec.benchmark.modes import SPECULATIVE, VERIFY
from edgespec.errors import MissingDependency, OptionError, RequestError

Report = Mapping[str, Any]
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
        what = "pictures are drawn by matplotlib, which is not installed"
        raise MissingDependency(what, "Run: pip install 'edgespec[pictures]'.") from error


def draw_file(report: Report, path: Path) -> None:
    """One picture with all panels for which there are rows. Raises OptionError, RequestError where
    there are none, OutputError."""
    kind = format_of(path)
    panels = panels_of(report)
    with figure(len(panels)) as (whole, axes):
        for axis, draw in zip(axes, panels.values(), strict=True):
            draw(axis, report)
        whole.suptitle(caption(report), fontsize=8.5, color="#555555", x=0.01, ha="left")
        save(whole, path, kind)


def draw_directory(report: Report, directory: Path) -> list[Path]:
    """Each panel as a PNG and an SVG file in a directory, which is made. Returns the files. Raises
    RequestError where there are no rows for any, OutputError."""
    panels = panels_of(report)
    with atomic.writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    files = []
    for name, draw in panels.items():
        with figure(1) as (whole, (axis,)):
            draw(axis, report)
            whole.suptitle(caption(report), fontsize=8.5, color="#555555", x=0.01, ha="left")
            for kind in FORMATS:
                files.append(directory / f"{name}.{kind}")
                save(whole, files[-1], kind)
    return files


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


def panels_of(report: Report) -> dict[str, Callable[[Any, Report], None]]:
    """The panels for which the report has rows, by the names of their files. RequestError where
    there is none."""
    known: dict[str, tuple[Callable[[Report], object], Callable[[Any, Report], None]]] = {
        "cost_curve": (cost_lines, cost_curve),
        "acceptance": (acceptance_lines, acceptance_by_position),
        "speed_by_size": (size_lines, speed_by_size),
        "speed_by_acceptance": (dial_lines, speed_by_acceptance),
    }
    found = {name: draw for name, (rows, draw) in known.items() if rows(report)}
    if not found:
        what = "the report has no rows of which pictures are drawn"
        raise RequestError(what, "Run edgespec bench with `mode` verify or speculative.")
    return found


def caption(report: Report) -> str:
    """What was measured and where."""
    engine, environment = report["engine"], report["environment"]
    engines = engine.get("engines") or {}
    weights = next(
        (
            e.get("weights")
            for role, e in engines.items()
            if role != "draft" and isinstance(e, dict)
        ),
        None,
    )
    parts = [
        engine.get("directory"),
        engine.get("method"),
        weights,
        environment.get("device"),
        f"{environment.get('threads')} threads",
    ]
    return ", ".join(str(part) for part in parts if part)


Lines = dict[str, list[tuple[float, Mapping[str, Any]]]]


def cost_lines(report: Report) -> dict[str, list[Mapping[str, Any]]]:
    """Passes by context and batch, from few rows to many."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in report["rows"]:
        if row["mode"] == VERIFY and row["figures"].get("pass_s") is not None:
            label = f"behind {row['input_tokens']} tokens, batch {row['batch_size']}"
            lines.setdefault(label, []).append(row)
    return {label: sorted(rows, key=lambda row: row["rows"]) for label, rows in lines.items()}


def cost_curve(axis: Any, report: Report) -> None:
    """Milliseconds of a pass over N rows; at each point its multiple of one row."""
    lines = cost_lines(report)
    for color, (label, rows) in zip(COLORS, lines.items(), strict=False):
        figures = [scaled(row["figures"]["pass_s"], 1000) for row in rows]
        line(axis, [row["rows"] for row in rows], figures, color, label)
        for row, found in zip(rows, figures, strict=True):
            if (over := row.get("cost_over_one_row")) is not None:
                axis.annotate(
                    f"{over['median']:.2f}",
                    (row["rows"], found["median"]),
                    textcoords="offset points",
                    xytext=(0, 6),
                    ha="center",
                    fontsize=7.5,
                    color=color,
                )
    ticks = sorted({row["rows"] for rows in lines.values() for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(count) for count in ticks])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("rows of a pass, the root included")
    axis.set_ylabel("ms")
    axis.set_title("A base pass over N rows (numbers: over one row)")
    finish(axis, len(lines))


def drafting(report: Report) -> list[Mapping[str, Any]]:
    """The rows of speculative decoding with a speed over plain."""
    return [row for row in report["rows"] if row["mode"] == SPECULATIVE and row["speed_over_plain"]]


def acceptance_lines(report: Report) -> dict[str, list[float]]:
    """Acceptance by position of each row that drafted."""
    return {
        words(row): row["speculation"]["per_position_acceptance"]
        for row in drafting(report)
        if row.get("speculation") and row["speculation"].get("per_position_acceptance")
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
    for row in drafting(report):
        plan = row["plan"]
        label = f"{plan['kind']}s{policy(row)}{dialled(row)}, {place(row)}"
        lines.setdefault(label, []).append((plan["verify_size"], row["speed_over_plain"]))
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
    for row in drafting(report):
        dial, plan = row["synthetic_acceptance"], row["plan"]
        if dial is not None and len(dial) == 1:
            sizes = f"{plan['top_k']}/{plan['steps']}/{plan['verify_size']}"
            label = f"{plan['kind']} {sizes}{policy(row)}, {place(row)}"
            lines.setdefault(label, []).append((dial[0], row["speed_over_plain"]))
    return several(lines)


def speed_by_acceptance(axis: Any, report: Report) -> None:
    """How fast each plan decodes as its drafts are right more often."""
    lines = dial_lines(report)
    speeds(axis, lines)
    axis.set_xlabel("acceptance of a draft whose parents are accepted (dialled)")
    axis.set_title("Speed over plain decoding, by acceptance")
    finish(axis, len(lines))


def speeds(axis: Any, lines: Lines) -> None:
    """Lines of speeds over plain, with plain decoding as a line at 1."""
    axis.axhline(1, color="#999999", linewidth=1, linestyle="--")
    for color, (label, points) in zip(COLORS, lines.items(), strict=False):
        line(axis, [x for x, _ in points], [found for _, found in points], color, label)
    axis.set_ylabel("times plain decoding")
    axis.set_ylim(bottom=0)


def several(lines: Lines) -> Lines:
    """The lines of at least two points, from left to right."""
    return {
        label: sorted(points, key=lambda point: point[0])
        for label, points in lines.items()
        if len({x for x, _ in points}) > 1
    }


def line(
    axis: Any, xs: Sequence[float], figures: Sequence[Mapping[str, Any]], color: str, label: str
) -> None:
    """Medians with their intervals as far as these are known, else with all samples."""
    axis.plot(
        xs, [f["median"] for f in figures], marker="o", markersize=4, color=color, label=label
    )
    for x, found in zip(xs, figures, strict=True):
        low, high = found.get("low"), found.get("high")
        if low is None or high is None:
            low, high = min(found["samples"]), max(found["samples"])
        axis.vlines(x, low, high, color=color, linewidth=1.2, alpha=0.6)


def scaled(found: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """A figure in another unit."""
    ends = {
        name: None if found.get(name) is None else factor * found[name] for name in ("low", "high")
    }
    samples = [factor * value for value in found["samples"]]
    return {"median": factor * found["median"], "samples": samples, **ends}


def policy(row: Mapping[str, Any]) -> str:
    """What a label says of the policy."""
    return "" if row.get("spec_policy") in (None, "fixed") else f", {row['spec_policy']}"


def dialled(row: Mapping[str, Any]) -> str:
    """What a label says of a dialled acceptance."""
    dial = row.get("synthetic_acceptance")
    return "" if not dial else f" at {':'.join(f'{value:g}' for value in dial)}"


def place(row: Mapping[str, Any]) -> str:
    """What a label says of sizes."""
    given = row.get("input_tokens")
    return f"{'file' if given is None else given}+{row['output_tokens']} b{row['batch_size']}"


def finish(axis: Any, lines: int) -> None:
    """The legend, beside the panel where it is long; lines for which there is no color are not
    drawn, and that is said."""
    if lines > len(COLORS):
        axis.set_title(f"{axis.get_title(loc='left')} ({len(COLORS)} of {lines} lines)")
    if lines > FEW_LINES:
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
    else:
        axis.legend(loc="best")
