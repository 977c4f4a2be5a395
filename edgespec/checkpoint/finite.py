"""NaN and Inf in the bytes of weights.

Knows floating-point formats. A number is NaN or Inf where its bits without the sign are at least
those of Inf; FP8 E4M3 and E8M0 have NaN alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.source import ByteSink, TensorInfo, some_of
from edgespec.errors import CheckpointError

# dtype -> unsigned integer, mask without the sign, the least value that is not finite
FORMATS: Mapping[str, tuple[type[np.unsignedinteger[Any]], int, int]] = {
    "float64": (np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    "float32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "float16": (np.uint16, 0x7FFF, 0x7C00),
    "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
    "float8_e5m2": (np.uint8, 0x7F, 0x7C),
    "float8_e4m3fn": (np.uint8, 0x7F, 0x7F),
    "float8_e8m0fnu": (np.uint8, 0xFF, 0xFF),
}
PIECE_BYTES = 1 << 18  # fits a core's cache


def is_finite(data: bytes | memoryview, dtype: str) -> bool:
    """Whether no number in the bytes of a tensor is NaN or Inf; True for integers."""
    if dtype not in FORMATS or not len(data):
        return True
    integer, mask, least = FORMATS[dtype]
    bits = np.frombuffer(data, integer)
    count = PIECE_BYTES // bits.itemsize
    absolute = np.empty(min(count, bits.size), integer)
    for start in range(0, bits.size, count):
        piece = bits[start : start + count]
        if np.bitwise_and(piece, mask, out=absolute[: piece.size]).max() >= least:
            return False
    return True


class FiniteSink:
    """Passes the bytes of a tensor on to another sink; CheckpointError for NaN or Inf in them."""

    def __init__(self, sink: ByteSink, info: TensorInfo) -> None:
        self.sink, self.info = sink, info
        self.rest = b""  # the first bytes of a number whose others are yet to come

    def write(self, data: bytes | memoryview) -> int:
        """Writes the data and returns its number of bytes."""
        if not len(data):
            return 0
        joined = self.rest + bytes(data) if self.rest else memoryview(data).cast("B")
        itemsize = np.dtype(FORMATS[self.info.dtype][0]).itemsize if self.known else 1
        whole = len(joined) // itemsize * itemsize
        if self.known and not is_finite(joined[:whole], self.info.dtype):
            raise not_finite(self.info)
        self.rest = bytes(joined[whole:])
        return self.sink.write(data)

    @property
    def known(self) -> bool:
        """Whether the tensor's format has NaN or Inf."""
        return self.info.dtype in FORMATS


def not_finite(info: TensorInfo) -> CheckpointError:
    """The error for a tensor with NaN or Inf."""
    file = f"{info.file}: " if info.file else ""
    return CheckpointError(
        f"{file}the tensor {info.name} has NaN or Inf (not finite).",
        "Download it again, or ask its authors: a model with such weights computes NaN.",
    )


def refuse_not_finite(checkpoint: Checkpoint, advance: Callable[[int], None]) -> None:
    """Reads every tensor. CheckpointError that names those with NaN or Inf. Calls `advance` with
    the bytes of each."""
    bad = []
    for name, info in checkpoint.tensors.items():
        if not is_finite(checkpoint.read(name).reshape(-1).view(np.uint8).data, info.dtype):
            bad.append(name)
        advance(info.num_bytes)
    if bad:
        raise CheckpointError(
            f"{checkpoint.place} has weights with NaN or Inf: {some_of(bad)}.",
            "Download it again, or ask its authors: a model with such weights computes NaN.",
        )
