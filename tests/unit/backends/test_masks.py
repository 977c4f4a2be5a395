"""The masks of calls, row by row from the definition: what is committed, what is said of scratch
rows and of the call's own, windows, and rows that only fill up."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.backends.call import Attention, Call, HiddenStates, LaneAttention
from edgespec.backends.host import HostStates
from edgespec.backends.masks import attention_mask, tree_mask

ROWS = 4


def call_of(attention: Attention, starts: list[int], context: int | None = None) -> Call:
    none = np.zeros((len(starts), ROWS, 0), np.float32)
    states: list[HiddenStates] = [HostStates(np.zeros((context or 0, 1), np.float32))] * len(starts)
    cos = np.zeros((len(starts), context or 0, 0), np.float32)
    block = {} if context is None else {"target_hidden": states, "context_cos": cos}
    return Call(none, none, none, attention, np.array(starts), [np.arange(1)] * len(starts), block)


def random_lane(rng: np.random.Generator, length: int, scratch: int, rows: int) -> LaneAttention:
    visible = rng.random((rows, scratch + rows)) < 0.5
    visible[np.arange(rows), scratch + np.arange(rows)] = True
    return LaneAttention(length, visible, length + rng.integers(0, 3, scratch + rows))


def seen(lane: LaneAttention, row: int, first: int, window: int | None, *, block: bool) -> set[int]:
    """The slots of one row, `first` being the slot of the call's first."""
    count, place = (
        len(lane.visible),
        int(lane.positions[len(lane.positions) - len(lane.visible) + row]),
    )
    near = range(lane.length) if window is None else range(max(0, place - window + 1), lane.length)
    slots = set(near)
    scratch = lane.visible.shape[1] - count
    for column in np.flatnonzero(lane.visible[row]).tolist():
        if window is not None and not block and place - int(lane.positions[column]) >= window:
            continue
        slots.add(lane.length + column if column < scratch else first + column - scratch)
    return slots


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("seed", range(5))
def test_lanes_of_a_call_see_what_is_said_of_them(seed: int, window: int | None) -> None:
    rng = np.random.default_rng(seed)
    lanes = [random_lane(rng, *sizes) for sizes in ((5, 2, 4), (0, 0, 1), (9, 3, 2))]
    starts = [7, 0, 12]
    attention = Attention(lanes, window)
    call = call_of(attention, starts)
    assert call.width == 16
    for width in (16, 20):
        out = np.ones((3, 1, ROWS, width), bool)  # of the call before
        mask = attention_mask(call, attention, out if width == 20 else None)
        assert mask.shape == (3, 1, ROWS, width)
        for lane, start, rows in zip(lanes, starts, mask[:, 0], strict=True):
            for row in range(ROWS):
                wanted = {start + row}  # one that fills up
                if row < len(lane.visible):
                    wanted = seen(lane, row, start, window, block=False)
                assert set(np.flatnonzero(rows[row]).tolist()) == wanted


@pytest.mark.parametrize("context", [0, 3])
def test_a_block_stands_behind_the_longest_context_and_no_window_hides_it_from_itself(
    context: int,
) -> None:
    lanes = [
        LaneAttention(length, np.ones((count, count), bool), length + np.arange(count))
        for length, count in ((6 + context, 4), (2, 3), (5, 0))
    ]
    starts, attention = [6, 2, 5], Attention(lanes, 2)
    call = call_of(attention, starts, context)
    assert call.written == ROWS + context
    for lane, start, rows in zip(lanes, starts, attention_mask(call, attention)[:, 0], strict=True):
        first = start + context
        for row in range(ROWS):
            wanted = {first + row}
            if row < len(lane.visible):
                wanted = seen(lane, row, first, 2, block=True)
            assert set(np.flatnonzero(rows[row]).tolist()) == wanted


def test_recurrent_layers_follow_the_call_s_own_rows() -> None:
    rng = np.random.default_rng(0)
    lanes = [random_lane(rng, 5, 0, 4), random_lane(rng, 3, 2, 2)]
    found = tree_mask(call_of(Attention(lanes), [5, 5]))
    np.testing.assert_array_equal(found[0], lanes[0].visible)
    np.testing.assert_array_equal(found[1, :2, :2], lanes[1].visible[:, 2:])
    np.testing.assert_array_equal(found[1, 2:], np.eye(4, dtype=bool)[2:])
