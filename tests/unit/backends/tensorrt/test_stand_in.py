"""The real Python packages of CUDA on a stand-in of its driver: the tests that a device would run
run on it in a process of their own. It is no GPU (`tests/cuda_stand_in`)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.backends.tensorrt.device.opening import PACKAGES, Package, installed
from tests.cuda_stand_in.built import environment, stand_in

ROOT = Path(__file__).parents[4]
NAMES = ("device", "device_faults", "kernels", "kernel_values")
FILES = [f"tests/tensorrt/test_{name}.py" for name in NAMES]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_what_a_device_would_run(package: Package) -> None:
    name, module = package.name, package.module
    if not installed(module):
        pytest.skip(f"{name} is not installed: its calls are not made")
    line = [sys.executable, "-m", "pytest", "-p", "tests.cuda_stand_in.plugin", "-p"]
    line += ["no:cacheprovider", "-v", "-rs", "-m", "gpu", "-k", name, *FILES]
    done = subprocess.run(
        line, cwd=ROOT, env=environment(stand_in()), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r" \d+ passed", done.stdout), done.stdout
    skipped = re.findall(r"^SKIPPED.*", done.stdout, re.MULTILINE)
    assert all("has no graphs" in line for line in skipped), done.stdout
