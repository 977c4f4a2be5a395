"""Huge pages: which memory is meant, and that the kernel gives them where it can."""

from __future__ import annotations

import mmap
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.ort import huge_pages
from edgespec.backends.ort.huge_pages import PAGE_BYTES, in_huge_pages, new_ranges, private_ranges

MB = 1 << 20
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
MAPS = """\
55d000000000-55d000400000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000800000 r--p 00000000 fe:00 12345                      /usr/lib/libx.so
7f0001000000-7f0001800000 rw-p 00000000 00:00 0@
7f0002000000-7f0002800000 rw-p 00000000 00:00 0                          [stack]
7f0003000000-7f0003800000 rw-s 00000000 00:00 0@
""".replace("@", " ")  # the kernel leaves a space


def test_private_ranges_are_heap_and_anonymous_memory(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(MAPS)
    assert private_ranges(maps) == [
        (0x55D000000000, 0x55D000400000),
        (0x7F0001000000, 0x7F0001800000),
    ]
    assert private_ranges(tmp_path / "missing") == []


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ([], [(0, 8 * MB)], [(0, 8 * MB)]),
        ([(0, 8 * MB)], [(0, 8 * MB)], []),
        ([(0, 2 * MB)], [(0, 8 * MB)], [(2 * MB, 8 * MB)]),  # the heap grew
        ([(0, 3 * MB)], [(0, 9 * MB)], [(4 * MB, 8 * MB)]),  # whole pages only
        (
            [(8 * MB, 10 * MB)],
            [(0, 16 * MB)],
            [(0, 8 * MB), (10 * MB, 16 * MB)],
        ),  # joined with its neighbour
        ([], [(0, 2 * MB)], []),  # small
        ([(0, 8 * MB)], [], []),  # given back
    ],
)
def test_new_ranges(
    before: list[tuple[int, int]], after: list[tuple[int, int]], found: list[tuple[int, int]]
) -> None:
    assert new_ranges(before, after) == found


def huge_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"AnonHugePages:\s+(\d+) kB", text)
    assert found is not None
    return 1024 * int(found[1])


def can_collapse() -> bool:
    probe = mmap.mmap(-1, 3 * PAGE_BYTES, PRIVATE)
    address = np.frombuffer(probe, np.uint8).ctypes.data
    start = -(-address // PAGE_BYTES) * PAGE_BYTES
    np.frombuffer(probe, np.uint8)[:] = 1
    return huge_pages.collapse(start, start + PAGE_BYTES)


def asked_for() -> bool:
    """Whether memory stands in huge pages only where it asks for them."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return (
        Path("/proc/self/smaps_rollup").is_file()
        and enabled.is_file()
        and "[madvise]" in enabled.read_text()
    )


@pytest.mark.skipif(not asked_for() or not can_collapse(), reason="no huge pages here, or always")
def test_memory_allocated_inside_stands_in_huge_pages_with_its_content() -> None:
    before = huge_bytes()
    with in_huge_pages():
        reserved = mmap.mmap(-1, 64 * MB, PRIVATE)
        memory = mmap.mmap(-1, 32 * MB, PRIVATE)
        content = np.frombuffer(memory, np.uint8)
        content[:] = np.arange(32 * MB, dtype=np.uint32).astype(np.uint8)
        assert huge_bytes() - before < 8 * MB
    for thread in threading.enumerate():
        if thread.name == huge_pages.NAME:
            thread.join()
    assert 24 * MB <= huge_bytes() - before <= 34 * MB  # and nothing of what was reserved alone
    reserved.close()
    np.testing.assert_array_equal(content, np.arange(32 * MB, dtype=np.uint32).astype(np.uint8))


def test_where_pages_cannot_be_looked_at_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    maps = tmp_path / "maps"
    maps.write_bytes(
        b"7f0000000000-7f0000800000 r--p 00000000 fe:00 1  /lib/\xff.so\n" + MAPS.encode()
    )
    assert len(private_ranges(maps)) == 2

    def refused(start: int, end: int) -> list[int]:
        raise PermissionError

    monkeypatch.setattr(huge_pages, "written", refused)
    huge_pages.collapse_all([(0, 8 * MB)])
    monkeypatch.setattr(mmap, "PAGESIZE", 65536)
    assert private_ranges(maps) == []
