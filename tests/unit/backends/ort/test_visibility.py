"""What TreeAttention reads says the same as the mask of the same call."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.backends.call import Attention, Call, LaneAttention
from edgespec.backends.masks import attention_mask
from edgespec.backends.ort.visibility import Visibility, visibility

Bits = NDArray[np.bool_]


def empty_call(rows: int, starts: list[int], context: int = 0, block: bool = False) -> Call:
    """A call without numbers."""
    none = np.empty((len(starts), rows, 0), np.float32)
    behind = np.empty((len(starts), context, 0), np.float32)
    return Call(
        none,
        none,
        none,
        Attention([]),
        np.array(starts, np.int64),
        [np.zeros(0, np.int64)] * len(starts),
        {"context_cos": behind} if block else {},
    )


def mask_of(seen: Visibility, slots: int) -> Bits:
    """[B, S, T] as the kernel reads a visibility: by position."""
    batch, rows = seen.first.shape
    out = np.zeros((batch, rows, slots), bool)
    for b in range(batch):
        for row in range(rows):
            if not seen.visible[b, row].any():
                continue
            behind = seen.lengths[b] + np.flatnonzero(seen.visible[b, row])
            path = np.concatenate([np.arange(seen.lengths[b]), behind])
            out[b, row, path[seen.first[b, row] :]] = True
    return out


@st.composite
def lanes(draw: st.DrawFn, rows: int) -> tuple[LaneAttention, int]:
    """A lane whose rows are nodes of a tree, some of which an earlier call has left in scratch
    slots; and the slot that the call begins at, which may leave a gap."""
    length, scratch = draw(st.integers(0, 9)), draw(st.integers(0, 4))
    count = draw(st.integers(1, rows))
    visible = np.zeros((scratch + count, scratch + count), bool)
    depth = np.zeros(scratch + count, np.int64)
    for node in range(scratch + count):
        parent = draw(st.integers(-1, node - 1)) if node else -1
        if parent >= 0:
            visible[node], depth[node] = visible[parent], depth[parent] + 1
        visible[node, node] = True
    gap = draw(st.integers(0, 3))
    return LaneAttention(length, visible[scratch:], length + depth), length + scratch + gap


@given(data=st.data(), window=st.one_of(st.none(), st.integers(1, 12)))
def test_rows_see_what_the_mask_shows(data: st.DataObject, window: int | None) -> None:
    rows = data.draw(st.integers(1, 6))
    some = data.draw(st.lists(lanes(rows), min_size=1, max_size=3))
    starts = [start for _, start in some]
    attention, call = Attention([lane for lane, _ in some], window), empty_call(rows, starts)
    mask = attention_mask(call, attention)[:, 0]
    seen = visibility(call, attention)
    found = mask_of(seen, mask.shape[2])
    for own, lane, wanted in zip(found, attention.lanes, mask, strict=True):
        count = len(lane.visible)
        np.testing.assert_array_equal(own[:count], wanted[:count])
        assert not own[count:].any()  # a row that fills up: its output is zero


@given(data=st.data(), window=st.one_of(st.none(), st.integers(1, 12)), causal=st.booleans())
def test_rows_of_a_block_are_not_hidden_from_each_other(
    data: st.DataObject, window: int | None, causal: bool
) -> None:
    context, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    starts = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    visible = np.tri(rows, dtype=bool) if causal else np.ones((rows, rows), bool)
    own = [
        LaneAttention(start + context, visible, start + context + np.arange(rows))
        for start in starts
    ]
    call, attention = empty_call(rows, starts, context, block=True), Attention(own, window)
    mask = attention_mask(call, attention)[:, 0]
    np.testing.assert_array_equal(mask_of(visibility(call, attention), mask.shape[2]), mask)


def test_what_is_read_is_no_wider_than_what_stands_behind_the_prefix() -> None:
    """A long prefix costs nothing."""
    tree = LaneAttention(100_000, np.tri(4, dtype=bool), 100_000 + np.arange(4))
    seen = visibility(empty_call(4, [100_000]), Attention([tree]))
    assert seen.visible.shape == (1, 4, 4)
