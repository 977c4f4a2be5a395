"""Puts what ONNX Runtime allocates at load into huge pages: weights are read whole at each step,
and looking up their addresses in pages of 4 KB costs a tenth of a step of 4-bit weights (decision
0010).

Linux gives huge pages only to memory that asks for them, and the allocator below ONNX Runtime does
not ask. Where the kernel cannot do it (before 6.1, or forbidden), nothing changes. No result
depends on it.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import numpy as np

PAGE_BYTES = 2 << 20
SMALL_BYTES = 4096
ENTRY_BYTES, PRESENT_BIT = 8, 63  # of /proc/self/pagemap
MIN_BYTES = 4 << 20  # smaller pieces are not weights
NAME = "huge pages"
COLLAPSE = 25  # MADV_COLLAPSE: move what is there to huge pages now
_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ 00:00 0 *(\[heap\])?$", re.MULTILINE)

Range = tuple[int, int]


@contextmanager
def in_huge_pages() -> Iterator[None]:
    """Large pieces of memory that are allocated inside are moved to huge pages afterwards, beside
    what comes next.

    It takes 0.1 s for 300 MB, and several times as long where free memory is in pieces.
    """
    before = private_ranges()
    yield
    Thread(
        target=collapse_all, args=(new_ranges(before, private_ranges()),), daemon=True, name=NAME
    ).start()


def collapse_all(ranges: Iterable[Range]) -> None:
    """Move the used parts of these ranges to huge pages; none where memory is out of reach."""
    # The system may hide which pages are in use: they stay small then
    with suppress(OSError):
        for start, end in ranges:
            for page in written(start, end):
                collapse(page, page + PAGE_BYTES)


def written(start: int, end: int, pagemap: Path = Path("/proc/self/pagemap")) -> list[int]:
    """The addresses of the huge pages of which at least half is in use: allocators reserve more
    than they fill."""
    with pagemap.open("rb", buffering=0) as file:
        file.seek(start // SMALL_BYTES * ENTRY_BYTES)
        entries = np.frombuffer(file.read((end - start) // SMALL_BYTES * ENTRY_BYTES), np.uint64)
    present = (
        (entries >> np.uint64(PRESENT_BIT)).reshape(-1, PAGE_BYTES // SMALL_BYTES).mean(axis=1)
    )
    return [start + int(i) * PAGE_BYTES for i in np.flatnonzero(present >= 0.5)]


def private_ranges(maps: Path = Path("/proc/self/maps")) -> list[Range]:
    """The address ranges of this process's writable memory that no file backs; none where the
    system does not say."""
    if not sys.platform.startswith("linux") or mmap.PAGESIZE != SMALL_BYTES or not maps.is_file():
        return []
    return [
        (int(start, 16), int(end, 16))
        for start, end, _ in _ANONYMOUS.findall(maps.read_text(errors="replace"))
    ]


def new_ranges(before: list[Range], after: list[Range]) -> list[Range]:
    """The ranges of `after` that are not in `before`, cut to complete huge pages; both ascend."""
    added = []
    for start, end in after:
        for old_start, old_end in before:
            if old_end <= start or end <= old_start:
                continue
            if start < old_start:
                added.append((start, old_start))
            start = max(start, old_end)
        if start < end:
            added.append((start, end))
    aligned = [
        (-(-start // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES)
        for start, end in added
    ]
    return [(start, end) for start, end in aligned if end - start >= MIN_BYTES]


def collapse(start: int, end: int) -> bool:
    """Ask the kernel for huge pages; returns whether it gave all of them."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(start, end - start, COLLAPSE) == 0)
