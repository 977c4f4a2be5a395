"""What the layers of a device do where CUDA fails, and what they ask of it: on the stand-in of a
driver, which can be told to fail. A real device cannot, and these are skipped there."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.cuda import kernels
from edgespec.backends.cuda.caches import KvCache
from edgespec.backends.cuda.device.base import Device, DeviceLost, DeviceMemoryFull, DeviceProblem
from edgespec.backends.cuda.device.opening import PACKAGES, Package
from edgespec.backends.cuda.workspace import Workspace
from tests.cuda_stand_in.built import Driver
from tests.tensorrt.cuda import device, down, driver, put, workspace

__all__ = ["device", "driver", "workspace"]

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("driver")]

OUT_OF_MEMORY, NO_DEVICE, INVALID_HANDLE, ILLEGAL_ADDRESS = 2, 100, 400, 700
NOTHING = {"memory": 0, "pinned": 0, "streams": 0, "events": 0, "graphs": 0, "modules": 0}


# ---- what is asked


def test_a_copy_is_done_when_it_is_waited_for(workspace: Workspace) -> None:
    """The stand-in is as late as a device may be."""
    device = workspace.device
    address, block = workspace.alloc(8), device.pinned(8)
    block.array[:] = 1
    device.zero(address, 8, workspace.stream)
    device.download(block.address, address, 8, workspace.stream)
    assert block.array.tolist() == [1] * 8
    workspace.synchronize()
    assert block.array.tolist() == [0] * 8
    device.free_pinned(block)


@pytest.mark.parametrize("kernel", kernels.STRUCTURES)
def test_a_structure_goes_as_it_is(workspace: Workspace, driver: Driver, kernel: str) -> None:
    """One argument by value, all of its bytes, and the blocks and threads that were asked for."""
    dtype, bytes_ = kernels.STRUCTURES[kernel], np.random.default_rng(0).bytes
    found = workspace.device.load_kernel(workspace.device.compile(kernels.source()), kernel)
    argument = bytes_(dtype.itemsize)
    driver.calls()
    workspace.device.launch(found, (2, 3, 4), 96, argument, workspace.stream)
    assert driver.calls()[-1] == "cuLaunchKernel 2,3,4 of 96,1,1"
    assert driver.structure() == argument
    driver.fail("work", INVALID_HANDLE)  # it would write anywhere
    with pytest.raises(DeviceProblem):
        workspace.synchronize()


def test_streams_do_not_wait_for_the_default_one(workspace: Workspace, driver: Driver) -> None:
    driver.calls()
    workspace.device.free_stream(workspace.device.stream())
    assert driver.calls() == ["cuStreamCreate 1", "cuStreamDestroy"]


def test_all_is_given_back(device: Device, driver: Driver) -> None:
    gc.collect()
    before = driver.held()
    workspace = Workspace(device)
    workspace.join()
    cache = KvCache(workspace, 4, 2, 2, 32, 64)
    cache.keep(0, np.array([5, 7, 9]), 3)
    cache.copy_lane(0, 1, 6)
    rows = cache.read(0, 6)
    cache.write(1, rows)
    held = driver.held()
    assert held["memory"] > cache.size.row_bytes
    assert held["modules"] >= 1
    del rows
    workspace.synchronize()
    cache.free()
    workspace.leave()
    gc.collect()
    assert driver.held() == before
    assert driver.complaints() == []


# ---- errors


def test_memory_that_does_not_do(workspace: Workspace, driver: Driver) -> None:
    driver.set(limit=1 << 20)
    address = workspace.alloc(1 << 19)
    with pytest.raises(DeviceMemoryFull, match="cuMemAlloc failed: out of memory"):
        workspace.alloc((1 << 19) + 1)
    workspace.free(address)
    assert workspace.alloc(1 << 20)
    driver.fail("cuMemHostAlloc", OUT_OF_MEMORY)
    with pytest.raises(DeviceMemoryFull, match="cuMemHostAlloc failed: out of memory"):
        workspace.device.pinned(64)
    assert workspace.device.lost is None


CALLS = {
    "cuMemsetD8Async": lambda w, a, h: w.device.zero(a, 8, w.stream),
    "cuMemcpyHtoDAsync": lambda w, a, h: w.device.upload(a, h, 8, w.stream),
    "cuMemcpyDtoHAsync": lambda w, a, h: w.device.download(h, a, 8, w.stream),
    "cuMemcpyDtoDAsync": lambda w, a, h: w.device.copy(a, a + 32, 8, w.stream),
    "cuMemcpy2DAsync": lambda w, a, h: w.device.copy_2d(a, 8, a + 32, 8, 4, 2, w.stream),
    "cuStreamCreate": lambda w, a, h: w.device.stream(),
    "cuStreamSynchronize": lambda w, a, h: w.synchronize(),
    "cuEventCreate": lambda w, a, h: w.device.event(),
    "cuModuleLoadData": lambda w, a, h: w.launch("convert", (1, 1, 1), 32, source=a, target=a),
    "cuModuleGetFunction": lambda w, a, h: w.launch("convert", (1, 1, 1), 32, source=a, target=a),
    "cuLaunchKernel": lambda w, a, h: w.launch("convert", (1, 1, 1), 32, source=a, target=a),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_says_which_and_harms_no_other(
    workspace: Workspace, driver: Driver, call: str
) -> None:
    address, block = workspace.alloc(64), workspace.device.pinned(64)
    driver.fail(call, INVALID_HANDLE)
    with pytest.raises(DeviceProblem) as error:
        CALLS[call](workspace, address, block.address)
    assert re.match(f"CUDA: {call}(Ex)? failed: invalid resource handle", error.value.what)
    assert not isinstance(error.value, DeviceLost)
    CALLS[call](workspace, address, block.address)
    workspace.synchronize()
    workspace.device.free_pinned(block)


@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventSynchronize", "cuEventElapsedTime"])
def test_an_event_that_fails(workspace: Workspace, driver: Driver, call: str) -> None:
    device, event = workspace.device, workspace.device.event()
    calls = {
        "cuEventRecord": lambda: device.record(event, workspace.stream),
        "cuEventSynchronize": lambda: device.wait(event),
        "cuEventElapsedTime": lambda: device.elapsed_ms(event, event),
    }
    driver.fail(call, INVALID_HANDLE)
    with pytest.raises(DeviceProblem, match=f"{call} failed: invalid resource handle"):
        calls[call]()
    assert device.lost is None
    device.free_event(event)


@pytest.mark.parametrize("call", ["cuStreamEndCapture", "cuGraphInstantiateWithFlags"])
def test_a_graph_that_cannot_be_made_is_none(
    workspace: Workspace, driver: Driver, call: str
) -> None:
    device = workspace.device
    if not device.can_capture:
        pytest.skip(f"{type(device).__name__} has no graphs")
    address, before = workspace.alloc(8), driver.held()["graphs"]
    device.begin_capture(workspace.stream)
    device.zero(address, 8, workspace.stream)
    driver.fail(call, INVALID_HANDLE)
    assert device.end_capture(workspace.stream) is None
    assert driver.held()["graphs"] == before
    assert down(workspace, address, 8).tolist() != [0] * 8
    assert device.lost is None


# ---- a device that is lost


def lose(workspace: Workspace, address: int) -> None:
    """Let a kernel write where nothing is."""
    workspace.launch("convert", (1, 1, 1), 32, source=address, target=8, count=1, kind=1)


def test_an_illegal_access_ends_the_device_and_closing_says_nothing_more(
    device: Device, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    workspace = Workspace(device)
    workspace.join()
    cache, address = KvCache(workspace, 2, 1, 1, 8, 16), put(workspace, np.zeros(8, np.float32))
    block, event = device.pinned(64), device.event()
    rows = cache.read(0, 2)
    workspace.synchronize()
    lose(workspace, address)
    said = "CUDA: cuStreamSynchronize failed: an illegal memory access was encountered"
    with pytest.raises(DeviceLost) as first:
        workspace.synchronize()
    assert first.value.what == said
    assert "Run the command again" in first.value.remedy
    for refused in (
        workspace.synchronize,
        lambda: workspace.alloc(8),
        lambda: device.upload(address, block.address, 8, workspace.stream),
        lambda: device.wait(event),
        lambda: lose(workspace, address),
    ):
        with pytest.raises(DeviceLost) as again:
            refused()
        assert again.value.what == said
    del rows
    cache.free()
    device.free_pinned(block)
    device.free_event(event)
    workspace.leave()
    device.close()
    gc.collect()
    assert caplog.text == ""


def test_a_device_that_is_lost_as_it_is_closed_is_logged(
    device: Device, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    workspace = Workspace(device)
    workspace.join()
    lose(workspace, put(workspace, np.zeros(8, np.float32)))
    workspace.leave()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "an illegal memory access" in caplog.text


def test_a_device_that_is_lost_as_memory_is_freed_is_logged(
    workspace: Workspace, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    address = put(workspace, np.zeros(8, np.float32))
    if not workspace.device.can_capture:
        pytest.skip("pycuda tells it on stderr")
    lose(workspace, address)
    workspace.free(address)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cuMemFree failed: an illegal memory access" in caplog.text
    with pytest.raises(DeviceLost, match="cuMemFree failed"):
        workspace.synchronize()
    assert driver.complaints() == ["memory is freed that a stream may still use"]


def test_a_misaligned_access_is_one_too(workspace: Workspace) -> None:
    """16 bytes at a time, of rows that are no multiple of 16."""
    address = put(workspace, np.zeros(256, np.uint8))
    ends = {"source_offset": address, "target_offset": address + 8, "row_bytes": 16}
    moves = {"from": [0], "to": [0], "count": 1, "wide": 1}
    workspace.launch("move_rows", (1, 1, 1), 32, **moves, **ends)
    with pytest.raises(DeviceLost, match="misaligned address"):
        workspace.synchronize()


@pytest.mark.parametrize("call", ["cuCtxSetCurrent", "cuCtxPushCurrent"])
def test_a_thread_joins_a_lost_device_without_an_error(
    workspace: Workspace, driver: Driver, call: str
) -> None:
    """Whoever closes from another thread gets as far as closing."""
    lose(workspace, put(workspace, np.zeros(8, np.float32)))
    with pytest.raises(DeviceLost):
        workspace.synchronize()
    driver.fail(call, ILLEGAL_ADDRESS)
    errors: list[BaseException] = []

    def join() -> None:
        try:
            workspace.device.activate()
        except DeviceProblem as error:
            errors.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    thread.join()
    assert errors == []


# ---- whole processes

BEGIN = """
import threading
import numpy as np
from tests.cuda_stand_in import plugin
from tests.cuda_stand_in.built import driver_here
from edgespec.backends.cuda.device.opening import PACKAGES
from edgespec.backends.cuda.workspace import Workspace
driver = driver_here()
plugin.pytest_configure(None)
(package,) = (row for row in PACKAGES if row.name == {name!r})
"""
OPEN = """
try:
    package.open()
