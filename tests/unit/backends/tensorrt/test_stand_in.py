"""The real Python packages of CUDA on a stand-in of its driver: the tests that a device would run
run on it in a process of their own. It is no GPU (`tests/cuda_stand_in`)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.cuda import kernels
from edgespec.backends.cuda.device.opening import PACKAGES, Package, installed
from tests.cuda_stand_in.built import (
    TOO_LARGE,
    compiled,
    environment,
    needs_compiler,
    source_for_host,
)

ROOT = Path(__file__).parents[4]
NAMES = ("device", "device_faults", "kernels", "kernel_values", "runner_on_stand_in")
FILES = [f"tests/tensorrt/test_{name}.py" for name in NAMES]


def test_a_structure_that_differs_from_the_source_is_refused(tmp_path: Path) -> None:
    needs_compiler()
    fields = [("target", np.uint64), ("source", np.uint64), ("count", np.int32)]
    wrong = {**kernels.STRUCTURES, "convert": np.dtype(fields, align=True)}
    (tmp_path / "kernels.cpp").write_text(source_for_host(wrong), encoding="utf-8")
    with pytest.raises(AssertionError, match="convert: target"):
        compiled(tmp_path / "kernels.so", [tmp_path / "kernels.cpp"], [])


@pytest.mark.parametrize("which", ["not deep", pytest.param("deep", marks=pytest.mark.deep)])
@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_what_a_device_would_run(package: Package, which: str) -> None:
    name, module = package.name, package.module
    if not installed(module):
        pytest.skip(f"{name} is not installed: its calls are not made")
    line = [sys.executable, "-m", "pytest", "-p", "tests.cuda_stand_in.plugin", "-p"]
    line += ["no:cacheprovider", "-v", "-rs", "-m", f"gpu and {which}", "-k", name, *FILES]
    done = subprocess.run(
        line, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r" \d+ passed", done.stdout), done.stdout
    skipped = re.findall(r"^SKIPPED.*", done.stdout, re.MULTILINE)
    reasons = ("has no graphs", "pycuda tells it on stderr", TOO_LARGE)
    assert all(line.endswith(reasons) for line in skipped), done.stdout
