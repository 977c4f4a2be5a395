"""Runs the tests of the kernels on a library with AddressSanitizer and UBSan.

    python scripts/check_native.py

The library is compiled by GCC beside the sources of a copy in a temporary directory; the
sanitizers' runtime is preloaded, as Python itself has none. A finding ends the run. Among the tests
are those that cross compile the kernels for ARM and run them in QEMU, without sanitizers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NATIVE = Path("edgespec/backends/ort/native")
FLAGS = (
    "-O1 -g1 -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all"
    " -fno-omit-frame-pointer"
)


def runtimes() -> str:
    """The paths of the sanitizers' libraries of the compiler, as LD_PRELOAD takes them. SystemExit
    where it has none."""
    compiler = os.environ.get("CXX", "g++").split()[0]
    paths = []
    for name in ("libasan.so", "libubsan.so"):
        asked = [compiler, f"-print-file-name={name}"]
        path = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(path).is_absolute():
            sys.exit(f"{compiler} has no {name}: set CXX to a GCC that has its sanitizers")
        paths.append(path)
    return " ".join(paths)


def main() -> int:
    preloaded = runtimes()
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for name in ("edgespec", "tests"):
            ignored = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
            shutil.copy(ROOT / name, copy)
        environ = {**os.environ, "EDGESPEC_KERNEL_FLAGS": FLAGS}
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(build, cwd=copy, env=environ, check=True)
        if not list((copy / NATIVE).glob("*.so")):
            print("the library could not be compiled", file=sys.stderr)
            return 1
        environ |= {
            "LD_PRELOAD": preloaded,
            "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps what it has until the end
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONPATH": str(copy),
        }
        tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-rs"]
        # pytest would keep a finding's report to itself, or report its end by a signal instead
        tests += ["--capture=sys", "-p", "no:faulthandler"]
        found = subprocess.run([*tests, "tests/unit/backends/ort/native"], cwd=copy, env=environ)
        return found.returncode


if __name__ == "__main__":
    sys.exit(main())
