"""The first moment of a process: Ctrl-C while the command line is still being imported.

Imports next to nothing, so that it takes effect early. Knows signals.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from edgespec.cli.exit_codes import INTERRUPTED


def watch() -> None:
    """From here on Ctrl-C ends the process with one line instead of a traceback.

    A handler that somebody else has set stays, and so does a SIGINT that is ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def leave(number: int, frame: FrameType | None) -> None:
    """The signal handler: ends the process at once, as nothing was begun that must be undone.

    An exception would not do: extension modules replace it by an error of their own.
    """
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(INTERRUPTED)
