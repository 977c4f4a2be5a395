"""`edgespec infer` from the runner down to CUDA's driver: the runner, the workspace and the caches
are the project's own, the Python package of CUDA is the real one, the kernels run from their
source. The library of TensorRT is the simulator, which puts its runs on the stream as work of the
host; the driver is the stand-in."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.cuda.device import opening
from edgespec.backends.cuda.device.base import Device, DeviceLost
from edgespec.backends.cuda.device.cuda_python import CudaPythonDevice
from edgespec.backends.cuda.device.opening import PACKAGES, installed
from edgespec.backends.cuda.device.pycuda_device import PycudaDevice
from tests.cuda_stand_in.built import LIBRARY, Driver
from tests.e2e.tensorrt_pairs import NATIVE, PORTABLE, built, tokens
from tests.e2e.workshop import Cli, cli
from tests.tensorrt.cuda import driver
from tests.tensorrt_simulator.device import Bytes, HostDevice, Stream
from tests.tensorrt_simulator.installed import install

__all__ = ["cli", "driver"]

pytestmark = pytest.mark.gpu

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class View:
    """What the simulated library asks of a device: which streams there are, and whether one is
    captured; bytes of memory; a place on a stream for its own work."""

    def __init__(self) -> None:
        self.device: Device | None = None
        self.streams: dict[int, Stream] = {}
        self.library = ctypes.CDLL(LIBRARY)
        self.functions: list[object] = []  # a graph may call them again
        self.errors: list[Exception] = []

    @property
    def lost(self) -> DeviceLost | None:
        assert self.device is not None
        return self.device.lost

    def put(self, stream: int, work: Callable[[], None]) -> None:
        def run(_: object) -> None:
            try:
                work()
            except Exception as error:
                self.errors.append(error)

        self.functions.append(HostFunction(run))
        handle, function = ctypes.c_void_p(stream), self.functions[-1]
        assert self.library.cuLaunchHostFunc(handle, function, None) == 0

    def at(self, address: int, size: int) -> Bytes:
        """Only work of a stream may touch them."""
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def seen_by(view: View, layer: type[Device]) -> type[Device]:
    """A layer as it is, which tells the view of its streams."""

    class Seen(layer):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            view.device = self
            HostDevice.current = view  # type: ignore[assignment]

        def stream(self) -> int:
            stream: int = super().stream()
            view.streams[stream] = Stream()
            return stream

        def free_stream(self, stream: int) -> None:
            del view.streams[stream]
            super().free_stream(stream)

        def begin_capture(self, stream: int) -> None:
            super().begin_capture(stream)
            view.streams[stream].kept = []

        def end_capture(self, stream: int) -> int | None:
            view.streams[stream].kept = None
            return super().end_capture(stream)

    return Seen


@pytest.fixture(params=[CudaPythonDevice, PycudaDevice], ids=["cuda-bindings", "pycuda"])
def layer(request: pytest.FixtureRequest) -> type[Device]:
    (package,) = (row for row in PACKAGES if row.name in request.node.name)
    if not installed(package.module):
        pytest.skip(f"{package.name} is not installed")
    return request.param


@pytest.mark.deep
@pytest.mark.parametrize("version", [NATIVE, PORTABLE])
def test_infer_says_the_same_on_the_real_package(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: Driver,
    layer: type[Device],
    version: str,
) -> None:
    install(monkeypatch, version)
    options = ("--backend", "tensorrt", "--compute", "fp32")
    engines = built(cli, "eagle3", tmp_path / "engines", *options)
    expected = tokens(cli, engines, tmp_path)
    view, before = View(), driver.held()
    monkeypatch.setattr(opening, "open_device", seen_by(view, layer))
    driver.calls()
    for more in ((), ("--spec-decode", "--check-lossless")):
        assert tokens(cli, engines, tmp_path, *more) == expected
        calls = {call.split()[0] for call in driver.calls()}
        assert {"cuLaunchHostFunc", "cuLaunchKernel", "cuEventElapsedTime"} <= calls
        assert ("cuGraphLaunch" in calls) == layer.can_capture
    assert view.errors == []
    assert driver.complaints() == []
    assert driver.held() == before
