"""How a turn is read line by line, and the lines of a pipe.

Knows lines. Knows nothing of what a line means.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

Read = Callable[[str], str]  # a prompt -> the line; EOFError at the end


class LineCleared(KeyboardInterrupt):
    """Ctrl-C on a line that had text, which is dropped."""


PROMPT, CONTINUED = "> ", ". "


def read_turn(read: Read) -> str:
    """Returns one turn: a line, and the next one where it ends with a backslash."""
    lines = [read(PROMPT)]
    with suppress(EOFError):
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(read(CONTINUED))
    return "\n".join(lines)


def read_pipe(prompt: str) -> str:
    """Returns a line of stdin, read as bytes so that one that is not UTF-8 leaves the next intact.
    Raises EOFError, UnicodeDecodeError."""
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return line.decode("utf-8").rstrip("\r\n")
