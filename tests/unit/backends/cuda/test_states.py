"""Hidden states on a device: rows are taken and joined there, NaN is found, and memory comes from a
stock."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from edgespec.backends.cuda import kernels
from edgespec.backends.cuda.device.base import DeviceMemoryFull
from edgespec.backends.cuda.states import DTYPES, KINDS, DeviceStates, put
from edgespec.backends.cuda.workspace import Workspace
from edgespec.backends.host import HostStates
from tests.tensorrt_simulator.cpu_kernels import made_device
from tests.tensorrt_simulator.device import HostDevice

WIDTH = 24


@pytest.fixture(params=["simulated", "source"])
def workspace(request: pytest.FixtureRequest) -> Iterator[Workspace]:
    made = Workspace(made_device(request.param))
    made.join()
    yield made
    made.leave()


def states_of(workspace: Workspace, array: np.ndarray, dtype: str = "float16") -> DeviceStates:
    """These rows on the device, as an engine's output."""
    address = workspace.alloc(max(1, array.size * DTYPES[dtype].itemsize))
    put(HostStates(array.astype(np.float32)), workspace, address, dtype)
    return DeviceStates(workspace, address, *array.shape, dtype, known_finite=False)


def rows(count: int) -> np.ndarray:
    return np.arange(count * WIDTH, dtype=np.float32).reshape(count, WIDTH)


@pytest.mark.parametrize("dtype", KINDS)
def test_rows_are_taken_in_the_order_given(workspace: Workspace, dtype: str) -> None:
    found = states_of(workspace, rows(5) / 4, dtype)
    taken = found.take(np.array([4, 0, 0, 2]))
    assert (len(taken), taken.nbytes) == (4, 4 * WIDTH * DTYPES[dtype].itemsize)
    expected = (rows(5) / 4).astype(DTYPES[dtype]).astype(np.float32)
    assert (taken.numpy() == expected[[4, 0, 0, 2]]).all()


def test_rows_wider_than_a_block_copies_at_once(workspace: Workspace) -> None:
    array = np.random.default_rng(0).standard_normal((4, 3001), np.float32)
    found = states_of(workspace, array, "float32")
    assert (found.take(np.array([3, 1])).numpy() == array[[3, 1]]).all()


def test_neighboring_rows_are_one_copy(workspace: Workspace) -> None:
    found = states_of(workspace, rows(9))
    assert (found.take(np.arange(2, 7)).numpy() == rows(9)[2:7]).all()
    assert isinstance(workspace.device, HostDevice)
    assert not workspace.device.launched


def test_more_rows_than_one_launch_moves(workspace: Workspace) -> None:
    count = 2 * kernels.MAX_MOVES + 3
    found = states_of(workspace, rows(count), "float32")
    order = np.arange(count)[::-1]
    assert (found.take(order).numpy() == rows(count)[order]).all()


def test_rows_are_joined_with_those_of_the_host_too(workspace: Workspace) -> None:
    first, other = states_of(workspace, rows(2)), states_of(workspace, rows(3) + 1)
    joined = first.joined([other, HostStates(rows(1) + 2), first.take(np.arange(0))])
    assert (joined.numpy() == np.concatenate([rows(2), rows(3) + 1, rows(1) + 2])).all()


def test_a_copy_outlives_what_it_was_taken_of(workspace: Workspace) -> None:
    found = states_of(workspace, rows(2))
    taken = found.take(np.array([1]))
    put(HostStates(rows(2) * 0), workspace, found.address, "float16")
    assert (taken.numpy() == rows(2)[1:]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_found(workspace: Workspace, bad: float) -> None:
    array = rows(3)
    array[1, 7] = bad
    found = states_of(workspace, array)
    assert not found.finite()
    assert found.take(np.array([0, 2])).finite()
    assert not found.joined([found]).finite()


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 65000.0])
def test_the_kernel_finds_it_in_its_lane(workspace: Workspace, dtype: str, bad: float) -> None:
    array = np.zeros((3, WIDTH), np.float32)
    array[1, 5] = bad
    found = states_of(workspace, array, dtype)
    flags = workspace.alloc(12)
    workspace.device.zero(flags, 12, workspace.stream)
    values = {"values": found.address, "flags": flags, "count": WIDTH, "kind": KINDS[dtype]}
    workspace.launch("not_finite", (2, 1, 3), kernels.THREADS, **values)
    workspace.synchronize()
    assert isinstance(workspace.device, HostDevice)
    said = workspace.device.at(flags, 12).view(np.int32).tolist()
    assert said == [0, int(bad != 65000.0), 0]


def test_memory_that_nobody_borrows_goes_back_where_there_is_no_other(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = states_of(workspace, rows(4))
    kept = found.take(np.arange(2))
    address = found.take(np.arange(3)).address
    gc.collect()
    device = workspace.device
    assert isinstance(device, HostDevice)
    assert address in device.memory
    held = sum(size for _, size in device.memory.values())
    monkeypatch.setattr(device, "limit", held)
    with pytest.raises(DeviceMemoryFull):
        workspace.alloc(held)
    assert address not in device.memory
    workspace.alloc(64)
    assert (kept.numpy() == rows(2)).all()


def test_memory_of_rows_is_used_again(workspace: Workspace) -> None:
    found = states_of(workspace, rows(4))
    assert isinstance(workspace.device, HostDevice)
    address = found.take(np.arange(3)).address
    gc.collect()
    count = len(workspace.device.memory)
    again = found.take(np.arange(3))
    assert again.address == address
    assert len(workspace.device.memory) == count
