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
    lengths = np.array([lane.length for lane in attention.lanes], np.int64)
    seen = [lane.visible for lane in attention.lanes]
    shape = rows, known = seen[0].shape
    if attention.window is None and rows == call.rows and all(one.shape == shape for one in seen):
        behind = call.write_indices + (call.context_rows + rows - known)
        if np.array_equal(lengths, behind):
            # nothing fills up, and no context stands between scratch and own rows: as it is given
            visible = np.concatenate(seen).reshape(len(seen), rows, known)
            return Visibility(lengths, visible, np.zeros((len(seen), rows), np.int64))
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
