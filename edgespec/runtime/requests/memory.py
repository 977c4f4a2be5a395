"""The peak memory of this process.

Knows the statistics of the operating system. Engines map their weights from files, of which the
pages that were read count.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")


def peak_bytes(status: Path = STATUS) -> int:
    """Returns the peak resident set size in bytes since the start of the process.

    Uses VmHWM if there is one: on Linux ru_maxrss is inherited through fork and exec, so that a
    small child would report its parent's peak.
    """
    for line in status.read_text().splitlines() if status.exists() else ():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.removesuffix("kB")) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB; bytes on macOS
