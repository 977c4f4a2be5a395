"""The KV cache of an engine: one piece of host memory.

ONNX Runtime's Attention reads a cache as wide as it is given, so a cache of full width would cost
by the capacity and a copy of its prefix by the copying. There the stride, the slots between one
head and the next, follows what is written instead: it grows by an eighth and the rows move. Other
kernels read what is written alone. Knows lanes and rows; knows no engine library.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from edgespec.backends.engine_config import EngineLimits
from edgespec.backends.ort.contract import SCALE_BYTES, CacheType
from edgespec.contract import GraphShape

STRIDE_STEP = 32

Rows = NDArray[Any]  # of the cache's type; int8: codes, and the bytes of a scale behind them
Ids = NDArray[np.int64]


class KvCache:
    """Zero-filled rows of `lanes` sequences, `slots` at most in each.

    `extents` counts the rows of a lane that are kept when the stride changes: up to the end of its
    last call, or what was put there since. A cache that is not `following` has the stride of all
    its slots from the beginning.
    """

    def __init__(
        self,
        shape: GraphShape,
        lanes: int,
        slots: int,
        following: bool,
        cache_type: CacheType = "float32",
    ) -> None:
        self.dims = (2 * len(shape.attention_layers), lanes, shape.num_kv_heads)
        self.slots, self.following, self.dtype = slots, following, np.dtype(cache_type)
        self.row = shape.head_dim + (SCALE_BYTES if cache_type == "int8" else 0)  # elements
        # Zeroes, not empty memory: a NaN in an unwritten row would poison kernels that multiply
        # before masking. Memory is taken page by page as it is written.
        count = int(np.prod(self.dims)) * slots * self.row
        self.memory = zeroes(count, self.dtype, apart=not following)
        self.stride = close_stride(1, slots) if following else slots
        self.extents = [0] * lanes

    @property
    def slab(self) -> Rows:
        """The cache as a view [2*layers, lanes, Hkv, stride, row]."""
        size = int(np.prod(self.dims)) * self.stride * self.row
        return self.memory[:size].reshape(*self.dims, self.stride, self.row)

    def reserve(self, first_lane: int, starts: list[int], rows: int, width: int) -> None:
        """Make room for a call: `rows` rows from `starts` on, one start a lane, of `width` slots
        that are read. Rows behind the starts are dropped."""
        for lane, start in enumerate(starts, first_lane):
            self.extents[lane] = min(self.extents[lane], start)
        self.fit(width)
        for lane, start in enumerate(starts, first_lane):
            self.extents[lane] = start + rows

    def fit(self, width: int) -> None:
        """Let the stride follow the longest lane, and `width` where that is more."""
        need = max(width, *self.extents)
        close = close_stride(need, self.slots)
        if self.following and not need <= self.stride <= 2 * close:
            self.restride(close)

    def restride(self, stride: int) -> None:
        """Move each lane's rows, head by head, to where the new stride puts them; the slots behind
        become zeroes."""
        old, new, view = self.stride * self.row, stride * self.row, self.memory.data
        sizes = (
            np.broadcast_to(np.array(self.extents)[:, None] * self.row, self.dims).ravel().tolist()
        )
        blocks = list(enumerate(sizes))
        for i, size in reversed(blocks) if new > old else blocks:
            # As memmove does it: they may overlap
            view[i * new : i * new + size] = view[i * old : i * old + size]
            self.memory[i * new + size : (i + 1) * new] = 0
        self.stride = stride

    def move_rows(self, lane: int, slots: Ids, start: int) -> None:
        """Copy rows to `start`, `start`+1, ...; rows that stand right already are left alone."""
        if slots.tolist() == [*range(start, start + len(slots))]:
            return
        targets = np.arange(start, start + len(slots))
        moving = slots != targets
        rows = self.slab[:, lane]
        rows[:, :, targets[moving]] = rows[:, :, slots[moving]]

    def read_rows(self, lane: int, count: int) -> Rows:
        """A copy of a lane's first rows, [2*layers, Hkv, count, row]."""
        assert count <= self.extents[lane]
        return self.slab[:, lane, :, :count].copy()

    def write_rows(self, lane: int, rows: Rows) -> None:
        """Begin a lane with rows [2*layers, Hkv, count, row] and drop what stood behind them."""
        count = rows.shape[2]
        self.reserve(lane, [0], count, count)
        self.slab[:, lane, :, :count] = rows

    def free(self, lane: int) -> None:
        """Drop a lane's rows."""
        self.extents[lane] = 0

    def zero(self, lane: int) -> None:
        """Make a lane's rows zeros again: NaN or Inf harms even where no row attends to it."""
        self.slab[:, lane] = 0
        self.extents[lane] = 0

    def copy_lane(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` rows of one lane to the first of another."""
        assert source != target
        assert count <= self.extents[source]
        self.reserve(target, [0], count, count)
        self.slab[:, target, :, :count] = self.slab[:, source, :, :count]


def zeroes(count: int, dtype: DTypeLike = np.float32, *, apart: bool) -> NDArray[Any]:
    """Zeroes whose memory is taken a page at a time, as it is written; where pieces are written
    that stand `apart`, in small pages if the system lets us choose. Raises MemoryError.

    The rows of one sequence stand apart, a piece for each layer and head, so its first tokens write
    a little of each huge page: with those, half a gigabyte would be in use after one token. Small
    pages cost 2 % of a step at 2048 tokens of Qwen3-0.6B's shape.
    """
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


def close_stride(rows: int, slots: int) -> int:
    """The stride for so many rows: an eighth more, in steps, and never more than there are
    slots."""
    return min(slots, (rows + rows // 8) // STRIDE_STEP * STRIDE_STEP + STRIDE_STEP)


def padding_of(limits: EngineLimits, *, block: bool = False) -> int:
    """Slots behind the capacity of a batched engine: a lane may have space for one row when its
    neighbors run a whole tree; with drafts of blocks a tree's context and a block. One for a
    single sequence: its last row may be filled up to two.
    """
    if limits.max_batch_size == 1:
        return 1
    rows = max(limits.max_verify_tree_size or 0, limits.max_draft_tree_size or 0)
    return (2 * rows if block else rows) + 1
