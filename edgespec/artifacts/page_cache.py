"""Large files as later runs will find them in the page cache: read from the disk, in large folios.

Knows files. What was just written lies there in small pages, and an engine that maps it so takes up
to 1.35 times as long for a pass of one row (decision 19).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

MIN_BYTES = 2**20  # a smaller file is soon read


def renew(path: Path) -> None:
    """Write a file to the disk, and drop its pages where the system can (Linux): whoever reads it
    next has it as after a restart. Raises OSError."""
    if path.stat().st_size < MIN_BYTES:
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        if sys.platform == "linux":
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
