"""What a check of an engine found: passed, failed, or not run, and why; or what was measured.

Knows nothing of engines: backends and the runtime both speak so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from edgespec.errors import BuildError, EnvironmentProblem, InternalError, LimitError

Figures = Mapping[str, Any]


class Outcome(StrEnum):
    """How a check ended; one that could not be run has not passed, and what is measured is not
    judged."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's outcome, with the reason in `detail` and its figures as JSON."""

    check: str
    outcome: Outcome
    detail: str
    figures: Figures = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The keys of verify.json."""
        said = {"check": self.check, "outcome": self.outcome.value, "detail": self.detail}
        return said | dict(self.figures)


def passed(check: str, detail: str, **figures: Any) -> Finding:
    """The finding of a check that passed."""
    return Finding(check, Outcome.PASSED, detail, figures)


def failed(check: str, detail: str, **figures: Any) -> Finding:
    """The finding of a check that failed."""
    return Finding(check, Outcome.FAILED, detail, figures)


def measured(check: str, detail: str, **figures: Any) -> Finding:
    """Figures that nothing is asked of."""
    return Finding(check, Outcome.MEASURED, detail, figures)


def not_run(check: str, why: str) -> Finding:
    """The finding of a check that could not be run."""
    return Finding(check, Outcome.NOT_RUN, why)


def judged(check: str, work: Callable[[], Finding]) -> Finding:
    """What a check finds. Sizes beyond the engine's leave it not run; an engine that computes
    something else, or fails in a call, has failed."""
    try:
        return work()
    except LimitError as error:
        return not_run(check, error.what)
    except (BuildError, EnvironmentProblem, InternalError) as error:
        return failed(check, f"{error.what}. {error.remedy}")
