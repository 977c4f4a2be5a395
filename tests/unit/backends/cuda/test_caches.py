"""Rows of keys and values on a device: moved, appended, copied out and back, and zeros before."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from edgespec.backends.cuda.caches import KvCache, RowTable
from edgespec.backends.cuda.kernels import MAX_MOVES
from edgespec.backends.cuda.workspace import Buffer, Workspace
from tests.tensorrt_simulator.cpu_kernels import made_device
from tests.tensorrt_simulator.device import HostDevice

TENSORS, LANES, HEADS, SLOTS, DIM = 4, 2, 3, 320, 8
SHAPE = (TENSORS, LANES, HEADS, SLOTS, DIM)


@pytest.fixture(params=["simulated", "source"])
def workspace(request: pytest.FixtureRequest) -> Iterator[Workspace]:
    made = Workspace(made_device(request.param))
    made.join()
    yield made
    made.leave()


def cache_of(workspace: Workspace, dtype: type = np.float16) -> tuple[KvCache, np.ndarray]:
    """A cache, and a view of its memory."""
    row = DIM * np.dtype(dtype).itemsize
    cache = KvCache(workspace, TENSORS, LANES, HEADS, SLOTS, row)
    workspace.synchronize()
    assert isinstance(workspace.device, HostDevice)
    memory = workspace.device.at(cache.memory, int(np.prod(SHAPE)) * np.dtype(dtype).itemsize)
    return cache, memory.view(dtype).reshape(SHAPE)


def filled(workspace: Workspace) -> tuple[KvCache, np.ndarray, np.ndarray]:
    """A cache of random rows, its view, and a copy of it."""
    cache, view = cache_of(workspace)
    view[:] = np.random.default_rng(0).standard_normal(SHAPE)
    return cache, view, view.copy()


def test_a_cache_begins_with_zeros(workspace: Workspace) -> None:
    _, view = cache_of(workspace)
    assert not view.any()


@pytest.mark.parametrize(
    "slots", [[7, 9, 12], [5, 6, 7], [6, 7, 8], [5, 7, 8], list(range(6, 6 + 2 * MAX_MOVES))]
)
def test_accepted_rows_move_in_all_layers_of_one_lane(
    workspace: Workspace, slots: list[int]
) -> None:
    cache, view, before = filled(workspace)
    cache.keep(1, np.array(slots), 5)
    workspace.synchronize()
    expected = before.copy()
    expected[:, 1, :, 5 : 5 + len(slots)] = before[:, 1][:, :, slots]
    assert (view == expected).all()


def test_rows_that_stand_right_are_left_alone(workspace: Workspace) -> None:
    cache, _, _ = filled(workspace)
    assert isinstance(workspace.device, HostDevice)
    cache.keep(0, np.array([5, 6, 7]), 5)
    assert not workspace.device.launched


@pytest.mark.parametrize("dim", [DIM, 3])  # by 16 bytes at a time, and by 2
def test_an_engines_rows_are_appended(workspace: Workspace, dim: int) -> None:
    dims, rows = (TENSORS, LANES, HEADS, SLOTS, dim), 6
    cache = KvCache(workspace, *dims[:4], dim * 2)
    given = np.random.default_rng(1).standard_normal((TENSORS, LANES, HEADS, rows, dim))
    given = given.astype(np.float16)
    buffers = [Buffer(workspace) for _ in range(TENSORS)]
    assert isinstance(workspace.device, HostDevice)
    for buffer, array in zip(buffers, given, strict=True):
        buffer.fit(array.nbytes)
        workspace.synchronize()
        workspace.device.at(buffer.address, array.nbytes)[:] = array.reshape(-1).view(np.uint8)
    table = workspace.table([buffer.address for buffer in buffers])
    head = rows * dim * 2
    cache.append(1, 17, RowTable(table, head, HEADS * head), rows)
    workspace.synchronize()
    expected = np.zeros(dims, np.float16)
    expected[:, 1, :, 17 : 17 + rows] = given[:, 1]
    stride = cache.tensor_bytes
    for tensor in range(TENSORS):
        at = cache.memory + tensor * stride
        found = workspace.device.at(at, expected[tensor].nbytes).view(np.float16)
        assert (found.reshape(dims[1:]) == expected[tensor]).all()


def test_a_lane_is_copied_out_cropped_and_put_into_another(workspace: Workspace) -> None:
    cache, view, before = filled(workspace)
    kept = cache.read(0, 9)
    cache.zero(0)
    cache.write(1, kept.prefix(7))
    workspace.synchronize()
    assert not view[:, 0].any()
    assert (view[:, 1, :, :7] == before[:, 0, :, :7]).all()
    assert (view[:, 1, :, 7:] == before[:, 1, :, 7:]).all()
    assert (len(kept), len(kept.prefix(7)), kept.can_crop) == (9, 7, True)
    assert kept.nbytes == TENSORS * HEADS * 9 * DIM * 2


def test_a_copy_ends_with_its_last_reference(workspace: Workspace) -> None:
    cache, _, _ = filled(workspace)
    assert isinstance(workspace.device, HostDevice)
    count = len(workspace.device.memory)
    kept = cache.read(0, 9)
    cropped = kept.prefix(3)
    del kept
    gc.collect()
    assert len(workspace.device.memory) == count + 1
    del cropped
    gc.collect()
    cache.read(0, 1)  # asks for memory: what is dropped goes back before
    assert len(workspace.device.memory) == count + 1


def test_one_lane_becomes_another(workspace: Workspace) -> None:
    cache, view, before = filled(workspace)
    cache.copy_lane(1, 0, 5)
    workspace.synchronize()
    assert (view[:, 0, :, :5] == before[:, 1, :, :5]).all()
    assert (view[:, 0, :, 5:] == before[:, 0, :, 5:]).all()
