"""The memory of recurrent layers against the plainest model of it: for each lane the list of its
committed rows, which a state adds up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.backends.ort.recurrent import RecurrentCache
from edgespec.contract import RecurrentShape, conv_names, delta_names, state_names
from tests.unit.backends.ort.bindings import Binding, run_recurrent

SHAPE = RecurrentShape((1, 3), 1, 1, 1, 1, conv_kernel=3)
LANES, KEPT = 3, SHAPE.conv_kernel - 1

Floats = NDArray[np.float32]


class Lanes:
    """Lanes as they should be, beside the cache under test."""

    def __init__(self, seed: int = 0) -> None:
        self.cache, self.binding = RecurrentCache(SHAPE, LANES), Binding()
        self.rng = np.random.default_rng(seed)
        self.rows: list[list[float]] = [[] for _ in range(LANES)]

    def call(self, first: int, values: Floats, paths: Sequence[Sequence[int]]) -> None:
        """A call with rows `values` [B, S] over lanes from `first` on, of which `paths` are kept;
        none of a lane: its rows are dropped."""
        batch, count = values.shape
        starts = [len(self.rows[lane]) for lane in range(first, first + batch)]
        self.cache.bind(self.binding, first, starts, count)
        self.check_addresses(first)
        run_recurrent(self.binding, SHAPE.layers, values)
        self.cache.after_call(batch)
        for b, path in enumerate(paths):
            if len(path):
                self.cache.keep(first + b, np.array(path, np.int64))
                self.rows[first + b] += values[b, path].tolist()
        self.check()

    def check_addresses(self, first: int) -> None:
        """What is bound is the memory that the cache reads and writes, and no older one."""
        cache, inputs, outputs = self.cache, self.binding.inputs, self.binding.outputs
        for index, layer in enumerate(SHAPE.layers):
            names = conv_names(layer), state_names(layer), delta_names(layer)
            (conv_in, conv_out), (state_in, state_out), (taken, left) = names
            state = cache.state[index, first:].ctypes.data
            assert inputs[conv_in].address == cache.conv[index, first:].ctypes.data
            assert inputs[state_in].address == outputs[state_out].address == state
            assert outputs[conv_out].address == cache.conv_rows[index].ctypes.data
            assert outputs[left].address == cache.delta_rows[index].ctypes.data
            assert outputs[left].dims == cache.delta_rows[index].shape
            size = int(np.prod(inputs[taken].dims))
            offset = index * size * 4
            assert inputs[taken].address == cache.buffers["taken"].ctypes.data + offset

    def check(self) -> None:
        for lane, rows in enumerate(self.rows):
            self.check_lane(lane, rows)

    def check_lane(self, lane: int, rows: Sequence[float]) -> None:
        held = self.cache.read(lane)
        assert self.cache.lengths[lane] == len(rows)
        for index in range(len(SHAPE.layers)):
            total = held.state[index].sum() + held.pending[index, :, 0].sum()
            assert total == (index + 1) * sum(rows)
            last = [0.0] * KEPT + [(index + 1) * row for row in rows]
            assert held.conv[index, :, 0].tolist() == last[-KEPT:]

    def some_call(self) -> None:
        first = int(self.rng.integers(LANES))
        batch, count = int(self.rng.integers(1, LANES - first + 1)), int(self.rng.integers(1, 9))
        values = self.rng.integers(1, 99, (batch, count)).astype(np.float32)
        paths = [np.flatnonzero(self.rng.random(count) < 0.5).tolist() for _ in range(batch)]
        self.call(first, values, paths)

    def free(self) -> None:
        lane = int(self.rng.integers(LANES))
        self.cache.free(lane)
        self.rows[lane] = []

    def copy(self) -> None:
        source, target = self.rng.permutation(LANES)[:2].tolist()
        self.cache.copy_lane(source, target)
        self.rows[target] = [*self.rows[source]]

    def save(self) -> None:
        """A copy goes into another lane after its own has gone on."""
        source, target = self.rng.permutation(LANES)[:2].tolist()
        saved, rows = self.cache.read(source), [*self.rows[source]]
        self.some_call()
        self.cache.write(target, saved, len(rows))
        self.rows[target] = rows


@pytest.mark.parametrize("seed", range(6))
def test_lanes_have_taken_in_what_they_committed_whatever_happens_to_others(seed: int) -> None:
    lanes = Lanes(seed)
    for _ in range(60):
        lanes.rng.choice([lanes.some_call, lanes.some_call, lanes.free, lanes.copy, lanes.save])()
        lanes.check()


def values(*rows: Sequence[float]) -> Floats:
    return np.array(rows, np.float32)


def test_rows_wait_outside_the_state_until_the_next_call() -> None:
    lanes = Lanes()
    lanes.call(0, values([1, 2, 4, 8]), [[0, 3]])
    assert lanes.cache.state[:, 0].ravel().tolist() == [0, 0]
    assert lanes.cache.pending[0][0, :, 0].tolist() == [1, 8]
    lanes.call(0, values([16]), [[]])
    assert lanes.cache.state[:, 0].ravel().tolist() == [9, 18]
    assert lanes.cache.pending[0].shape[1] == 0


def test_rows_that_were_dropped_are_in_no_state() -> None:
    lanes = Lanes()
    lanes.call(0, values([1, 2]), [[0, 1]])
    lanes.call(0, values([5, 5, 5]), [[]])
    lanes.call(0, values([7]), [[0]])
    assert lanes.rows[0] == [1, 2, 7]


def test_a_lane_that_starts_at_the_beginning_has_forgotten_the_sequence_before() -> None:
    """Even where nobody freed it, and its state was not a number."""
    lanes = Lanes()
    lanes.call(0, values([1, 2, 4]), [[0, 1, 2]])
    lanes.cache.state[:, 0] = np.nan
    lanes.cache.conv[:, 0] = np.nan
    lanes.rows[0] = []
    lanes.call(0, values([8]), [[0]])
    lanes.call(0, values([16]), [[0]])


@pytest.mark.parametrize("start", [0, 2, 4])
def test_a_call_that_leaves_a_gap_or_goes_back_is_our_own_mistake(start: int) -> None:
    lanes = Lanes()
    lanes.call(0, values([1, 2, 4]), [[0, 1, 2]])
    if start:
        with pytest.raises(AssertionError):
            lanes.cache.bind(lanes.binding, 0, [start], 1)
    else:
        lanes.cache.bind(lanes.binding, 0, [start], 1)  # a new sequence
        assert lanes.cache.lengths[0] == 0


def test_pending_rows_of_lanes_with_fewer_are_filled_up_with_rows_of_nothing() -> None:
    """Also where the memory had other rows before."""
    lanes = Lanes()
    lanes.call(0, values([1, 2, 3, 4], [5, 6, 7, 8]), [[0, 1, 2, 3], [0, 1, 2, 3]])
    lanes.call(0, values([9, 9], [9, 9]), [[0], [0, 1]])
    lanes.call(0, values([1], [1]), [[0], []])
    lanes.call(0, values([1], [1]), [[0], [0]])


def test_nothing_is_bound_again_where_nothing_has_moved() -> None:
    lanes = Lanes()
    for _ in range(3):
        lanes.call(0, values([1, 2]), [[0]])
    before = len(lanes.binding.names)
    lanes.call(0, values([3, 4]), [[0]])
    assert len(lanes.binding.names) == before


@pytest.mark.parametrize("kept", [[0], [0, 1, 2]])
def test_what_is_bound_follows_the_number_of_pending_rows(kept: list[int]) -> None:
    lanes = Lanes()
    lanes.call(0, values([1, 2, 3]), [[0, 1]])
    lanes.call(0, values([1, 2, 3]), [kept])
    lanes.call(0, values([1, 2, 3]), [[0]])
    taken = delta_names(SHAPE.layers[0])[0]
    assert lanes.binding.inputs[taken].dims == (1, len(kept), SHAPE.row_width)


def test_buffers_that_grew_in_a_call_that_failed_are_bound_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The old memory is free: an engine that still wrote into it would write into another's."""
    lanes = Lanes()
    lanes.call(0, values([1, 2]), [[0]])
    real, made = np.empty, []

    def no_more(size: int, dtype: type) -> Floats:
        made.append(size)
        if len(made) > 1:
            raise MemoryError
        return real(size, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", no_more)
        with pytest.raises(MemoryError):
            lanes.cache.bind(lanes.binding, 0, [1], 50)
    assert len(made) == 2
    lanes.call(0, values([3, 4]), [[0]])
    lanes.call(0, values([5, 6]), [[0]])
