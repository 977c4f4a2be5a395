"""The memory of this machine. Knows Linux's control groups."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

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
