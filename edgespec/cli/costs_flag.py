"""--measure-costs: what `build`, `import` and `run` have in common of it, and how costs are measured
again.

Knows the flag, and what is said of a measurement.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec.cli import environment
from edgespec.cli.terminal import say
from edgespec.contract import Role

if TYPE_CHECKING:
    from edgespec.runtime.measuring.quantization_loss import LossReport

MEASURING = click.option(
    "--measure-costs/--no-measure-costs",
    default=True,
    envvar=environment.MEASURE_COSTS,
    show_envvar=True,
    help=(
        "Measure what a step of the finished engines costs here, about ten seconds for a model of"
        " 0.6B, and keep it beside them: by that drafts are chosen, and their speed is predicted."
        " `build` and `run` also measure what quantized weights change of the model's answers."
    ),
)


def costs_line(engine_dir: Path, *, measure: bool, unproven: str | None = None) -> str | None:
    """Measure what the engines of a directory cost, and what is said of it; None where nothing is
    to be measured. Profiles of engines that were replaced go. Raises nothing: the engines are built.
    `unproven`: why they cannot run here."""
    from edgespec.backends.base import Listeners
    from edgespec.cli.progress import Bars
    from edgespec.runtime.measuring.cost_measure import after_build

    with Bars() as bars:
        progress = Listeners(start=lambda n: bars.start("costs", n), advance=bars.advance)
        return after_build(engine_dir, measure=measure, unproven=unproven, progress=progress)


def loss_report(
    onnx_dir: Path, engine_dir: Path, role: Role, *, measure: bool, unproven: str | None
) -> LossReport | None:
    """What quantized weights of a new engine cost; None where nothing is to be measured. Raises
    nothing: the engine is built."""
    from edgespec.backends.base import Listeners
    from edgespec.cli.progress import Bars
    from edgespec.runtime.measuring.quantization_loss import after_build

    with Bars() as bars:
        progress = Listeners(
            start=lambda n: bars.start("quantization loss", n),
            advance=bars.advance,
            warn=partial(say, err=True),
        )
        return after_build(
            onnx_dir, engine_dir, role, measure=measure, unproven=unproven, progress=progress
        )


def measure_again(engine_dir: Path, *, err: bool = False, again: bool = False) -> None:
    """Measure what steps of these engines cost here, keep it, and say it in a line, with `err` on
    stderr. `again`: costs are there, and in doubt. Raises what opening and measuring raise."""
    from time import monotonic

    from edgespec.backends.base import Listeners
    from edgespec.cli.progress import Bars
    from edgespec.runtime.measuring.cost_description import built_line
    from edgespec.runtime.measuring.cost_measure import measure_costs

    began = monotonic()
    with Bars() as bars:
        progress = Listeners(start=lambda n: bars.start("costs", n), advance=bars.advance)
        profile = measure_costs(engine_dir, progress=progress, again=again)
    say(built_line(profile, monotonic() - began), err=err)


def measure_busy_again(
    engine_dir: Path, spec_decode: bool | str | None, spec_policy: str | None
) -> None:
    """Measure costs once more that a busy machine measured, where a run with these arguments of
    Engine goes by them, and say so. What fails is said: the engines run with what there is."""
    from edgespec.errors import EdgeSpecError
    from edgespec.methods.names import FIXED
    from edgespec.runtime.measuring.cost_measure import to_measure_again

    wanted = not environment.is_off(os.environ, environment.MEASURE_COSTS)
    if spec_decode is False or spec_policy == FIXED or not wanted:
        return
    try:
        if why := to_measure_again(engine_dir):
            say(f"{why}: measuring once more", err=True)
            measure_again(engine_dir, err=True, again=True)
    except EdgeSpecError as error:
        say(f"costs not measured: {error.what}", err=True)
