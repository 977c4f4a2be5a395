"""The picture of a search: predicted and measured speed against the nodes that a step verifies.

Knows the JSON of a report and matplotlib, which is imported when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.benchmark.pictures import COLORS, figure, format_of, save


def draw_frontier(report: Mapping[str, Any], path: Path) -> None:
    """One picture, PNG or SVG by its name. Raises OptionError, MissingDependency, OutputError."""
    kind = format_of(path)
    with figure(1) as (whole, (axis,)):
        draw(axis, report)
        save(whole, path, kind)


def draw(axis: Any, report: Mapping[str, Any]) -> None:
    """All candidates as dots, the best of as many nodes as a line, and the measured ones with
    their intervals."""
    ranked = report["ranked"]
    axis.axhline(1.0, color="#777777", linewidth=1, linestyle="--", label="plain")
    for color, adaptive in zip(COLORS, (False, True), strict=False):
        rows = [row for row in ranked if row["plan"]["adaptive"] is adaptive]
        if rows:
            places = [row["nodes"] for row in rows], [row["predicted"] for row in rows]
            label = "predicted, adaptive" if adaptive else "predicted, fixed"
            axis.plot(*places, "o", color=color, markersize=3.5, alpha=0.6, label=label)
    line = frontier([(row["nodes"], row["predicted"]) for row in ranked])
    axis.plot(*zip(*line, strict=True), color="#999999", linewidth=1) if line else None
    for row in report["measured"]:
        over = row["over_plain"]
        if over is None:
            continue
        low, high = (over["median"] if over[k] is None else over[k] for k in ("low", "high"))
        error = [[over["median"] - low], [high - over["median"]]]
        axis.errorbar(
            [row["nodes"]], [over["median"]], yerr=error, fmt="s", color=COLORS[3], capsize=3
        )
        place = (row["nodes"], over["median"])
        axis.annotate(row["words"], place, xytext=(5, 4), textcoords="offset points", fontsize=7)
    axis.plot([], [], "s", color=COLORS[3], label="measured, with its interval")
    axis.set_xlabel("nodes that a step verifies, the root included")
    axis.set_ylabel("speed over plain decoding")
    axis.set_title(report["line"][:90], fontsize=9)
    axis.legend()


def frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no one with fewer nodes is above, by nodes."""
    best: list[tuple[float, float]] = []
    for nodes, speed in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or speed > best[-1][1]:
            best.append((nodes, speed))
    return best
