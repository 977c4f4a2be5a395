"""The memory of a KV cache: zeroes that are taken as they are written."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.ort.cache import KvCache, zeroes
from edgespec.contract import GraphShape, Role

SHAPE = GraphShape(Role.LLM, 64, 4, 8, 64, 64, vocab_size=5)
SLOTS = 2304

pagemap = pytest.mark.skipif(
    not Path("/proc/self/pagemap").is_file(), reason="the system does not say what is resident"
)


def resident_bytes(array: np.ndarray) -> int:
    """The bytes of an array's pages that are in memory."""
    first = array.ctypes.data // mmap.PAGESIZE
    last = (array.ctypes.data + array.nbytes - 1) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(first * 8)
        entries = np.frombuffer(file.read((last - first + 1) * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE


@pagemap
@pytest.mark.parametrize("rows", [0, 16, 256])
def test_a_cache_takes_the_memory_of_the_rows_written(rows: int) -> None:
    cache = KvCache(SHAPE, 1, SLOTS, following=False)
    cache.slab[:, 0, :, :rows] = 1.0
    pieces = int(np.prod(cache.dims))
    written = pieces * rows * SHAPE.head_dim * 4
    assert resident_bytes(cache.memory) <= written + 2 * pieces * mmap.PAGESIZE
    assert not cache.slab[:, 0, :, rows:].any()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mapped on Linux alone")
@pytest.mark.parametrize("count", [1 << 46, 1 << 62])
def test_a_cache_beyond_the_address_space_is_no_memory(count: int) -> None:
    with pytest.raises(MemoryError):
        zeroes(count, apart=True)


@pytest.mark.parametrize("apart", [False, True])
def test_zeroes_can_be_written(apart: bool) -> None:
    array = zeroes(1000, apart=apart)
    assert array.dtype == np.float32
    assert not array.any()
    array[999] = 2.0
    assert array.sum() == 2.0