except Exception as error:
    print(type(error).__name__, error)
"""
ENDS = {
    "is not closed": "device = package.open()\nWorkspace(device).alloc(64)\n",
    "is not closed and not deleted": (
        "import ctypes\ndevice = package.open()\n"
        "ctypes.pythonapi.Py_IncRef(ctypes.py_object(device))\n"
    ),
    "is not closed in a thread": (
        "device = package.open()\n"
        "thread = threading.Thread(target=device.activate)\nthread.start()\nthread.join()\n"
    ),
    "is lost": (
        "workspace = Workspace(package.open())\n"
        "workspace.join()\n"
        "driver.fail('work', 700)\n"
        "workspace.device.zero(workspace.alloc(64), 64, workspace.stream)\n"
        "try:\n    workspace.synchronize()\nexcept Exception as error:\n    print(error.what)\n"
        "driver.fail('cuCtxPopCurrent', 700)\n"
        "workspace.leave()\n"
    ),
    "is lost and not closed": (
        "workspace = Workspace(package.open())\n"
        "driver.fail('work', 700)\n"
        "workspace.device.zero(workspace.alloc(64), 64, workspace.stream)\n"
        "try:\n    workspace.synchronize()\nexcept Exception as error:\n    print(error.what)\n"
        "driver.fail('cuCtxPopCurrent', 700)\n"
    ),
}


@pytest.fixture(params=PACKAGES, ids=lambda package: package.name)
def package(request: pytest.FixtureRequest) -> Package:
    return request.param


def python(package: Package, program: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", BEGIN.format(name=package.name) + program]
    root = Path(__file__).parents[2]
    return subprocess.run(line, cwd=root, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_well_whose_device(package: Package, end: str) -> None:
    done = python(package, ENDS[end])
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lost = "CUDA: cuStreamSynchronize failed: an illegal memory access was encountered\n"
    assert done.stdout == (lost if "lost" in end else "")


def test_a_machine_without_a_device_says_so(package: Package) -> None:
    done = python(package, "driver.set(devices=0)\n" + OPEN)
    said = "DeviceProblem CUDA: cuInit failed: no CUDA-capable device is detected\n"
    assert done.stdout.startswith(said), done.stderr
    assert done.stderr == ""


def test_a_driver_that_is_too_old_says_so() -> None:
    done = python(PACKAGES[0], "driver.fail('no cuDevicePrimaryCtxRetain', 500)\n" + OPEN)
    assert 'CUDA: Function "cuDevicePrimaryCtxRetain" not found' in done.stdout
    assert "Update NVIDIA's driver" in done.stdout
