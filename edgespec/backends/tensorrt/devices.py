"""The devices that engines are built for: compute capabilities, formats, and the device that is
here.

Knows CUDA's driver by its few C functions, where it is installed; needs no CUDA package.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from edgespec.backends.tensorrt.target import Compute
from edgespec.errors import UnsupportedModel
from edgespec.quantization.schemes import SCHEMES

CU_MAJOR, CU_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
NAME_BYTES = 256
OLDEST = 75  # of what TensorRT 10 and newer run on
COMPUTE_SCHEMES: dict[Compute, str] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A compute capability (times ten), and devices that have it; `most_gib` is the memory of the
    largest."""

    sm: int
    title: str
    most_gib: int


KNOWN_DEVICES = {
    row.sm: row
    for row in (
        KnownDevice(75, "GeForce RTX 20, T4", 48),
        KnownDevice(80, "A100", 80),
        KnownDevice(86, "GeForce RTX 30, A10", 48),
        KnownDevice(87, "Jetson Orin", 64),
        KnownDevice(89, "GeForce RTX 40, L4", 48),
        KnownDevice(90, "H100, H200", 144),
        KnownDevice(100, "B200", 192),
        KnownDevice(110, "Jetson Thor", 128),
        KnownDevice(120, "GeForce RTX 50", 96),
        KnownDevice(121, "DGX Spark", 128),
    )
}


def title_of(sm: int) -> str:
    """A compute capability in words: "SM120 (GeForce RTX 50)"."""
    known = KNOWN_DEVICES.get(sm)
    return f"SM{sm} ({known.title})" if known else f"SM{sm}"


def memory_of(sm: int) -> int | None:
    """The memory, in bytes, of the device that is here, or of the largest that is known of another
    compute capability; None where none is."""
    device = device_here()
    if device is not None and device.sm == sm:
        return device.memory_bytes
    known = KNOWN_DEVICES.get(sm)
    return None if known is None else known.most_gib << 30


def check_formats(sm: int, schemes: Iterable[str], compute: Compute) -> None:
    """UnsupportedModel where a device of this compute capability cannot run the weights' schemes
    or the compute type, or TensorRT at all; names of `schemes` are keys of SCHEMES."""
    if sm < OLDEST:
        message = (
            f"TensorRT needs compute capability {OLDEST / 10}, and {title_of(sm)} has {sm / 10}"
        )
        raise UnsupportedModel(message, "Build for another device, or with `backend` ort.")
    for name in schemes:
        scheme = SCHEMES[name]
        if sm < scheme.min_sm:
            fit = ", ".join(row.name for row in SCHEMES.values() if row.made and sm >= row.min_sm)
            message = (
                f"{name} needs compute capability {scheme.min_sm / 10}, and {title_of(sm)} has"
                f" {sm / 10}"
            )
            raise UnsupportedModel(
                message, f"Quantize to one of {fit}, or build for another device."
            )
    if sm < SCHEMES[COMPUTE_SCHEMES[compute]].min_sm:
        message = f"{title_of(sm)} has no {compute} arithmetic"
        raise UnsupportedModel(message, "Build with `compute` fp16.")


# ---- the device that is here


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """The first CUDA device of this machine. `driver` is the version of CUDA that it supports."""

    name: str
    sm: int
    driver: str
    memory_bytes: int


@cache
def device_here() -> DeviceModel | None:
    """The first CUDA device; None where there is none, or no driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return first_device(cuda)


def first_device(cuda: ctypes.CDLL) -> DeviceModel | None:
    """The first device that the driver's library knows; None where it finds none."""
    handle, number = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(handle), 0):
        return None
    numbers = []
    for attribute in (CU_MAJOR, CU_MINOR):
        if cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, handle):
            return None
        numbers.append(number.value)
    name, size = ctypes.create_string_buffer(NAME_BYTES), ctypes.c_size_t()
    cuda.cuDeviceGetName(name, NAME_BYTES, handle)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), handle)
    cuda.cuDriverGetVersion(ctypes.byref(number))
    driver = f"{number.value // 1000}.{number.value % 1000 // 10}"
    sm = 10 * numbers[0] + numbers[1]
    return DeviceModel(name.value.decode(errors="replace"), sm, driver, size.value)
