"""What the rows of a call see, as TreeAttention reads it: a length, bits and a first position
instead of a mask as wide as the cache.

Knows lengths, windows and what rows see. Knows no engine library.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgespec.backends.call import Attention, Call, Ids, Mask


@dataclass(frozen=True, slots=True)
class Visibility:
    """Of B lanes and S rows: all see the first `lengths` slots of their lane from position `first`
    on, and of the V slots behind what `visible` says. A row that sees none of those fills up."""

    lengths: Ids  # [B]
    visible: Mask  # [B, S, V]
    first: Ids  # [B, S]


def visibility(call: Call, attention: Attention) -> Visibility:
    """What the rows of a call see in one kind of layer."""
    starts: list[int] = call.write_indices.tolist()
    if attention.window is None and len(starts) == 1:
        (lane,), (start,) = attention.lanes, starts
        rows, known = lane.visible.shape
        if rows == call.rows and lane.length + known == start + call.context_rows + rows:
            # nothing fills up, and no context stands between scratch and own rows: as it is given
            first = np.zeros((1, rows), np.int64)
            return Visibility(np.array([lane.length], np.int64), lane.visible[None], first)
    lengths = np.array([lane.length for lane in attention.lanes], np.int64)
    context, widest = call.context_rows, 0
    for lane, start in zip(attention.lanes, starts, strict=True):
        behind = start + context + len(lane.visible)  # the slot behind the last row of its own
        widest = max(widest, behind - lane.length)
    visible = np.zeros((len(starts), call.rows, widest), bool)
    first = np.zeros((len(starts), call.rows), np.int64)
    for index, (lane, start) in enumerate(zip(attention.lanes, starts, strict=True)):
        count, known = lane.visible.shape
        scratch, own = known - count, start + context - lane.length
        visible[index, :count, :scratch] = lane.visible[:, :scratch]
        visible[index, :count, own : own + count] = lane.visible[:, scratch:]
        if attention.window is not None:
            first[index, :count] = np.maximum(lane.positions[scratch:] - attention.window + 1, 0)
            if call.is_block:  # rows of a block are not hidden from each other
                first[index, :count] = np.minimum(first[index, :count], lane.length)
    return Visibility(lengths, visible, first)
