"""The kernels for 64-bit ARM, cross compiled and run by QEMU's user mode: where no Python and no
ONNX Runtime for ARM are there, a program in C++ has the same checks. On an ARM machine the other
tests of this folder are run instead."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[4]
NATIVE = Path("edgespec/backends/ort/native")
PREFIX = "aarch64-linux-gnu-"
QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() == "aarch64", reason="the other tests run on this CPU"),
    pytest.mark.skipif(
        shutil.which(PREFIX + "g++") is None,
        reason="needs a cross compiler (Debian: g++-aarch64-linux-gnu)",
    ),
    pytest.mark.skipif(QEMU is None, reason="needs QEMU's user mode (Debian: qemu-user)"),
]

LEVELS = ["neon_i8mm", "neon_dotprod", "neon", "portable"]


def run(*command: str | Path, **environ: str) -> str:
    """What a command prints; it must succeed."""
    # the sanitizers of make check-native are made for this machine
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("LD_PRELOAD", "EDGESPEC_KERNEL_FLAGS")
    }
    done = subprocess.run(
        [str(one) for one in command], cwd=ROOT, env=kept | environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Built:
    """What was compiled for a machine: the library, and the program of checks."""

    library: Path
    program: Path


def build(target: Path, prefix: str, **environ: str) -> Built:
    """Compile as an installation does, and the program from the same objects."""
    where = ["--build-temp", target / "temp", "--build-lib", target / "lib"]
    run(sys.executable, "setup.py", "-q", "build_ext", *where, **environ)
    library = target / "lib" / NATIVE / "libedgespec_kernels.so"
    assert library.is_file()
    program = target / "check_kernels"
    objects = sorted((target / "temp" / NATIVE).glob("*.o"))
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", f"-I{NATIVE}"]
    flags += ["-static"] if prefix else []
    run(prefix + "g++", *flags, HERE / "check_kernels.cpp", *objects, "-o", program)
    return Built(library, program)


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Built:
    compilers = {"CC": PREFIX + "gcc", "CXX": PREFIX + "g++"}
    target = tmp_path_factory.mktemp("arm")
    return build(target, PREFIX, _PYTHON_HOST_PLATFORM="linux-aarch64", **compilers)


def found(printed: str) -> dict[str, str]:
    """The lines of a program's output, `name: value`."""
    return dict(line.split(": ", 1) for line in printed.splitlines())


def emulated(cpu: str, *command: str | Path) -> dict[str, str]:
    """What a program prints on a CPU."""
    assert QEMU is not None
    sysroot = Path(run(PREFIX + "g++", "-print-file-name=libc.so.6").strip()).resolve().parents[1]
    return found(run(QEMU, "-L", sysroot, "-cpu", cpu, *command))


@pytest.fixture(scope="module")
def on_all_levels(arm: Built) -> dict[str, str]:
    return emulated("max", arm.program)


def test_every_level_gives_the_bits_of_the_portable_one(on_all_levels: dict[str, str]) -> None:
    """And those are near to float64, and a row alone has them too: the program fails otherwise."""
    assert on_all_levels["levels"] == ",".join(LEVELS)


@pytest.mark.parametrize(
    ("cpu", "levels"),
    [
        ("cortex-a76", LEVELS[1:]),  # Raspberry Pi 5; Jetson Orin's Cortex-A78AE has the same
        ("neoverse-n1", LEVELS[1:]),
        ("cortex-a72", LEVELS[2:]),  # Raspberry Pi 4
    ],
)
def test_a_cpu_gets_the_levels_that_it_has(arm: Built, cpu: str, levels: list[str]) -> None:
    """The library loads there, and proves them."""
    program = arm.program.with_name("load_library")
    if not program.exists():
        run(PREFIX + "g++", HERE / "load_library.cpp", "-ldl", "-o", program)
    assert emulated(cpu, program, arm.library) == {"levels": ",".join(levels)}


def test_arm_has_the_bits_of_this_machine(
    on_all_levels: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    # with less optimization: it is compiled sooner, and the bits must not depend on that
    flags = {"CXX": "g++", "EDGESPEC_KERNEL_FLAGS": "-O1"}
    here = build(tmp_path_factory.mktemp("here"), "", **flags)
    assert found(run(here.program))["digest"] == on_all_levels["digest"]
