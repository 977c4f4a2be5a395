"""What tests on a CUDA device share: the device by each Python package of CUDA, arrays that go
there and back, and the stand-in of a driver where the process runs on one.

`tests/unit/backends/tensorrt/test_stand_in.py` runs these tests on the stand-in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from edgespec.backends.cuda.device.base import Device
from edgespec.backends.cuda.device.opening import PACKAGES, check_driver, installed
from edgespec.backends.cuda.device.pycuda_device import primary_context
from edgespec.backends.cuda.workspace import Workspace
from edgespec.errors import EnvironmentProblem
from tests.cuda_stand_in.built import Driver, driver_here

STAND_IN = "tests/unit/backends/tensorrt/test_stand_in.py runs it on the stand-in of a driver"


@pytest.fixture(params=PACKAGES, ids=lambda package: package.name)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """The device by each package."""
    package = request.param
    if not installed(package.module):
        pytest.skip(f"{package.name} is not installed")
    try:
        check_driver()
        opened: Device = package.open()
    except EnvironmentProblem as error:
        pytest.skip(f"no CUDA device: {error.what}; {STAND_IN}")
    if driver := driver_here():
        driver.calls()
    yield opened
    opened.close()
    if driver:
        driver.revive()
        driver.set()
        primary_context.cache_clear()  # which ends with a device that is lost
        assert driver.complaints() == []


@pytest.fixture
def driver() -> Driver:
    """The stand-in of a driver."""
    if found := driver_here():
        return found
    pytest.skip(f"needs the stand-in of a driver; {STAND_IN}")


@pytest.fixture(params=[0, 1, 2])
def orders(request: pytest.FixtureRequest) -> None:
    """Blocks and threads as they are counted and in two other orders, on the stand-in; a device has
    its own."""
    if driver := driver_here():
        driver.set(order=request.param)
    elif request.param:
        pytest.skip("a device has its own order of threads")


@pytest.fixture
def workspace(device: Device) -> Iterator[Workspace]:
    """A workspace in use, which gives back what is left there."""
    made = Workspace(device)
    made.join()
    yield made
    made.leave()


def up(workspace: Workspace, address: int, array: np.ndarray) -> None:
    """Put an array on the device."""
    block = workspace.device.pinned(array.nbytes)
    block.array[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    workspace.device.upload(address, block.address, array.nbytes, workspace.stream)
    workspace.synchronize()
    workspace.device.free_pinned(block)


def put(workspace: Workspace, array: np.ndarray) -> int:
    """The address of a copy of an array on the device."""
    address = workspace.alloc(max(1, array.nbytes))
    if array.nbytes:
        up(workspace, address, array)
    return address


def down(workspace: Workspace, address: int, size: int) -> np.ndarray:
    """Bytes of the device."""
    block = workspace.device.pinned(size)
    workspace.device.download(block.address, address, size, workspace.stream)
    workspace.synchronize()
    found = block.array.copy()
    workspace.device.free_pinned(block)
    return found


def get(workspace: Workspace, address: int, shape: tuple[int, ...], dtype: object) -> np.ndarray:
    """An array of the device."""
    kind = np.dtype(dtype)  # type: ignore[call-overload]
    return down(workspace, address, math.prod(shape) * kind.itemsize).view(kind).reshape(shape)
