"""What a call's masks say, in the few bytes that go to the device, where a kernel makes the masks.

Knows masks. Knows no device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Visibility:
    """Of the first `lengths` slots of a lane, a row sees those from `firsts` on; of the slots
    behind, what `visible` says; and none behind those."""

    lengths: NDArray[np.int32]  # [B]
    firsts: NDArray[np.int32]  # [B, S]
    visible: Mask  # [B, S, V]

    @classmethod
    def of(cls, mask: Mask) -> Visibility:
        """Of a mask [B, 1, S, T]: the slots that all rows see are its length."""
        rows: Mask = mask[:, 0]  # [B, S, T]
        batch, count, width = rows.shape
        seen: Mask = np.logical_and.reduce(rows, 1)
        lengths = np.where(np.logical_and.reduce(seen, 1), width, seen.argmin(1)).astype(np.int32)
        firsts = np.zeros((batch, count), np.int32)
        shortest = int(lengths.min())
        visible = np.zeros((batch, count, max(1, width - shortest)), bool)
        for lane, length in enumerate(lengths.tolist()):
            visible[lane, :, : width - length] = rows[lane, :, length:]
        return cls(lengths, firsts, visible)
