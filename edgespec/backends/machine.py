"""The memory of this machine. Knows Linux's control groups and /proc/meminfo."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
# What a container may take, in the first and the second version of control groups
GROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    Path("/sys/fs/cgroup/memory.max"),
)


def machine_bytes(group_limits: Iterable[Path] = GROUP_LIMITS) -> int | None:
    """The memory that a process can have on this machine; None where that cannot be found out."""
    try:
        found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (ValueError, OSError):
        found = []
    for path in group_limits:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        found += [int(text)] if text.isdigit() else []  # "max" is no limit
    return min(found, default=None)


def available_bytes(meminfo: Path = MEMINFO) -> int | None:
    """The memory that a process could have now, as Linux estimates it; None where that cannot be
    found out."""
    return meminfo_bytes("MemAvailable", meminfo)


def swap_bytes(meminfo: Path = MEMINFO) -> int:
    """The size of what memory is swapped to; 0 where that cannot be found out."""
    return meminfo_bytes("SwapTotal", meminfo) or 0


def meminfo_bytes(name: str, meminfo: Path) -> int | None:
    """A line of /proc/meminfo, in bytes."""
    try:
        found = re.search(rf"^{name}:\s*(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None
