"""Which device runs which format, and the device that CUDA's driver knows."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import pytest

from edgespec.backends.tensorrt.devices import DeviceModel, check_formats, first_device, title_of
from edgespec.errors import UnsupportedModel


@pytest.mark.parametrize(
    ("sm", "schemes"),
    [(87, ["int4_awq", "int8_sq"]), (89, ["fp8"]), (110, ["nvfp4", "mxfp8"]), (75, ["int8_wo"])],
)
def test_a_device_takes_the_formats_that_it_runs(sm: int, schemes: list[str]) -> None:
    check_formats(sm, schemes, "float16")


@pytest.mark.parametrize(
    ("sm", "scheme", "said"),
    [
        (87, "fp8", "fp8 needs compute capability 8.9, and SM87 (Jetson Orin) has 8.7"),
        (89, "nvfp4", "nvfp4 needs compute capability 10.0, and SM89 (GeForce RTX 40, L4) has 8.9"),
        (87, "mxfp8", "mxfp8 needs compute capability 10.0"),
        (89, "w4a16_nvfp4", "w4a16_nvfp4 needs compute capability 10.0"),
        (75, "int4_awq", "int4_awq needs compute capability 8.0"),
    ],
)
def test_a_format_that_a_device_cannot_run_is_refused(sm: int, scheme: str, said: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        check_formats(sm, [scheme], "float16")
    assert said in error.value.what
    assert "int8_sq" in error.value.remedy
    assert scheme not in error.value.remedy


def test_a_device_that_tensorrt_does_not_run_on_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"needs compute capability 7\.5, and SM70 has 7\.0"):
        check_formats(70, [], "float16")


def test_turing_has_no_bfloat16() -> None:
    with pytest.raises(UnsupportedModel, match="no bfloat16 arithmetic") as error:
        check_formats(75, [], "bfloat16")
    assert "`compute` fp16" in error.value.remedy
    check_formats(75, [], "float16")


def test_an_unknown_compute_capability_has_no_title() -> None:
    assert (title_of(120), title_of(103)) == ("SM120 (GeForce RTX 50)", "SM103")


class Driver:
    """The driver's functions, of a machine with one device, or with none."""

    def __init__(self, **codes: int) -> None:
        self.codes = codes

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.codes.get(name) or self.call(name, arguments)

    def call(self, name: str, arguments: tuple[Any, ...]) -> int:
        def out(index: int, kind: type[Any]) -> Any:
            return ctypes.cast(arguments[index], ctypes.POINTER(kind)).contents

        if name == "cuDeviceGetAttribute":
            out(0, ctypes.c_int).value = {75: 11, 76: 0}[arguments[1]]
        elif name == "cuDeviceGetName":
            arguments[0].value = b"NVIDIA Thor"
        elif name == "cuDeviceTotalMem_v2":
            out(0, ctypes.c_size_t).value = 122 << 30
        elif name == "cuDriverGetVersion":
            out(0, ctypes.c_int).value = 13020
        return 0


def test_the_first_device_is_as_the_driver_says() -> None:
    found = first_device(cast(ctypes.CDLL, Driver()))
    assert found == DeviceModel("NVIDIA Thor", 110, "13.2", 122 << 30)


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet", "cuDeviceGetAttribute"])
def test_a_driver_that_fails_has_no_device(failing: str) -> None:
    assert first_device(cast(ctypes.CDLL, Driver(**{failing: 100}))) is None
