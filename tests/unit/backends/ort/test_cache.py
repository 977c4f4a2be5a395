"""The KV cache against the plainest model of it: a list of rows for each lane."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.backends.ort.cache import KvCache, close_stride
from edgespec.contract import GraphShape, Role, canonical_contract

SHAPE = GraphShape(Role.LLM, 8, 2, 3, 4, 4, vocab_size=5)
LANES, SLOTS = 3, 900

Floats = NDArray[np.float32]


class Lanes:
    """Lanes as they should be, beside the cache under test."""

    def __init__(self, seed: int) -> None:
        self.cache = KvCache(SHAPE, LANES, SLOTS, following=True)
        self.rng = np.random.default_rng(seed)
        self.rows: list[Floats] = [self.made(0) for _ in range(LANES)]  # [2*layers, Hkv, count, D]

    def made(self, count: int) -> Floats:
        return self.rng.standard_normal((4, 3, count, 4), np.float32)

    def call(self, longest: int) -> None:
        """A call over neighbouring lanes; somewhere in each lane's rows it begins to write."""
        first = int(self.rng.integers(LANES))
        batch, count = (
            int(self.rng.integers(1, LANES - first + 1)),
            int(self.rng.integers(1, longest)),
        )
        starts = [
            int(self.rng.integers(min(self.rows[lane].shape[2], SLOTS - count) + 1))
            for lane in range(LANES)
        ]
        starts = starts[first : first + batch]
        self.cache.reserve(first, starts, count, max(starts) + count)
        for lane, start in enumerate(starts, first):
            new = self.made(count)
            self.cache.slab[:, lane, :, start : start + count] = new
            self.rows[lane] = np.concatenate([self.rows[lane][:, :, :start], new], axis=2)

    def write(self, longest: int) -> None:
        lane, new = int(self.rng.integers(LANES)), self.made(int(self.rng.integers(longest)))
        self.cache.write_rows(lane, new)
        self.rows[lane] = new

    def copy(self, longest: int) -> None:
        source, target = self.rng.permutation(LANES)[:2].tolist()
        count = int(self.rng.integers(self.rows[source].shape[2] + 1))
        self.cache.copy_lane(source, target, count)
        self.rows[target] = self.rows[source][:, :, :count].copy()

    def move(self, longest: int) -> None:
        lane = int(self.rng.integers(LANES))
        count = self.rows[lane].shape[2]
        if count == 0:
            return
        start = int(self.rng.integers(count))
        chosen = start + np.flatnonzero(self.rng.random(count - start) < 0.5)
        self.cache.move_rows(lane, chosen, start)
        self.rows[lane][:, :, start : start + len(chosen)] = self.rows[lane][:, :, chosen]

    def check(self) -> None:
        for lane, rows in enumerate(self.rows):
            np.testing.assert_array_equal(self.cache.read_rows(lane, rows.shape[2]), rows)


@pytest.mark.parametrize("seed", range(8))
def test_lanes_keep_their_rows_whatever_happens_to_others(seed: int) -> None:
    lanes = Lanes(seed)
    strides = set()
    for longest in (10, 300, 10):  # long ones come and go
        for _ in range(40):
            lanes.rng.choice([lanes.call, lanes.write, lanes.copy, lanes.move])(longest)
            lanes.check()
            strides.add(lanes.cache.stride)
    assert len(strides) > 3


def test_the_stride_follows_the_longest_lane_up_and_down() -> None:
    cache = KvCache(SHAPE, LANES, SLOTS, following=True)
    strides = []
    for count in (1, 40, 200, 700, 880, 10):
        cache.write_rows(1, np.ones((4, 3, count, 4), np.float32))
        strides.append(cache.stride)
    assert strides == [32, 64, 256, 800, 900, 32]


def test_a_long_lane_that_is_emptied_holds_the_stride_no_longer() -> None:
    cache = KvCache(SHAPE, LANES, SLOTS, following=True)
    cache.write_rows(0, np.ones((4, 3, 700, 4), np.float32))
    cache.write_rows(1, np.ones((4, 3, 5, 4), np.float32))
    assert cache.stride > 700
    cache.write_rows(0, np.ones((4, 3, 0, 4), np.float32))
    assert cache.stride == close_stride(5, SLOTS)
    np.testing.assert_array_equal(cache.read_rows(1, 5), 1.0)


def test_no_row_of_another_lane_is_left_where_the_stride_changed() -> None:
    """A NaN in one sequence must not reach another: standard Attention multiplies before it
    masks."""
    cache = KvCache(SHAPE, LANES, SLOTS, following=True)
    cache.write_rows(0, np.full((4, 3, 20, 4), np.nan, np.float32))
    for count in (300, 5):
        cache.write_rows(2, np.ones((4, 3, count, 4), np.float32))
        assert np.isfinite(cache.slab[:, 1:]).all()
        assert np.isnan(cache.slab[:, 0, :, :20]).all()
        assert np.isfinite(cache.slab[:, 0, :, 20:]).all()


def test_rows_of_a_lane_that_hold_nan_are_zeros_again_and_no_others() -> None:
    cache = KvCache(SHAPE, LANES, SLOTS, following=True)
    for lane in range(LANES):
        cache.write_rows(lane, np.full((4, 3, 20, 4), lane + 1, np.float32))
    cache.slab[:, 1, :, 5:30] = np.nan
    cache.zero(1)
    assert not cache.slab[:, 1].any()
    assert cache.extents == [20, 0, 20]
    for lane in (0, 2):
        np.testing.assert_array_equal(cache.read_rows(lane, 20), lane + 1)


def test_rows_that_were_read_stay_as_they_were_when_the_lane_goes_on() -> None:
    cache = KvCache(SHAPE, LANES, SLOTS, following=True)
    cache.write_rows(0, np.ones((4, 3, 5, 4), np.float32))
    kept = cache.read_rows(0, 5)
    cache.write_rows(0, np.full((4, 3, 9, 4), 2, np.float32))
    np.testing.assert_array_equal(kept, 1.0)


def test_a_freed_lane_holds_the_stride_no_longer_and_its_rows_are_not_read() -> None:
    cache = KvCache(SHAPE, LANES, SLOTS, following=True)
    cache.write_rows(0, np.ones((4, 3, 700, 4), np.float32))
    cache.free(0)
    cache.write_rows(1, np.ones((4, 3, 5, 4), np.float32))
    assert cache.stride == close_stride(5, SLOTS)
    with pytest.raises(AssertionError):
        cache.read_rows(0, 1)


def test_a_cache_that_does_not_follow_is_as_wide_as_its_slots() -> None:
    cache = KvCache(SHAPE, 1, SLOTS, following=False)
    cache.write_rows(0, np.ones((4, 3, 5, 4), np.float32))
    assert cache.slab.shape == (4, 1, 3, SLOTS, 4)


def test_rows_that_were_given_up_are_not_read() -> None:
    cache = KvCache(SHAPE, LANES, SLOTS, following=True)
    cache.write_rows(0, np.ones((4, 3, 9, 4), np.float32))
    cache.reserve(0, [3], 2, 5)
    with pytest.raises(AssertionError):
        cache.read_rows(0, 6)
    with pytest.raises(AssertionError):
        cache.copy_lane(0, 1, 6)


def test_the_bytes_told_are_the_bytes_taken() -> None:
    assert (
        LANES * SLOTS * canonical_contract(SHAPE).kv_bytes_per_token
        == KvCache(SHAPE, LANES, SLOTS, following=True).memory.nbytes
    )
