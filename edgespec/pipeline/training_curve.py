"""The picture of a training: loss and acceptance length by step.

Knows the report beside a trained draft, and matplotlib, which is imported when it is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.benchmark.pictures import COLORS, figure, save

NAME = "training.png"  # beside the draft


def draw_curve(report: Mapping[str, Any], path: Path) -> None:
    """Both lines of a report, as PNG. Raises MissingDependency, OutputError."""
    steps = [point["step"] for point in report["curve"]]
    with figure(2) as (whole, axes):
        for axis, color, key in zip(axes, COLORS, ("loss", "acceptance_length"), strict=False):
            axis.plot(steps, [point[key] for point in report["curve"]], "o-", color=color)
            axis.set_xlabel("step")
            axis.set_title(key.replace("_", " "))
        axes[1].axvline(report["best_step"], color="#999999", linestyle="--", label="kept")
        axes[1].legend()
        save(whole, path, "png")
