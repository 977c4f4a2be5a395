"""A CUDA device by each Python package: memory, streams, events, graphs, errors. On a device where
there is one, and on the stand-in of a driver."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from edgespec.backends.cuda import kernels
from edgespec.backends.cuda.device.base import (
    ALIGNMENT,
    Device,
    DeviceLost,
    DeviceMemoryFull,
    DeviceProblem,
)
from edgespec.backends.cuda.workspace import Workspace
from tests.tensorrt.cuda import device, down, get, put, workspace

__all__ = ["device", "workspace"]

pytestmark = pytest.mark.gpu


def still_works(workspace: Workspace) -> bool:
    """Whether bytes go there and back."""
    array = np.arange(300, dtype=np.uint8)
    return bool((get(workspace, put(workspace, array), (300,), np.uint8) == array).all())


# ---- memory


@pytest.mark.parametrize("size", [1, 255, 4097, 3 << 20])
def test_bytes_go_there_and_back(workspace: Workspace, size: int) -> None:
    array = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    address = put(workspace, array)
    assert address % ALIGNMENT == 0
    assert (down(workspace, address, size) == array).all()
    other = workspace.alloc(size)
    workspace.device.copy(other, address, size, workspace.stream)
    assert (down(workspace, other, size) == array).all()
    workspace.device.zero(other + size // 2, size - size // 2, workspace.stream)
    found = down(workspace, other, size)
    assert (found[: size // 2] == array[: size // 2]).all()
    assert not found[size // 2 :].any()


def test_a_part_of_a_page_locked_block_is_copied(workspace: Workspace) -> None:
    device, stream = workspace.device, workspace.stream
    block = device.pinned(100)
    block.array[:] = np.arange(100)
    address = workspace.alloc(100)
    device.zero(address, 100, stream)
    device.upload(address + 7, block.address + 20, 5, stream)
    device.download(block.address + 50, address, 20, stream)
    workspace.synchronize()
    assert block.array[50:70].tolist() == [0] * 7 + [20, 21, 22, 23, 24] + [0] * 8
    assert block.array[:50].tolist() == list(range(50))
    device.free_pinned(block)


@pytest.mark.parametrize(("width", "height"), [(8, 6), (1, 3), (31, 1), (32, 6)])
def test_pieces_are_copied_with_their_pitches(
    workspace: Workspace, width: int, height: int
) -> None:
    rows = np.arange(6 * 32, dtype=np.uint8).reshape(6, 32)
    source, target = put(workspace, rows), workspace.alloc(6 * 40)
    workspace.device.zero(target, 240, workspace.stream)
    workspace.device.copy_2d(target, 40, source, 32, width, height, workspace.stream)
    expected = np.zeros((6, 40), np.uint8)
    expected[:height, :width] = rows[:height, :width]
    assert (get(workspace, target, (6, 40), np.uint8) == expected).all()


def test_memory_that_the_device_does_not_have(workspace: Workspace) -> None:
    with pytest.raises(DeviceMemoryFull, match="out of memory"):
        workspace.alloc(1 << 50)
    assert still_works(workspace)


# ---- streams and events


def test_two_streams_do_their_own_work(workspace: Workspace) -> None:
    device, other = workspace.device, workspace.device.stream()
    assert other not in (0, workspace.stream)
    a, b = put(workspace, np.full(64, 1, np.uint8)), put(workspace, np.full(64, 2, np.uint8))
    block = device.pinned(128)
    device.download(block.address, a, 64, workspace.stream)
    device.download(block.address + 64, b, 64, other)
    device.synchronize(other)
    assert (block.array[64:] == 2).all()
    workspace.synchronize()
    assert (block.array[:64] == 1).all()
    device.free_pinned(block)
    device.free_stream(other)


def test_events_keep_the_time(workspace: Workspace) -> None:
    device, stream = workspace.device, workspace.stream
    events = [device.event() for _ in range(3)]
    device.wait(events[0])  # not recorded: nothing to wait for
    with pytest.raises(DeviceProblem):
        device.elapsed_ms(events[0], events[1])
    address = workspace.alloc(1 << 20)
    for event in events:
        device.record(event, stream)
        device.zero(address, 1 << 20, stream)
    device.wait(events[2])
    first, last, both = (
        device.elapsed_ms(events[a], events[b]) for a, b in [(0, 1), (1, 2), (0, 2)]
    )
    assert 0 < first < both
    assert both == pytest.approx(first + last, rel=0.01, abs=0.002)
    device.record(events[0], stream)
    device.wait(events[0])
    assert device.elapsed_ms(events[0], events[2]) < 0
    for event in events:
        device.free_event(event)


def test_threads_use_one_device(workspace: Workspace) -> None:
    """A thread may end with the device active: pycuda aborts the process unless it lets go."""
    address, found = put(workspace, np.arange(64, dtype=np.uint8)), []

    def use() -> None:
        with workspace.working():
            found.append(down(workspace, address, 64).sum())

    for _ in range(3):
        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [sum(range(64))] * 12


# ---- graphs


@pytest.fixture
def graphs(device: Device) -> None:
    if not device.can_capture:
        pytest.skip(f"{type(device).__name__} has no graphs")


@pytest.mark.usefixtures("graphs")
def test_a_graph_does_again_what_was_captured(workspace: Workspace) -> None:
    device, stream = workspace.device, workspace.stream
    source, target = put(workspace, np.full(1024, 7, np.uint8)), workspace.alloc(1024)
    block = device.pinned(1024)
    device.zero(target, 1024, stream)
    workspace.synchronize()
    device.begin_capture(stream)
    device.upload(source, block.address, 512, stream)
    device.copy(target, source, 1024, stream)
    graph = device.end_capture(stream)
    assert graph is not None
    assert not down(workspace, target, 1024).any()
    for value in (3, 4):
        block.array[:] = value
        device.launch_graph(graph, stream)
        found = down(workspace, target, 1024)
        assert (found[:512] == value).all()
        assert (found[512:] == 7).all()
    device.free_graph(graph)
    device.free_pinned(block)


@pytest.mark.usefixtures("graphs")
def test_a_kernel_in_a_graph_keeps_its_structure(workspace: Workspace) -> None:
    source = put(workspace, np.array([1, -2, 0.5], np.float32))
    target = workspace.alloc(6)
    values = {"source": source, "target": target, "count": 3, "kind": 1}
    workspace.launch("convert", (1, 1, 1), kernels.THREADS, **values)
    workspace.synchronize()
    workspace.device.begin_capture(workspace.stream)
    workspace.launch("convert", (1, 1, 1), kernels.THREADS, **values)
    graph = workspace.device.end_capture(workspace.stream)
    assert graph is not None
    workspace.device.zero(target, 6, workspace.stream)
    assert not down(workspace, target, 6).any()
    workspace.device.launch_graph(graph, workspace.stream)
    assert get(workspace, target, (3,), np.float16).tolist() == [1, -2, 0.5]
    workspace.device.free_graph(graph)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("what", ["alloc", "synchronize"])
def test_a_capture_that_breaks_has_no_graph(workspace: Workspace, what: str) -> None:
    device, stream = workspace.device, workspace.stream
    address = workspace.alloc(64)
    device.begin_capture(stream)
    device.zero(address, 64, stream)
    with pytest.raises(DeviceProblem) as error:
        getattr(device, what)(stream)
    assert not isinstance(error.value, DeviceLost)
    assert device.end_capture(stream) is None
    assert still_works(workspace)


@pytest.mark.usefixtures("graphs")
def test_other_threads_may_allocate_while_one_captures(workspace: Workspace) -> None:
    device, stream = workspace.device, workspace.stream
    address, made = workspace.alloc(64), []

    def allocate() -> None:
        device.activate()
        made.append(device.alloc(64))

    device.begin_capture(stream)
    device.zero(address, 64, stream)
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    graph = device.end_capture(stream)
    assert graph is not None
    device.free_graph(graph)
    device.free(made[0])


# ---- errors


def test_a_kernel_that_is_not_there(workspace: Workspace) -> None:
    image = workspace.device.compile(kernels.source())
    with pytest.raises(DeviceProblem, match="not found"):
        workspace.device.load_kernel(image, "nothing")
    assert still_works(workspace)


def test_what_is_no_image_is_refused(workspace: Workspace) -> None:
    with pytest.raises(DeviceProblem, match="image"):
        workspace.device.load_kernel(b"\x7fnothing\0", "convert")
    assert still_works(workspace)


def test_a_launch_without_blocks_is_refused(workspace: Workspace) -> None:
    address = workspace.alloc(4)
    values = {"source": address, "target": address, "count": 0, "kind": 1}
    with pytest.raises(DeviceProblem, match="invalid argument"):
        workspace.launch("convert", (1, 0, 1), kernels.THREADS, **values)
    assert still_works(workspace)


def test_a_device_is_closed_twice_and_opened_again(device: Device) -> None:
    device.close()
    device.close()
    again = type(device)()
    workspace = Workspace(again)
    workspace.join()
    assert still_works(workspace)
    workspace.leave()
    again.close()
