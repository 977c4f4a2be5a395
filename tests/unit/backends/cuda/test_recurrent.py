"""What recurrent layers remember on a device is what a sequence of its own remembers, whatever
other lanes do: in batches of any lanes, after rejected trees, copies and new beginnings."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from edgespec.backends.cuda.bound import Bound
from edgespec.backends.cuda.recurrent import RecurrentCache, SavedState
from edgespec.backends.cuda.workspace import Workspace
from edgespec.contract import RecurrentShape
from tests.tensorrt_simulator.cpu_kernels import made_device
from tests.tensorrt_simulator.device import HostDevice

LANES, ROWS = 3, 6


def shape_of(key_dim: int) -> RecurrentShape:
    return RecurrentShape((1, 4), 1, 1, key_dim, 16, 4)


@dataclass
class Sequence:
    """What a lane ought to remember: all rows that were committed, by layer; of those the state has
    taken in all but the pending ones."""

    rows: list[float] = field(default_factory=list)
    pending: int = 0


@dataclass
class Bench:
    """A cache, an engine that adds rows to states, and what each lane ought to hold. A row is known
    by one number, which all its parts repeat; a layer adds its own."""

    device: HostDevice
    cache: RecurrentCache
    lanes: list[Sequence]
    rng: np.random.Generator

    def at(self, bound: Bound) -> np.ndarray:
        assert bound.shape is not None
        size = 4 * int(np.prod(bound.shape))
        return self.device.at(bound.address, size).view(np.float32).reshape(bound.shape)

    def call(self, first: int, batch: int, rows: int) -> np.ndarray:
        """A call over lanes; the numbers of its rows [batch, rows]. What it reads is checked."""
        cache, lanes = self.cache, self.lanes[first : first + batch]
        taken = cache.prepare(first, [len(lane.rows) for lane in lanes], rows)
        numbers = self.rng.integers(1, 1000, (batch, rows)).astype(np.float32)
        bound = {one.name: one for one in cache.bound(batch, taken)}
        cache.workspace.synchronize()
        for index, layer in enumerate(cache.shape.layers):
            state = self.at(bound[f"recurrent_state_{layer}"])
            conv = self.at(bound[f"conv_state_{layer}"])
            pending = self.at(bound[f"committed_rows_{layer}"])
            assert pending.shape[1] == taken
            for i, lane in enumerate(lanes):
                done = len(lane.rows) - lane.pending
                assert (state[i] == sum(lane.rows[:done]) + index * done).all()
                new = [number + index for number in lane.rows[done:]]
                assert pending[i, :, 0].tolist() == new + [0.0] * (taken - len(new))
                last = [0.0] * cache.kept + [number + index for number in lane.rows]
                assert conv[i, :, 0].tolist() == last[-cache.kept :]
            after = bound[f"present_recurrent_state_{layer}"]
            assert after.address != bound[f"recurrent_state_{layer}"].address
            self.write(after.address, state + pending[:, :, 0].sum(1)[:, None, None, None])
            shape = cache.shape
            for name, width in (("conv_rows", shape.conv_width), ("delta_rows", shape.row_width)):
                made = np.repeat(numbers[:, :, None] + index, width, 2)
                self.write(bound[f"{name}_{layer}"].address, made)
        cache.after_call(batch)
        cache.workspace.synchronize()
        for lane in lanes:
            lane.pending = 0
        return numbers

    def write(self, address: int, array: np.ndarray) -> None:
        raw = np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint8)
        self.device.at(address, raw.nbytes)[:] = raw

    def keep(self, lane: int, path: list[int], numbers: np.ndarray) -> None:
        self.cache.keep(lane, np.array(path, np.int64))
        own = self.lanes[lane]
        own.rows += numbers[path].tolist()
        own.pending = len(path)


@pytest.fixture(params=["simulated", "source"])
def device(request: pytest.FixtureRequest) -> HostDevice:
    return made_device(request.param)


# States of whole alignments stand side by side; others are gathered for a call of several lanes
@pytest.mark.parametrize("key_dim", [16, 5], ids=["side by side", "apart"])
@pytest.mark.parametrize("lanes", [1, LANES])
def test_lanes_remember_what_they_would_alone(device: HostDevice, key_dim: int, lanes: int) -> None:
    workspace = Workspace(device)
    workspace.join()
    cache = RecurrentCache(workspace, shape_of(key_dim), lanes, ROWS)
    assert cache.tensors["state"].has_gaps == (key_dim == 5)
    rng = np.random.default_rng(key_dim)
    bench = Bench(device, cache, [Sequence() for _ in range(lanes)], rng)
    saved: list[tuple[SavedState, Sequence]] = []
    for _ in range(60):
        first = int(rng.integers(lanes))
        batch, rows = int(rng.integers(1, lanes - first + 1)), int(rng.integers(1, ROWS + 1))
        for _ in range(rng.integers(1, 3)):  # a call whose rows are all rejected comes before
            numbers = bench.call(first, batch, rows)
        for i in range(batch):
            path = np.flatnonzero(rng.random(rows) < 0.6).tolist()
            bench.keep(first + i, path, numbers[i])
        lane, other = (int(rng.integers(lanes)) for _ in range(2))
        own, chance = bench.lanes[lane], rng.random()
        copy = Sequence([*own.rows], own.pending)
        if chance < 0.1:
            cache.free(lane)
            bench.lanes[lane] = Sequence()
        elif chance < 0.3:
            saved.append((cache.read(lane), copy))
        elif chance < 0.5 and saved:
            state, of = saved[rng.integers(len(saved))]
            cache.write(lane, state, len(of.rows))
            bench.lanes[lane] = Sequence([*of.rows], of.pending)
        elif chance < 0.7 and other != lane:
            cache.copy_lane(lane, other)
            bench.lanes[other] = copy
    bench.call(0, lanes, 1)
    cache.close()
    saved.clear()
    workspace.leave()
    assert not device.memory
