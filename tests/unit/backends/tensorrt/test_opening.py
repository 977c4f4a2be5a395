"""Which Python package of CUDA opens the device, and what the user reads where none does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from edgespec.backends.cuda.device import opening
from edgespec.backends.cuda.device.base import Device, DeviceProblem
from edgespec.backends.cuda.device.opening import PACKAGES, open_device
from edgespec.errors import MissingDependency
from tests.tensorrt_simulator.device import HostDevice

BROKEN = "numpy.core.multiarray failed to import"


def stand(monkeypatch: pytest.MonkeyPatch, **packages: Any) -> None:
    """Let these packages be installed, with what opening them gives or raises, and a driver."""
    table = []
    for row in PACKAGES:
        found = packages.get(row.name.replace("-", "_"))
        table.append(opening.Package(row.name, row.module if found else "", giving(found)))
    monkeypatch.setattr(opening, "PACKAGES", tuple(table))
    monkeypatch.setattr(opening, "installed", bool)
    monkeypatch.setattr(opening.ctypes, "CDLL", lambda name: None)


def giving(found: Any) -> Callable[[], Device]:
    def opened() -> Device:
        if isinstance(found, Exception):
            raise found
        return found

    return opened


def test_cuda_bindings_are_taken_before_pycuda(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = HostDevice(), HostDevice()
    stand(monkeypatch, cuda_bindings=ours, pycuda=other)
    assert open_device() is ours
    stand(monkeypatch, pycuda=other)
    assert open_device() is other


def test_a_package_that_cannot_be_imported_leaves_the_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stand(monkeypatch, cuda_bindings=ImportError(BROKEN), pycuda=(other := HostDevice()))
    assert open_device() is other
    assert f"cuda-bindings cannot be imported: {BROKEN}" in caplog.text


def test_packages_that_cannot_be_imported_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    undefined = ImportError("undefined symbol: cuCtxCreate_v4")
    stand(monkeypatch, cuda_bindings=ImportError(BROKEN), pycuda=undefined)
    with pytest.raises(MissingDependency) as error:
        open_device()
    assert BROKEN in error.value.what
    assert "pycuda cannot be imported: undefined symbol: cuCtxCreate_v4" in error.value.what
    assert "Install it again" in error.value.remedy


def test_a_device_that_fails_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device is there for the other package either."""
    stand(monkeypatch, cuda_bindings=DeviceProblem("CUDA: no device"), pycuda=HostDevice())
    with pytest.raises(DeviceProblem, match="no device"):
        open_device()


def test_no_package_says_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    stand(monkeypatch)
    with pytest.raises(MissingDependency, match="no Python package of CUDA") as error:
        open_device()
    assert "edgespec[cuda]" in error.value.remedy
    assert "edgespec[pycuda]" in error.value.remedy


def test_a_machine_without_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    stand(monkeypatch, cuda_bindings=HostDevice())

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(opening.ctypes, "CDLL", missing)
    with pytest.raises(DeviceProblem, match="driver is not there: libcuda") as error:
        open_device()
    assert "Install NVIDIA's driver" in error.value.remedy
