"""The project's own CUDA kernels: their source, and the structures that they take.

Knows what stands in the .cu files beside it. Knows no device: `device.nvrtc` compiles them.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np

MAX_MOVES = 128  # rows of one launch: the structure goes with it, and has 4 KB at most
THREADS = 128
MASK_THREADS = 256
WIDE_BYTES = 16
COPY_BLOCKS = 8  # that share a head's rows
FINITE_BLOCKS = 32  # that share a lane's hidden states
CONVERT_BLOCKS = 128

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
STRUCTURES = {
    "move_rows": MOVE_ROWS,
    "copy_rows": COPY_ROWS,
    "attention_mask": ATTENTION_MASK,
    "not_finite": NOT_FINITE,
    "convert": CONVERT,
}
FILES = ("rows.cu", "mask.cu", "finite.cu", "convert.cu")


def source() -> str:
    """All kernels as one text of CUDA C."""
    folder = resources.files(__name__)
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in FILES)


def structure(kernel: str, **values: Any) -> bytes:
    """The bytes of a kernel's structure; rows of `from` and `to` fill it from its beginning."""
    out = np.zeros((), STRUCTURES[kernel])
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            out[name][: len(value)] = value
        else:
            out[name] = value
    return out.tobytes()
