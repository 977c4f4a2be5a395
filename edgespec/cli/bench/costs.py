"""`bench --explain`: what steps cost here, in sentences.

Knows an engine's kept costs. What they mean stands in `measuring.cost_description`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from edgespec.cli.terminal import say
from edgespec.errors import LimitError

if TYPE_CHECKING:
    from edgespec.benchmark.report import Report
    from edgespec.runtime.engine import Engine


def say_costs(engine: Engine) -> None:
    """Print what the kept costs mean. Raises LimitError where there are none."""
    if engine.costs is None:
        why = engine.why_no_costs or "nothing drafts"
        raise LimitError(f"--explain: {why}", "Measure it: --measure-costs.")
    for line in sentences(engine, None):
        say(line)


def sentences(engine: Engine, report: Report | None) -> Iterator[str]:
    """What the kept costs mean, and of a report how its figures compare with them."""
    from edgespec.cli.bench.tables import predictions
    from edgespec.runtime.measuring.cost_description import explained

    if engine.costs is None:
        yield f"no prediction: {engine.why_no_costs or 'nothing drafts'}"
        return
    yield from explained(engine.costs.profile)
    if report is not None:
        yield from predictions(report.rows)
