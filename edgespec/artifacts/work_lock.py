"""The lock of a work directory, which one run at a time may hold. Knows no work."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgespec.artifacts import atomic
from edgespec.errors import OutputError

LOCK = "lock"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Creates the directory if necessary and holds its lock within the block.

    Raises OutputError if another run holds it. A run that ends removes the directory with its lock,
    so that the opened file may no longer be the lock: then it is opened again.
    """
    path = directory / LOCK
    while True:
        with atomic.writing(directory):
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir(exist_ok=True)
            try:
                lock = path.open("a")
            except FileNotFoundError:
                continue
        with lock:
            lock_or_refuse(lock, directory)
            if is_at(lock, path):
                yield
                return


def lock_or_refuse(lock: Any, directory: Path) -> None:
    """Locks an open file. Raises OutputError if another run holds the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OutputError(
            f"another run works on {directory}.", "Wait for it, or choose another `output_dir`."
        ) from error


def is_at(file: Any, path: Path) -> bool:
    """Returns whether an open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
