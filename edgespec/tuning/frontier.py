"""The picture of a search: predicted and measured speed against the nodes that a step verifies.

Knows a report and matplotlib, which is imported when a picture is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.benchmark.pictures import COLORS, figure, format_of, save
from edgespec.benchmark.statistics import Interval
from edgespec.tuning.report import TuneReport


def draw_frontier(report: TuneReport, path: Path) -> None:
    """One picture, PNG or SVG by its name. Raises OptionError, MissingDependency, OutputError."""
    kind = format_of(path)
    with figure(1) as (whole, (axis,)):
        draw(axis, report)
        save(whole, path, kind)


def draw(axis: Any, report: TuneReport) -> None:
    """All candidates as dots, the best of as many nodes as a line, and the measured ones with
    their intervals."""
    ranked = report.ranked
    axis.axhline(1.0, color="#777777", linewidth=1, linestyle="--", label="plain")
    for color, adaptive in zip(COLORS, (False, True), strict=False):
        rows = [row for row in ranked if row.candidate.plan.adaptive is adaptive]
        if rows:
            places = [row.nodes for row in rows], [row.over_plain for row in rows]
            label = "predicted, adaptive" if adaptive else "predicted, fixed"
            axis.plot(*places, "o", color=color, markersize=3.5, alpha=0.6, label=label)
    line = frontier([(row.nodes, row.over_plain) for row in ranked])
    axis.plot(*zip(*line, strict=True), color="#999999", linewidth=1) if line else None
    for measured in report.measured:
        row, over = measured.row, measured.over_plain
        if over is None:
            continue
        ends = over.interval or Interval(over.median, over.median, 0.0)
        error = [[over.median - ends.low], [ends.high - over.median]]
        place = (row.nodes, over.median)
        axis.errorbar(*place, yerr=error, fmt="s", color=COLORS[3], capsize=3)
        words = row.candidate.words
        axis.annotate(words, place, xytext=(5, 4), textcoords="offset points", fontsize=7)
    axis.plot([], [], "s", color=COLORS[3], label="measured, with its interval")
    axis.set_xlabel("nodes that a step verifies, the root included")
    axis.set_ylabel("speed over plain decoding")
    axis.set_title(report.line[:90], fontsize=9)
    axis.legend()


def frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no one with fewer nodes is above, by nodes."""
    best: list[tuple[float, float]] = []
    for nodes, speed in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or speed > best[-1][1]:
            best.append((nodes, speed))
    return best
