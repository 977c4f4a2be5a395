"""Limits that the shell sets on this process, and standard streams that it closed.

Too little address space (ulimit -v) makes libraries fail while they are loaded, each in its own way
and some by ending the process: what is too little for sure is refused before.
"""

from __future__ import annotations

import io
import os
import resource
import sys
from typing import Any

from edgespec.errors import EnvironmentProblem

MIB = 2**20
LEAST_BYTES = 160 * MIB  # for the interpreter and the libraries that every command loads
SCARCE_BYTES = 4096 * MIB
RAISE = "Raise the limit (ulimit -v), or use a smaller model."
# How the loaders of libraries say that memory is missing
SIGNS = ("failed to map segment", "cannot allocate memory", "memory allocation")


def address_space_bytes() -> int | None:
    """The address space that this process may have; None: as much as there is."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def refuse_too_little_memory() -> None:
    """Raises EnvironmentProblem where the libraries cannot be loaded. Call it before they are.

    Where memory is scarce, numpy's algebra gets one thread: each reserves some for itself.
    """
    limit = address_space_bytes()
    if limit is None or limit >= SCARCE_BYTES:
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if limit < LEAST_BYTES:
        message = (
            f"this process may use {limit / MIB:.0f} MiB of address space, and loading the"
            f" libraries takes {LEAST_BYTES // MIB} MiB at least"
        )
        raise EnvironmentProblem(message, RAISE)


def import_problem(error: ImportError) -> EnvironmentProblem | None:
    """What an ImportError means where memory ran out; None where it is about something else."""
    limit = address_space_bytes()
    if limit is None or isinstance(error, ModuleNotFoundError):
        return None
    if limit >= SCARCE_BYTES and not any(sign in str(error).lower() for sign in SIGNS):
        return None
    reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
    message = (
        f"a library could not be loaded in the {limit / MIB:.0f} MiB of address space that this"
        f" process may use: {reason}"
    )
    return EnvironmentProblem(message, RAISE)


def leave(code: int) -> None:
    """Ends the process with an exit code.

    After a failure in little memory at once: libraries that are unloaded there may crash.
    """
    if code and address_space_bytes() is not None:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(code)
    sys.exit(code)


# ---- standard streams


def occupy_closed_streams() -> None:
    """Open /dev/null in place of closed standard streams: the next file that is opened would take
    the number, and what libraries print would go into it."""
    for number, mode in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, mode)  # the lowest free number
            if null != number:
                os.dup2(null, number)
                os.close(null)
    if sys.stderr is None:  # nobody reads it, and no answer fails for that
        sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")


class Stdout(io.FileIO):
    """Descriptor 1, whose errors name it as others name their file."""

    def write(self, data: Any, /) -> int:
        """Raises OSError with `filename`."""
        try:
            return super().write(data)
        except OSError as error:
            error.filename = "stdout"
            raise


def name_stdout() -> None:
    """Lets an error of stdout say that it is one of stdout."""
    old = sys.stdout
    if isinstance(old, io.TextIOWrapper) and old.fileno() == 1:
        raw = Stdout(1, "wb", closefd=False)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=old.line_buffering,
            write_through=old.write_through,
        )


def flush_stdout() -> None:
    """Writes what is still to be written. Raises OSError, after which nothing more is tried."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
        raise


def require_stream(name: str) -> None:
    """Raises EnvironmentProblem where stdin or stdout was closed when the process began."""
    if getattr(sys, name) is None:
        message = f"{name} is closed"
        raise EnvironmentProblem(
            message, "Run it in a terminal, or connect it to a file or a pipe."
        )
