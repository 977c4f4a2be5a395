"""Engines for several capacities as one runner: which is in use, what moves, and what happens where
one cannot be opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from edgespec.backends.base import LaneRows, Runner
from edgespec.backends.call import Call
from edgespec.backends.tensorrt import capacities
from edgespec.backends.tensorrt.capacities import CapacityEngine, VariantRunner
from edgespec.errors import EnvironmentProblem

LANES = 3
SLOTS = {40: 64, 128: 192, 512: 576}


class Rows(LaneRows):
    """The rows of a lane, as the numbers that were written."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    nbytes, can_crop = 0, True

    def prefix(self, count: int) -> Rows:
        return Rows(self.values[:count])


@dataclass
class Device:
    """Engines that are open; at most `room` may be."""

    room: int = 3
    engines: list[Engine] = field(default_factory=list)
    refused: set[int] = field(default_factory=set)
    opened: list[int] = field(default_factory=list)


class Engine:
    """A lane is a list of the numbers that calls brought, and -1 where none did."""

    def __init__(self, device: Device, capacity: int, recurrent: bool) -> None:
        if len(device.engines) >= device.room or capacity in device.refused:
            raise EnvironmentProblem(f"no memory for {capacity}")
        device.engines.append(self)
        device.opened.append(capacity)
        self.device, self.capacity = device, capacity
        self.contract: Any = SimpleNamespace(
            shape=SimpleNamespace(recurrent=object() if recurrent else None)
        )
        self.table, self.lanes, self.engine_s = None, LANES, 0.0
        self.prefill_chunk = self.max_rows = min(capacity, 256)
        self.rows = [[-1] * SLOTS[capacity] for _ in range(LANES)]

    def run(self, call: Call) -> list[Any]:
        self.engine_s += 1
        for lane, start in enumerate(call.write_indices.tolist(), start=call.first_lane):
            assert start + call.written <= SLOTS[self.capacity]
            self.rows[lane][start : start + call.written] = range(start, start + call.written)
        return []

    def keep_rows(self, lane: int, slots: Any, start: int) -> None:
        kept = [self.rows[lane][slot] for slot in slots]
        self.rows[lane][start : start + len(kept)] = kept

    def read_rows(self, lane: int, count: int) -> Rows:
        return Rows(self.rows[lane][:count])

    def write_rows(self, lane: int, rows: LaneRows) -> None:
        assert isinstance(rows, Rows)
        self.rows[lane][: len(rows)] = rows.values

    def free(self, lane: int) -> None: ...

    def zero(self, lane: int) -> None: ...

    def copy_lane(self, source: int, target: int, count: int) -> None:
        self.rows[target][:count] = self.rows[source][:count]

    def close(self) -> None:
        self.device.engines.remove(self)


def runner_on(
    device: Device, *, recurrent: bool = False, capacities: tuple[int, ...] = (512, 40, 128)
) -> VariantRunner:
    def opening(capacity: int) -> Callable[[], Runner]:
        return lambda: cast(Runner, Engine(device, capacity, recurrent))

    return VariantRunner([CapacityEngine(c, SLOTS[c], 0, opening(c)) for c in capacities])


def write(runner: VariantRunner, lane: int, start: int, count: int, **extras: object) -> None:
    """A call of one lane."""
    call = SimpleNamespace(
        write_indices=np.array([start]), written=count, first_lane=lane, extras=dict(extras)
    )
    runner.run(cast(Call, call))


def commit(runner: VariantRunner, lane: int, count: int) -> None:
    runner.keep_rows(lane, np.arange(count), 0)


def test_the_smallest_is_opened_first_and_others_when_they_are_needed() -> None:
    device = Device()
    runner = runner_on(device)
    assert (runner.capacity, runner.in_use, device.opened) == (512, 40, [40])
    runner.reserve(0, 41)
    assert (runner.in_use, device.opened) == (128, [40, 128])
    runner.reserve(0, 40)
    runner.reserve(0, 128)
    assert (runner.in_use, device.opened) == (128, [40, 128])
    runner.reserve(0, 100_000)  # the answer ends at the capacity
    assert runner.in_use == 512
    assert runner.prefill_chunk == 256


def test_lanes_move_with_what_was_written() -> None:
    runner = runner_on(Device())
    runner.reserve(0, 40)
    write(runner, 0, 0, 10)
    commit(runner, 0, 10)
    write(runner, 0, 10, 5)  # a tree that is not committed
    runner.reserve(1, 100)
    assert cast(Rows, runner.read_rows(0, 15)).values == list(range(15))


def test_recurrent_layers_take_along_what_is_committed() -> None:
    runner = runner_on(Device(), recurrent=True)
    write(runner, 0, 0, 10)
    commit(runner, 0, 10)
    write(runner, 0, 10, 5)
    assert {lane: len(rows) for lane, rows in runner.copies().items()} == {0: 10}


