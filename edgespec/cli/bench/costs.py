"""`bench --measure-costs` and `--explain`: what steps cost here, measured again and in sentences.

Knows an engine's kept costs. What they mean stands in `runtime.cost_words`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli.terminal import say
from edgespec.errors import LimitError

if TYPE_CHECKING:
    from edgespec.runtime.engine import Engine


def measure_again(engine_dir: Path, *, err: bool = False) -> None:
    """Measure what steps of these engines cost here, keep it, and say it in a line, with `err` on
    stderr. Raises what opening and measuring raise."""
    from time import monotonic

    from edgespec.backends.base import Progress
    from edgespec.cli.progress import Bars
    from edgespec.runtime.measuring.cost_description import built_line
    from edgespec.runtime.measuring.cost_measure import measure_costs

    began = monotonic()
    with Bars() as bars:
        progress = Progress(start=lambda n: bars.start("costs", n), advance=bars.advance)
        found = measure_costs(engine_dir, progress=progress)
    say(built_line(found, monotonic() - began), err=err)


def say_costs(engine: Engine) -> None:
    """Print what the kept costs mean. Raises LimitError where there are none."""
    if engine.costs is None:
        why = engine.why_no_costs or "nothing drafts"
        raise LimitError(f"--explain: {why}", "Measure it: --measure-costs.")
    for line in sentences(engine, None):
        say(line)


def sentences(engine: Engine, report: dict[str, Any] | None) -> Iterator[str]:
    """What the kept costs mean, and of a report how its figures compare with them."""
    from edgespec.benchmark.explanation import of_rows
    from edgespec.runtime.measuring.cost_description import explained

    if engine.costs is None:
        yield f"no prediction: {engine.why_no_costs or 'nothing drafts'}"
        return
    yield from explained(engine.costs.profile)
    if report is not None:
        yield from of_rows(report["rows"])
