"""What the rows of a call attend to, in the few bytes that go to the device, where a kernel makes
the masks.

Knows lengths, windows and what rows see. Knows no device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.call import Attention, Call, Mask


def width_of(call: Call, attention: Attention) -> int:
    """The slots behind the first `length` ones that rows may see, of all lanes at most."""
    starts: list[int] = call.write_indices.tolist()
    lanes = zip(starts, attention.lanes, strict=True)
    return call.written + max(start - lane.length for start, lane in lanes)


@dataclass(frozen=True, slots=True)
class Visibility:
    """Of the first `lengths` slots of a lane, a row sees those from `firsts` on; of the slots
    behind, what `visible` says; and none behind those."""

    lengths: NDArray[np.int32]  # [B]
    firsts: NDArray[np.int32]  # [B, S]
    visible: Mask  # [B, S, V]

    def fill(self, call: Call, attention: Attention) -> None:
        """Write what one kind of layer attends to; a row that only fills up sees itself."""
        rows, context, window = call.rows, call.context_rows, attention.window
        starts: list[int] = call.write_indices.tolist()
        for i, (lane, start) in enumerate(zip(attention.lanes, starts, strict=True)):
            visible, first = lane.visible, start + context - lane.length
            count, known = visible.shape
            scratch = known - count
            self.lengths[i], self.firsts[i] = lane.length, 0
            if window is not None:
                own = lane.positions[scratch:]
                self.firsts[i, :count] = np.maximum(own - window + 1, 0)
                if not call.is_block:
                    visible = visible & (own[:, None] - lane.positions < window)
            seen = self.visible[i]
            if seen.shape == visible.shape and first == scratch:
                seen[...] = visible
                continue
            seen[...] = False
            seen[:count, :scratch] = visible[:, :scratch]
            seen[:count, first : first + count] = visible[:, scratch:]
            if count < rows:
                filling = np.arange(count, rows)
                self.firsts[i, count:] = lane.length
                seen[filling, first + filling] = True
