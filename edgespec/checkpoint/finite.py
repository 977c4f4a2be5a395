"""Whether stored tensors are finite numbers: NaN and Inf by their bits, without a copy.

Knows tensors as they are stored. Knows nothing of what they are for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.files import Checkpoint

# An integer of the same width, and the bits of the exponent: all set in NaN and Inf
EXPONENT = {
    "float32": (np.uint32, 0x7F800000),
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
}
STEP = 1 << 22  # values at a time


def is_finite(array: NDArray[Any], dtype: str) -> bool:
    """Whether an array, stored as `dtype`, holds neither NaN nor Inf; True for other types than
    those of EXPONENT."""
    if dtype not in EXPONENT:
        return True
    integer, mask = EXPONENT[dtype]
    bits = array.reshape(-1).view(integer)
    parts = (bits[start : start + STEP] for start in range(0, bits.size, STEP))
    return not any(((part & mask) == mask).any() for part in parts)


def tensors_not_finite(checkpoint: Checkpoint, done: Callable[[], None]) -> list[str]:
    """The names of the tensors with NaN or Inf; reads all, and calls `done` after each."""
    bad = []
    for name, info in checkpoint.tensors.items():
        if not is_finite(checkpoint.read(name), info.dtype):
            bad.append(name)
        done()
    return bad
