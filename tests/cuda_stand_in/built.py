"""Compiles the stand-in of a driver and the project's kernels for the host, once per run."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.cuda import kernels
from tests import shared

HERE = Path(__file__).parent
TOO_LARGE = "of a size for a device, not for the stand-in of one"
LIBRARY, KERNELS = "libcuda.so.1", "kernels.so"
KERNEL = re.compile(r'extern "C" __global__ void (\w+)\(const (\w+) \w+\)')
# A misaligned access of 16 bytes ends a kernel, as on a device
FLAGS = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
TRAPS = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]


def stand_in() -> Path:
    """The directory with the driver's library; skips without a compiler."""
    needs_compiler()
    return shared.made_once(("stand-in of CUDA", text("driver.cpp"), stubs()), make_driver)


def host_kernels() -> Path:
    """The library of the kernels for the host; skips without a compiler."""
    needs_compiler()
    source = source_for_host(kernels.STRUCTURES)
    return (
        shared.made_once(("kernels for the host", text("kernels.h"), source), make_kernels)
        / KERNELS
    )


def needs_compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: it compiles the stand-in of CUDA's driver")


def text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def make_driver(out: Path) -> None:
    (out / "stubs.cpp").write_text(stubs(), encoding="utf-8")
    soname = f"-Wl,-soname,{LIBRARY}"
    compiled(out / LIBRARY, [HERE / "driver.cpp", out / "stubs.cpp"], [soname])


def make_kernels(out: Path) -> None:
    (out / "kernels.cpp").write_text(source_for_host(kernels.STRUCTURES), encoding="utf-8")
    compiled(out / KERNELS, [out / "kernels.cpp"], TRAPS)


def compiled(out: Path, sources: list[Path], more: list[str]) -> None:
    line = ["g++", *FLAGS, *more, f"-I{HERE}", "-o", out, *sources, "-ldl", "-lpthread"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def source_for_host(structures: dict[str, np.dtype]) -> str:
    """The kernels' source for the host. It compiles only where sizes and offsets of the structures
    in CUDA C are those of the arrays that are sent."""
    source = kernels.source()
    types = dict(KERNEL.findall(source))
    assert types.keys() == structures.keys()
    lines = ['#include "kernels.h"', source]
    for name, type_ in types.items():
        dtype = structures[name]
        lines.append(f'static_assert(sizeof({type_}) == {dtype.itemsize}, "{name}");')
        assert dtype.fields is not None
        for field, (_, offset, *_) in dtype.fields.items():
            claim = f"offsetof({type_}, {field}) == {offset}"
            lines.append(f'static_assert({claim}, "{name}: {field}");')
        lines.append(f"KERNEL({name}, {type_})")
    return "\n".join(lines)


def stubs() -> str:
    """Functions that pycuda's library wants to find and the stand-in does not have: they fail. It
    has been built for one release of CUDA, whose names these are."""
    if (wanted := wanted_by_pycuda()) is None:
        return ""
    ours = set(re.findall(r"^int (cu\w+)\(", (HERE / "driver.cpp").read_text(), re.MULTILINE))
    return "\n".join(
        f'extern "C" int {name}() {{ return 801; }}  // not supported'
        for name in sorted(wanted - ours)
    )


def wanted_by_pycuda() -> set[str] | None:
    """The driver's functions that pycuda is linked to; None where it is not installed."""
    found = find_spec("pycuda")
    if found is None or found.submodule_search_locations is None:
        return None
    (library,) = Path(found.submodule_search_locations[0]).glob("_driver*.so")
    table = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True
    )
    return set(re.findall(r" U (cu[A-Z]\w+)", table.stdout))


def environment() -> dict[str, str]:
    """The variables of a process whose CUDA driver is the stand-in."""
    directory, library = stand_in(), host_kernels()
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(directory),
        "STAND_IN_KERNELS": str(library),
    }


class Driver:
    """What tests ask of the stand-in that this process runs on."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.stand_in_structure.restype = ctypes.c_size_t
        library.stand_in_calls.restype = library.stand_in_complaints.restype = ctypes.c_char_p

    def calls(self) -> list[str]:
        """The calls since this was asked last, each with its arguments."""
        return self.library.stand_in_calls().decode().splitlines()

    def complaints(self) -> list[str]:
        """What a driver would have borne and ought not to have been asked."""
        return self.library.stand_in_complaints().decode().splitlines()

    def structure(self) -> bytes:
        """The bytes that the last launch of a kernel was given."""
        bytes_ = ctypes.create_string_buffer(self.library.stand_in_structure(None))
        self.library.stand_in_structure(bytes_)
        return bytes_.raw

    def fail(self, call: str, code: int, after: int = 0) -> None:
        """Let a call fail, or "work" of a stream, after so many that do not."""
        self.library.stand_in_fail(call.encode(), after, code)

    def set(self, devices: int = 1, limit: int = 8 << 30, order: int = 0) -> None:
        """How many devices there are, their memory in bytes, and a seed for the order in which
        blocks and threads run (0: as they are counted)."""
        self.library.stand_in_set(devices, ctypes.c_size_t(limit), order)

    def revive(self) -> None:
        """Let a lost context work again."""
        self.library.stand_in_revive()

    def held(self) -> dict[str, int]:
        """What is not given back yet."""
        counts = (ctypes.c_size_t * 6)()
        self.library.stand_in_held(counts)
        names = ("memory", "pinned", "streams", "events", "graphs", "modules")
        return dict(zip(names, counts, strict=True))


def driver_here() -> Driver | None:
    """The stand-in, where this process runs on it."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return Driver(library) if hasattr(library, "stand_in_held") else None
