"""The runtime's half of TensorRT-RTX where no GPU is: how far it goes, and what a user reads.

An engine is compiled here, and cannot be opened here: so nothing behind that is tried.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.main import run
from tests import toys
from tests.e2e.workshop import Cli, asked, cli, infer
from tests.tensorrt import rtx

__all__ = ["cli"]

pytestmark = pytest.mark.tensorrt
ENVIRONMENT, DAMAGED = 4, 3


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    rtx.bindings()
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("a driver is here")


# `OpenEngine` on an engine of a small graph, whole and damaged, in a process of its own
OPENED = """
import json, os, sys, tempfile
from pathlib import Path
from edgespec.backends.tensorrt import bindings, execution
from edgespec.backends.tensorrt.versions import RTX
from edgespec.backends.cuda.workspace import Workspace
from edgespec.errors import EdgeSpecError
from tests.tensorrt import same_calls
from tests.tensorrt_simulator.device import HostDevice
found, directory = bindings.load(RTX), Path(tempfile.mkdtemp())
bench = same_calls.Bench(found.trt, directory)
config = bench.config(same_calls.WHOLE)
whole = bytes(memoryview(bench.builder.build_serialized_network(bench.network(), config)))
cases = {"whole": whole, "damaged": b"x" + whole[1:], "cut": whole[:5000], "empty": b""}
for name, data in cases.items():
    path = directory / name
    path.write_bytes(data)
    try:
        execution.OpenEngine(found, path, None, (), Workspace(HostDevice()))
    except EdgeSpecError as error:
        said = [name, type(error).__name__, error.exit_code, error.what, error.remedy]
    print(json.dumps(said), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def opened() -> dict[str, list[Any]]:
    done = subprocess.run(
        [sys.executable, "-c", OPENED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line[0]: line[1:] for line in lines}


def test_an_engine_that_is_whole_wants_a_driver(opened: dict[str, list[Any]]) -> None:
    kind, code, what, remedy = opened["whole"]
    assert (kind, code) == ("EnvironmentProblem", ENVIRONMENT)
    assert what.startswith("CUDA does not work here")
    assert "Cuda Runtime" in what
    assert "Install NVIDIA's driver" in remedy


@pytest.mark.parametrize(
    ("name", "said"), [("damaged", "magicTag"), ("cut", "plan.header.size"), ("empty", "is empty")]
)
def test_a_damaged_engine_is_damaged_here_too(
    opened: dict[str, list[Any]], name: str, said: str
) -> None:
    """And not told to be a matter of the driver, of which the library speaks as well."""
    kind, code, what, remedy = opened[name]
    assert (kind, code) == ("BundleError", DAMAGED)
    assert said in what
    assert "Build the engine again" in remedy


def test_commands_say_that_no_device_is_here(cli: Cli, tmp_path: Path) -> None:
    """Before the library is asked: the message is about the device, not about CUDA's number."""
    base = toys.make_base(tmp_path / "base", "llama", layers=1)
    assert run(["export", str(base), str(tmp_path / "onnx")]) == 0
    engines = tmp_path / "engines"
    line = ["build", "--onnx-dir", tmp_path / "onnx" / "llm", "--engine-dir", engines]
    sizes = ["--max-input-len", "32", "--max-kv-cache-capacity", "64"]
    more = ["--backend", "tensorrt-rtx", "--compute-capability", "SM120"]
    done = cli(*line, *sizes, *more)
    assert done.code == 0, done.err
    for command in (infer(engines, tmp_path, asked("one")), ["verify", "--engine-dir", engines]):
        found = cli(*command)
        assert found.code == ENVIRONMENT, found.err
        assert "no CUDA device is here" in found.err
        assert "Copy the engines to such a device." in found.err
