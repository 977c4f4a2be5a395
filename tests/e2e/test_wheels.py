"""`make wheels`: what is made has its library and its name is true, for both machines.

Where the tools of requirements-wheels.txt are installed; whether other compilers give the same bits
is part of the command.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from edgespec import __version__
from tests.unit.backends.ort.native.test_arm import HERE, QEMU, found, run

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".venv" / "wheel-tools"
LIBRARY = "edgespec/backends/ort/native/libedgespec_kernels.so"
SYSROOT = Path("/usr/aarch64-linux-gnu")  # Debian: libc6-arm64-cross

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(1800),  # each compiles zig's C++ library, where that is not cached
    pytest.mark.skipif(not (TOOLS / ".installed").exists(), reason="needs `make wheels` once"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the sdist and the wheels."""
    out = tmp_path_factory.mktemp("dist")
    words = [
        "scripts/make_wheels.py",
        "--tools",
        TOOLS,
        "--out",
        out,
        "--url",
        "https://example.org/e",
    ]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same bits:" in done.stdout
    return out


def test_there_is_an_sdist_and_a_wheel_for_each_machine_and_any_python(made: Path) -> None:
    wheels = [
        f"edgespec-{__version__}-py3-none-manylinux_2_28_{name}.whl"
        for name in ("aarch64", "x86_64")
    ]
    assert sorted(path.name for path in made.iterdir()) == [
        *wheels,
        f"edgespec-{__version__}.tar.gz",
    ]
    for name in wheels:
        with zipfile.ZipFile(made / name) as wheel:
            (metadata,) = (one for one in wheel.namelist() if one.endswith("/METADATA"))
            assert "Project-URL: Repository, https://example.org/e" in wheel.read(metadata).decode()


def test_a_wheel_that_is_installed_has_kernels_where_no_compiler_is(
    made: Path, tmp_path: Path
) -> None:
    words = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--find-links", made]
    place = tmp_path / "site"
    subprocess.run([sys.executable, *words, "--target", place, "edgespec"], check=True)
    ask = "import edgespec.backends.ort.native.library as l; print(l.PATH, l.kernels().level)"
    environment = os.environ | {"PYTHONPATH": str(place), "PATH": "/nonexistent"}
    line = [sys.executable, "-c", ask]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    path, level = done.stdout.split()
    assert Path(path) == place / LIBRARY
    assert level


@pytest.mark.skipif(QEMU is None or not SYSROOT.is_dir(), reason="needs QEMU and libc6-arm64-cross")
@pytest.mark.parametrize(
    ("cpu", "level"), [("max", "neon_i8mm"), ("cortex-a76", "neon_dotprod"), ("cortex-a72", "neon")]
)
def test_the_library_for_arm_proves_its_levels_in_qemu(
    made: Path, tmp_path: Path, cpu: str, level: str
) -> None:
    (wheel,) = made.glob("*aarch64.whl")
    with zipfile.ZipFile(wheel) as packed:
        library = packed.extract(LIBRARY, tmp_path)
    program = tmp_path / "load_library"
    zig = [TOOLS / "ziglang" / "zig", "c++", "-target", "aarch64-linux-gnu.2.28"]
    run(*zig, HERE / "load_library.cpp", "-o", program)
    assert QEMU is not None
    levels = found(run(QEMU, "-L", SYSROOT, "-cpu", cpu, program, library))["levels"].split(",")
    assert levels[0] == level
    assert levels[-1] == "portable"
