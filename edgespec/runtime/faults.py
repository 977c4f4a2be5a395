"""What ends one request: any error, as the one that its client gets.

Knows errors. Knows nothing of requests.
"""

from __future__ import annotations

from copy import copy

from edgespec.errors import EdgeSpecError, EnvironmentProblem, InternalError

FAULTS = (EdgeSpecError, MemoryError)  # what ends a request, or a batch, and not the run


def as_error(error: Exception) -> EdgeSpecError:
    """The error that a request is answered with; a bug keeps what was raised as its cause."""
    if isinstance(error, EdgeSpecError):
        return error
    if isinstance(error, MemoryError):
        return EnvironmentProblem(
            "not enough memory for this request", "Close other programs, or lower the batch size."
        )
    bug = InternalError(f"{type(error).__name__}: {error}")
    bug.__cause__ = error
    return bug


def shared(error: Exception) -> EdgeSpecError:
    """An error of its own for one of several requests that one fault ends: what is raised in two
    threads must not be one object."""
    own = copy(as_error(error))
    own.__cause__ = error
    return own
