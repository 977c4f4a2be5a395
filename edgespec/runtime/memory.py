"""The most memory that this process held at a time.

Knows the operating system's account. Engines map their weights from files: the pages that were
touched count.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")


def peak_bytes(status: Path = STATUS) -> int:
    """Resident bytes at their peak, since the process began.

    VmHWM, where there is one: on Linux ru_maxrss is inherited over fork and exec, and a small child
    of a large parent would report the parent's.
    """
    for line in status.read_text().splitlines() if status.exists() else ():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.removesuffix("kB")) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes, but bytes on macOS
