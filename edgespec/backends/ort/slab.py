"""Zeroes for a KV cache: memory that is taken a page at a time, as it is written.

The rows of one sequence stand apart, a piece for each layer and head, so its first tokens write a
little of each huge page: with those, half a gigabyte would be in use after one token. Small pages
cost 2 % of a step at 2048 tokens of Qwen3-0.6B's shape. Knows pages; knows no lanes.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


def zeroes(count: int, dtype: DTypeLike = np.float32, *, apart: bool) -> NDArray[Any]:
    """Returns `count` zeroes. If they are written in pieces that stand `apart`, their pages are
    small where the system lets us choose. Raises MemoryError."""
    if not apart or not sys.platform.startswith("linux") or not count:
        return np.zeros(count, dtype)
    num_bytes = count * np.dtype(dtype).itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no address space for {num_bytes} bytes") from error
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype)
