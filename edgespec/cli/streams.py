"""Standard streams that were closed when the process began, or that take no more."""

from __future__ import annotations

import os
import sys

from edgespec.errors import EnvironmentProblem


def occupy_closed_streams() -> None:
    """Open /dev/null in place of closed standard streams: the next file that is opened would take
    the number, and what libraries print would go into it."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    if sys.stderr is None:  # nobody reads it, and no answer fails for that
        sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")


def flush_stdout() -> None:
    """Writes what is still to be written. Raises OSError, after which nothing more is tried."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise


def require_stream(name: str) -> None:
    """Raises EnvironmentProblem where stdin or stdout was closed when the process began."""
    if getattr(sys, name) is None:
        remedy = "Run it in a terminal, or connect it to a file or a pipe."
        raise EnvironmentProblem(f"{name} is closed", remedy)
