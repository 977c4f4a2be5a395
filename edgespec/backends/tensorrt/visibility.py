"""What the rows of a call attend to, in the few bytes that go to the device, where a kernel makes
the masks.

Knows lengths, windows and what rows see. Knows no device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.call import Attention, Call, Mask


@dataclass(frozen=True, slots=True)
class Visibility:
    """Of the first `lengths` slots of a lane, a row sees those from `firsts` on; of the slots
    behind, what `visible` says; and none behind those."""

    lengths: NDArray[np.int32]  # [B]
    firsts: NDArray[np.int32]  # [B, S]
    visible: Mask  # [B, S, V]

    @classmethod
    def of(cls, call: Call, attention: Attention) -> Visibility:
        """What one kind of layer attends to; a row that only fills up sees itself."""
        rows, context, window = call.rows, call.context_rows, attention.window
        starts: list[int] = call.write_indices.tolist()
        batch, lanes = len(starts), attention.lanes
        width = max(s + context + rows - a.length for s, a in zip(starts, lanes, strict=True))
        lengths = np.array([lane.length for lane in lanes], np.int32)
        firsts, seen = np.zeros((batch, rows), np.int32), np.zeros((batch, rows, width), bool)
        for i, (lane, start) in enumerate(zip(lanes, starts, strict=True)):
            visible, first = lane.visible, start + context - lane.length
            count, known = visible.shape
            scratch = known - count
            if window is not None:
                own = lane.positions[scratch:]
                firsts[i, :count] = np.maximum(own - window + 1, 0)
                if call.target_hidden is None:  # no block
                    visible = visible & (own[:, None] - lane.positions < window)
            seen[i, :count, :scratch] = visible[:, :scratch]
            seen[i, :count, first : first + count] = visible[:, scratch:]
            if count < rows:
                filling = np.arange(count, rows)
                firsts[i, count:] = lane.length
                seen[i, filling, first + filling] = True
        return cls(lengths, firsts, seen)
