"""Responses on a stream instead of in a file: `-`, /dev/stdout, /dev/fd/3, /dev/null.

Knows file descriptors. A stream is written once, when all responses are there; it keeps no journal.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import OutputError
from edgespec.prompts.output import NoJournal, Response, document, keep_elsewhere

STDOUT = "-"
_NUMBERS = {"stdin": 0, "stdout": 1, "stderr": 2}
_DESCRIPTOR = re.compile(r"/dev/(stdin|stdout|stderr)|/(?:dev|proc/self)/fd/(\d+)")


@dataclass(frozen=True, slots=True)
class OutputStream:
    """Where bytes go in order and cannot be replaced. `number` is an open descriptor; None: `name`
    is the path of a device."""

    name: str
    number: int | None = None

    def check(self) -> None:
        """Raises OutputError where nothing can be written."""
        if self.number is None:
            if not os.access(self.name, os.W_OK):
                raise self._unwritable("it may not be written")
            return
        ours = {1: sys.stdout, 2: sys.__stderr__}  # None: closed when the process began
        try:
            mode = fcntl.fcntl(self.number, fcntl.F_GETFL) & os.O_ACCMODE
        except OSError as error:
            raise self._unwritable(error.strerror or str(error)) from error
        if mode == os.O_RDONLY or ours.get(self.number, self) is None:
            raise self._unwritable("it is closed, or open for reading only")

    def write(self, data: bytes) -> None:
        """Writes all of it, behind what was printed before. Raises OSError."""
        if self.number is None:
            Path(self.name).write_bytes(data)
            return
        if self.number == 1 and sys.stdout is not None:
            sys.stdout.flush()
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self.number, rest) :]

    def _unwritable(self, why: str) -> OutputError:
        return OutputError(f"{self.name} cannot be written: {why}.", "Name a file, or connect it.")


def stream_of(path: Path | None) -> OutputStream | None:
    """The stream that a path means; None for a file, whether it is there or not."""
    if path is None:
        return None
    if str(path) == STDOUT:
        return OutputStream("stdout", 1)
    if match := _DESCRIPTOR.fullmatch(str(path)):
        number = _NUMBERS[match[1]] if match[1] else int(match[2])
        return OutputStream(str(path), number)
    try:
        return OutputStream(str(path)) if stat.S_ISCHR(path.stat().st_mode) else None
    except OSError:
        return None


class StreamOutput(NoJournal):
    """In place of a Journal where the responses go to a stream."""

    def __init__(self, stream: OutputStream) -> None:
        self.stream = stream

    def finish(self, responses: Sequence[Response], input_file: str | os.PathLike[str]) -> None:
        """Writes the document. Raises BrokenPipeError where nobody reads any more, and OutputError
        that says where the responses are kept instead."""
        data = document(input_file, responses)
        try:
            self.stream.write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            why = OutputError(
                f"{self.stream.name} cannot be written: {error.strerror}.", "Name a file."
            )
            raise keep_elsewhere(why, data) from error
