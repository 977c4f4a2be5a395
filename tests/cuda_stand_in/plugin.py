"""A plugin of pytest for processes that run on the stand-in of a driver: there the compiler's image
of the kernels is the path of those that are compiled for the host."""

from __future__ import annotations

import os

import pytest

from edgespec.backends.cuda import kernels
from edgespec.backends.cuda.device.base import Device


def compile_for_host(self: Device, source: str) -> bytes:
    assert source == kernels.source()
    return os.environ["STAND_IN_KERNELS"].encode() + b"\0"


def pytest_configure(config: pytest.Config) -> None:
    Device.compile = compile_for_host  # type: ignore[method-assign]
