"""Compiles CUDA C for a device by NVRTC, CUDA's compiler as a library.

The kernels are shipped as source and compiled when an engine is opened, in some milliseconds: no
nvcc has to be on a device, no compiled code is shipped for devices of tomorrow, and the compiler
needs no device, so that what a Jetson compiles is compiled in tests too. Calls the library by its
few C functions: pycuda has no bindings of it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

from edgespec.errors import InternalError, MissingDependency

NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
REMEDY = (
    "Install NVIDIA's compiler library: pip install nvidia-cuda-nvrtc, or the CUDA toolkit (on a"
    " Jetson: apt install cuda-nvrtc-13-0, or the version of its JetPack)."
)


def compiled(source: str, sm: int) -> bytes:
    """Machine code for the compute capability `sm` (times ten). MissingDependency without NVRTC,
    InternalError where it refuses the source."""
    nvrtc = load()
    program = c_void_p()
    made = nvrtc.nvrtcCreateProgram(byref(program), source.encode(), b"edgespec.cu", 0, None, None)
    require(nvrtc, made, "no program can be made")
    try:
        options = (c_char_p * 2)(f"--gpu-architecture=sm_{sm}".encode(), b"--std=c++17")
        result = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result:
            log = text_of(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            require(nvrtc, result, log.decode(errors="replace").strip("\0 \n"))
        return text_of(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def text_of(
    get_size: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer, of: c_void_p
) -> bytes:
    """Bytes that the library gives by two calls: how many, and which."""
    size = c_size_t()
    get_size(of, byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(of, buffer)
    return buffer.raw


def require(nvrtc: ctypes.CDLL, result: int, reason: str) -> None:
    """InternalError where a call failed."""
    if result:
        nvrtc.nvrtcGetErrorString.restype = c_char_p
        name = nvrtc.nvrtcGetErrorString(c_int(result)).decode()
        raise InternalError(f"NVRTC cannot compile the project's kernels: {name}: {reason}")


def load() -> ctypes.CDLL:
    """The library: of the system, or of NVIDIA's wheels. MissingDependency where it is neither."""
    for name in NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    for path in of_wheels():
        # It looks for this one by its name alone, and takes what is loaded already
        for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    raise MissingDependency("libnvrtc is not installed", REMEDY)


def of_wheels() -> Iterator[Path]:
    """The files of the library in the packages that Python sees."""
    for root in map(Path, sys.path):
        yield from sorted(root.glob("nvidia/*/lib/libnvrtc.so.1[0-9]"), reverse=True)
