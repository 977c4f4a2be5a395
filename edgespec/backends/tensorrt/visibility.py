"""What the rows of a call see, in the few bytes that go to the device, where a kernel makes the
masks.

Knows lengths and windows. Knows no device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.call import Attention, Call
from edgespec.backends.masks import attention_mask


@dataclass(frozen=True, slots=True)
class Visibility:
    """Of the first `lengths` slots of a lane, a row sees those from `firsts` on; of the slots
    behind, what `visible` says; and none behind those."""

    lengths: NDArray[np.int32]  # [B]
    firsts: NDArray[np.int32]  # [B, S]
    visible: NDArray[np.bool_]  # [B, S, V]

    @classmethod
    def of(cls, call: Call, attention: Attention) -> Visibility:
        """What the rows of a call see; one that only fills up sees itself."""
        mask = attention_mask(call, attention)[:, 0]  # [B, S, T]
        batch, rows, width = mask.shape
        lengths = np.array([lane.length for lane in attention.lanes], np.int32)
        firsts = np.repeat(lengths[:, None], rows, 1)
        visible = np.zeros((batch, rows, max(1, width - int(lengths.min()))), bool)
        for place, lane in enumerate(attention.lanes):
            count, columns = lane.visible.shape
            if attention.window is None:
                firsts[place, :count] = 0
            else:
                least = lane.positions[columns - count :] - attention.window + 1
                firsts[place, :count] = np.clip(least, 0, lane.length)
            visible[place, :, : width - lane.length] = mask[place, :, lane.length :]
        return cls(lengths, firsts, visible)
