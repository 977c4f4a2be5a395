"""The memory and the cores of this machine. Knows Linux's control groups and /proc."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
TASKS = Path("/proc/self/task")
GROUP = Path("/sys/fs/cgroup")
# What a container may take, in the first and the second version of control groups
GROUP_LIMITS = (
    GROUP / "memory/memory.limit_in_bytes",
    GROUP / "memory.max",
)


def machine_bytes(group_limits: Iterable[Path] = GROUP_LIMITS) -> int | None:
    """The memory that a process can have on this machine; None where that cannot be found out."""
    try:
        sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (ValueError, OSError):
        sizes = []
    for path in group_limits:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        sizes += [int(text)] if text.isdigit() else []  # "max" is no limit
    return min(sizes, default=None)


def cores(group: Path = GROUP) -> int:
    """The cores that this process may use: those that it is bound to, and no more than its
    container's share of processor time is worth, as of `docker --cpus`."""
    affinity = getattr(os, "sched_getaffinity", None)  # which Linux has
    bound = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota, period = cpu_quota(group)
    return bound if quota <= 0 else max(1, min(bound, math.ceil(quota / period)))


def cpu_quota(group: Path) -> tuple[int, int]:
    """Microseconds of processor time in each so many, by either version of control groups; 0 of 1
    where there is no limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = [word for name in names for word in (group / name).read_text().split()]
            quota, period = map(int, words)
        except (OSError, ValueError):  # "max" is no limit
            continue
        if period > 0:
            return quota, period
    return 0, 1


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
        match = re.search(rf"^{name}:\s*(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(match[1]) if match else None


def waited_s(tasks: Path = TASKS) -> float:
    """Seconds for which threads of this process were ready and had no core, so far, summed over
    those that are there: wall time that is neither processor time nor sleep. 0 where the system
    does not count it."""
    waited = 0
    for path in tasks.glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has ended
            waited += int(path.read_text().split()[1])
    return waited / 1e9
