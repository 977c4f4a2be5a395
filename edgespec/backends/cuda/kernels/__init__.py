"""The project's own CUDA kernels: their source, and the structures that they take.

Knows what stands in the .cu files beside it. Knows no device: `device.nvrtc` compiles them.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping
from importlib import resources
from typing import Any

import numpy as np

MAX_MOVES = 128  # rows of one launch: the structure goes with it, and has 4 KB at most
THREADS = 128
MASK_THREADS = 256
WIDE_BYTES = 16
COPY_BLOCKS = 8  # that share a head's rows
MOVE_BLOCKS = 32  # that share a row
FINITE_BLOCKS = 32  # that share a lane's hidden states
CONVERT_BLOCKS = 128
TOP_THREADS = 256
PART_IDS = 16 * TOP_THREADS  # of a row's logits, in one block

POINTERS = [("sources", np.uint64), ("targets", np.uint64)]
STRIDES = [("source_head_bytes", np.int64), ("target_head_bytes", np.int64)]
OFFSETS = [("source_offset", np.int64), ("target_offset", np.int64)]
MOVE_ROWS = np.dtype(
    [
        *POINTERS,
        *OFFSETS,
        ("row_bytes", np.int64),
        *STRIDES,
        ("count", np.int32),
        ("wide", np.int32),
        ("tables", np.int32),
        ("unused", np.int32),
        ("from", np.int32, (MAX_MOVES,)),
        ("to", np.int32, (MAX_MOVES,)),
    ],
    align=True,
)
COPY_ROWS = np.dtype(
    [*POINTERS, *OFFSETS, ("size", np.int64), *STRIDES, ("wide", np.int32), ("unused", np.int32)],
    align=True,
)
ATTENTION_MASK = np.dtype(
    [
        *((name, np.uint64) for name in ("lengths", "firsts", "visible", "mask")),
        *((name, np.int32) for name in ("rows", "width", "slots", "unused")),
    ],
    align=True,
)
NOT_FINITE = np.dtype(
    [
        ("values", np.uint64),
        ("flags", np.uint64),
        ("count", np.int64),
        ("kind", np.int32),
        ("unused", np.int32),
    ],
    align=True,
)
CONVERT = np.dtype(
    [
        ("source", np.uint64),
        ("target", np.uint64),
        ("count", np.int64),
        ("kind", np.int32),
        ("unused", np.int32),
    ],
    align=True,
)
TOP_PARTS = np.dtype(
    [
        *((name, np.uint64) for name in ("logits", "keys", "sums")),
        *((name, np.int32) for name in ("stride", "ids", "parts", "count")),
    ],
    align=True,
)
TOP_ROWS = np.dtype(
    [
        *((name, np.uint64) for name in ("keys", "sums", "ids", "values", "logsumexp")),
        *((name, np.int32) for name in ("parts", "count")),
    ],
    align=True,
)
STRUCTURES = {
    "move_rows": MOVE_ROWS,
    "copy_rows": COPY_ROWS,
    "attention_mask": ATTENTION_MASK,
    "not_finite": NOT_FINITE,
    "convert": CONVERT,
    "top_parts": TOP_PARTS,
    "top_rows": TOP_ROWS,
}
FILES = ("rows.cu", "mask.cu", "finite.cu", "convert.cu", "top.cu")


def source() -> str:
    """All kernels as one text of CUDA C."""
    folder = resources.files(__name__)
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in FILES)


class KernelLayout:
    """How the values of a kernel's structure become bytes: numbers, and behind them arrays."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        fields = dtype.fields
        assert fields is not None
        names = dtype.names or ()
        self.names = [name for name in names if not fields[name][0].shape]
        self.arrays = [(name, fields[name][0].itemsize) for name in names[len(self.names) :]]
        self.numbers = struct.Struct("@" + "".join(fields[name][0].char for name in self.names))
        assert self.numbers.size + sum(size for _, size in self.arrays) == dtype.itemsize

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """The bytes; what is not given is 0, and an array fills its part from the beginning."""
        out = self.numbers.pack(*(values.get(name, 0) for name in self.names))
        for name, size in self.arrays:
            out += array("i", values[name]).tobytes().ljust(size, b"\0")
        assert len(out) == self.numbers.size + sum(size for _, size in self.arrays)
        return out


LAYOUTS = {name: KernelLayout(dtype) for name, dtype in STRUCTURES.items()}


def structure(kernel: str, **values: Any) -> bytes:
    """The bytes of a kernel's structure; rows of `from` and `to` fill it from its beginning."""
    return LAYOUTS[kernel].pack(values)