def test_the_longest_lane_decides_and_its_end_lets_the_others_go_back() -> None:
    device = Device()
    runner = runner_on(device)
    runner.reserve(0, 30)
    write(runner, 0, 0, 8)
    commit(runner, 0, 8)
    runner.reserve(1, 500)
    assert runner.in_use == 512
    runner.reserve(2, 60)
    assert runner.in_use == 512
    runner.free(2)
    assert runner.in_use == 512
    runner.free(1)
    assert runner.in_use == 40
    assert cast(Rows, runner.read_rows(0, 8)).values == list(range(8))
    runner.free(0)  # nothing runs: the next request decides
    assert runner.in_use == 40
    assert device.opened == [40, 512]


def test_nothing_is_opened_to_go_back() -> None:
    device = Device()
    runner = runner_on(device)
    runner.reserve(0, 100)
    runner.reserve(1, 500)
    runner.close_idle()
    runner.free(1)
    assert runner.in_use == 512
    assert [engine.capacity for engine in device.engines] == [512]


def test_a_lane_that_was_copied_asks_for_what_it_asked_for() -> None:
    runner = runner_on(Device())
    runner.reserve(0, 30)
    runner.reserve(1, 100)
    write(runner, 1, 0, 6)
    commit(runner, 1, 6)
    runner.copy_lane(1, 0, 6)
    runner.free(1)
    assert runner.in_use == 128
    runner.free(0)
    runner.reserve(0, 10)
    assert runner.in_use == 40


def test_a_call_without_a_reservation_finds_a_larger_engine() -> None:
    runner = runner_on(Device())
    write(runner, 0, 0, 60)  # within the slots of the smallest
    commit(runner, 0, 60)
    assert runner.in_use == 40
    write(runner, 0, 60, 10)
    assert runner.in_use == 128
    assert cast(Rows, runner.read_rows(0, 70)).values == list(range(70))
    runner.write_rows(1, Rows([*range(200)]))
    assert runner.in_use == 512
    assert cast(Rows, runner.read_rows(0, 70)).values == list(range(70))
    assert cast(Rows, runner.read_rows(1, 200)).values == list(range(200))


def test_seconds_are_those_of_all_engines() -> None:
    runner = runner_on(Device(room=1))
    write(runner, 0, 0, 5)
    runner.reserve(0, 100)
    write(runner, 0, 5, 5)
    assert runner.engine_s == 2


# ---- where memory is short


def test_idle_engines_are_closed_for_one_that_is_needed() -> None:
    device = Device(room=2)
    runner = runner_on(device)
    runner.reserve(0, 100)
    runner.reserve(0, 500)
    assert [engine.capacity for engine in device.engines] == [128, 512]


def test_the_engine_in_use_is_closed_where_there_is_room_for_one() -> None:
    device = Device(room=1)
    runner = runner_on(device)
    write(runner, 0, 0, 9)
    commit(runner, 0, 9)
    runner.reserve(1, 500)
    assert [engine.capacity for engine in device.engines] == [512]
    assert cast(Rows, runner.read_rows(0, 9)).values == list(range(9))


def test_an_engine_stays_open_whose_hidden_states_a_call_reads() -> None:
    device = Device(room=1)
    runner = runner_on(device)
    write(runner, 0, 0, 60)
    commit(runner, 0, 60)
    with pytest.raises(EnvironmentProblem, match="no memory for 128"):
        write(runner, 0, 60, 10, draft_hidden=[object()])
    assert [engine.capacity for engine in device.engines] == [40]
    write(runner, 0, 60, 10)
    assert [engine.capacity for engine in device.engines] == [128]


def test_where_an_engine_cannot_be_opened_the_others_go_on() -> None:
    device = Device(refused={512})
    runner = runner_on(device)
    runner.reserve(0, 30)
    write(runner, 0, 0, 9)
    commit(runner, 0, 9)
    with pytest.raises(EnvironmentProblem, match="no memory for 512"):
        runner.reserve(1, 500)
    assert runner.in_use == 40
    assert cast(Rows, runner.read_rows(0, 9)).values == list(range(9))
    runner.reserve(1, 100)
    assert runner.in_use == 128


def test_lanes_are_lost_where_no_engine_can_be_opened_again() -> None:
    device = Device(refused={512})
    runner = runner_on(device)
    device.refused = {40, 128, 512}
    with pytest.raises(EnvironmentProblem):
        runner.reserve(0, 500)
    with pytest.raises(EnvironmentProblem, match="cannot be opened again"):
        write(runner, 0, 0, 1)
    runner.free(0)
    with pytest.raises(EnvironmentProblem, match="no memory for 40"):
        runner.reserve(0, 30)
    device.refused = {512}
    runner.reserve(0, 30)
    write(runner, 0, 0, 1)
    runner.close()


def test_little_memory_of_the_machine_closes_idle_engines_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    runner = runner_on(device)
    runner.reserve(0, 100)
    monkeypatch.setattr(capacities, "available_bytes", lambda: -1)
    runner.reserve(0, 500)
    assert [engine.capacity for engine in device.engines] == [128, 512]


def test_all_are_closed_once() -> None:
    device, ended = Device(), list[str]()
    runner = runner_on(device)
    runner.closing = lambda: ended.append("device")
    runner.reserve(0, 500)
    runner.close()
    runner.close()
    assert (device.engines, ended) == ([], ["device"])
