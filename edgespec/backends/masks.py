"""Boolean masks of what the rows of a call attend to, for backends whose graphs read masks.

Knows lengths, windows and what rows see. Knows no engine library.
"""

from __future__ import annotations

import numpy as np

from edgespec.backends.call import Attention, Call, Mask


def attention_mask(call: Call, attention: Attention, out: Mask | None = None) -> Mask:
    """[B, 1, S, T], True = attend, T the slots of `out` or as many as the call needs; a row that
    only fills up attends to itself. What is in `out` is overwritten."""
    if out is None:
        out = np.empty((len(attention.lanes), 1, call.rows, call.width), bool)
    out[...] = False
    rows, context, window = call.rows, call.context_rows, attention.window
    starts: list[int] = call.write_indices.tolist()
    for mask, lane, start in zip(out[:, 0], attention.lanes, starts, strict=True):
        visible, first = lane.visible, start + context
        count, known = visible.shape
        scratch = known - count
        behind = lane.length + scratch
        mask[:count, : lane.length] = True
        if window is not None:
            own = lane.positions[scratch:, None]
            mask[:count, : lane.length] = own - np.arange(lane.length) < window
            if not call.is_block:
                visible = visible & (own - lane.positions < window)
        if first == behind:
            mask[:count, lane.length : first + count] = visible
        else:
            mask[:count, lane.length : behind] = visible[:, :scratch]
            mask[:count, first : first + count] = visible[:, scratch:]
        if count < rows:
            filling = np.arange(count, rows)
            mask[filling, first + filling] = True
    return out


def tree_mask(call: Call) -> Mask:
    """[B, S, S]: which rows of the call each row follows, for recurrent layers; a row that only
    fills up follows itself."""
    lanes = call.attention.lanes
    out = np.broadcast_to(np.eye(call.rows, dtype=bool), (len(lanes), call.rows, call.rows)).copy()
    for mask, lane in zip(out, lanes, strict=True):
        count = len(lane.visible)
        mask[:count, :count] = lane.visible[:, lane.visible.shape[1] - count :]
    return out
