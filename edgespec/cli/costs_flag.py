"""--measure-costs: what `build`, `import` and `run` have in common of it.

Knows the flag, and what is said of a measurement.
"""

from __future__ import annotations

from pathlib import Path

import click

from edgespec.cli import environment

MEASURING = click.option(
    "--measure-costs/--no-measure-costs",
    default=True,
    show_default=True,
    envvar=environment.MEASURE_COSTS,
    show_envvar=True,
    help=(
        "Measure what a step of the finished engines costs here, about ten seconds for a model of"
        " 0.6B, and keep it beside them: by that drafts are chosen, and their speed is predicted."
    ),
)


def costs_line(engine_dir: Path, *, measure: bool, unproven: str | None = None) -> str | None:
    """Measure what the engines of a directory cost, and what is said of it; None where nothing is
    to be measured. Profiles of engines that were replaced go. Raises nothing: the engines are built.
    `unproven`: why they cannot run here."""
    from edgespec.backends.base import Progress
    from edgespec.cli.progress import Bars
    from edgespec.runtime.measuring.cost_measure import after_build

    with Bars() as bars:
        progress = Progress(start=lambda n: bars.start("costs", n), advance=bars.advance)
        return after_build(engine_dir, measure=measure, unproven=unproven, progress=progress)
