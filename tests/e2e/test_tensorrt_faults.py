"""What the user reads where the library or the device fails: one line of what happened, with the
library's own words, and one of what to do."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.backends.cuda.device import opening
from edgespec.backends.cuda.device.opening import open_device
from edgespec.cli.main import run
from tests import shared
from tests.e2e.tensorrt_pairs import NATIVE, SIZES, TREES, exported
from tests.e2e.workshop import Cli, Outcome, cli, infer
from tests.tensorrt_simulator.device import HostDevice
from tests.tensorrt_simulator.installed import install
from tests.tensorrt_simulator.library import Engine, Simulator

__all__ = ["cli"]

BUG, DAMAGED, ENVIRONMENT = 1, 3, 4
SMALL_DISK = 300_000  # bytes: more than the graph, less than the engine


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> Simulator:
    return install(monkeypatch, NATIVE)


@pytest.fixture
def engines(trt: Simulator, tmp_path: Path) -> Path:
    """A plain engine."""

    def make(out: Path) -> None:
        line = ["build", "--onnx-dir", exported("eagle3")[0], "--engine-dir", out, *SIZES, *TREES]
        assert run([str(arg) for arg in (*line, "--backend", "tensorrt", "--compute", "fp32")]) == 0

    made = shared.made_once(("simulated engine", NATIVE), make)
    return Path(shutil.copytree(made, tmp_path / "engines"))


@pytest.fixture
def failed(cli: Cli, engines: Path, tmp_path: Path) -> Callable[[], Outcome]:
    return lambda: cli(*infer(engines, tmp_path))


FAULTS = {
    "deserialize_cuda_engine": (0, ENVIRONMENT, "not enough memory to load", "OutOfMemory"),
    "create_execution_context": (1, ENVIRONMENT, "no execution context", "out of memory"),
}


def test_a_driver_that_is_too_old_is_told_of(trt: Simulator, failed: Callable[[], Outcome]) -> None:
    """In the words of TensorRT-RTX 1.7 where no driver is (`tests/tensorrt/test_runtime.py`)."""
    trt.faults.after["deserialize_cuda_engine"] = 0
    trt.faults.words["deserialize_cuda_engine"] = (
        "IRuntime::deserializeCudaEngine: Error Code 1: Cuda Runtime (In ScopedCudaStream at"
        " cudaResources.cpp:25 (cudaError 35: CUDA driver version is insufficient for CUDA runtime"
        " version))"
    )
    found = failed()
    assert found.code == ENVIRONMENT, found.err
    assert "CUDA does not work here" in found.err
    assert "driver version is insufficient" in found.err
    assert "Install NVIDIA's driver" in found.err


@pytest.mark.parametrize("call", FAULTS)
def test_an_engine_that_cannot_be_opened(
    trt: Simulator, failed: Callable[[], Outcome], call: str
) -> None:
    after, code, what, said = FAULTS[call]
    trt.faults.after[call] = after
    found = failed()
    assert found.code == code, found.err
    assert what in found.err
    assert said in found.err
    device = HostDevice.current
    assert device is not None
    assert device.closed
    assert not device.memory


@pytest.mark.parametrize(
    ("call", "said"),
    [("execute_async_v3", "an illegal memory access"), ("set_input_shape", "failed")],
)
def test_a_call_that_fails_in_the_middle(
    trt: Simulator, failed: Callable[[], Outcome], tmp_path: Path, call: str, said: str
) -> None:
    trt.faults.after[call] = 1
    found = failed()
    assert found.code == 5, found.err
    assert said in found.err + (tmp_path / "output.json").read_text()
    device = HostDevice.current
    assert device is not None
    assert not device.memory


def test_a_device_that_is_lost_in_the_middle_says_its_first_error(
    trt: Simulator,
    failed: Callable[[], Outcome],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    assert failed().code == 0
    made: list[HostDevice] = []

    def opened() -> HostDevice:
        made.append(HostDevice())
        made[-1].work_left = 60
        return made[-1]

    monkeypatch.setattr(opening, "open_device", opened)
    found = failed()
    assert found.code == 5, found.err
    said = found.err + (tmp_path / "output.json").read_text()
    assert "CUDA: an illegal memory access was encountered" in said
    assert "Run the command again" in said
    assert "Traceback" not in said
    assert [device.closed for device in made] == [True]
    assert [device.memory for device in made] == [{}]


@pytest.mark.parametrize(
    ("more", "what"),
    [(-1, "no memory to open"), (100_000, "no memory for a KV cache of 0.0 GB (128 tokens)")],
)
def test_a_device_without_room(
    trt: Simulator,
    failed: Callable[[], Outcome],
    monkeypatch: pytest.MonkeyPatch,
    more: int,
    what: str,
) -> None:
    assert failed().code == 0
    limit = trt.engines[-1].device_memory_size_v2 + more
    monkeypatch.setattr(opening, "open_device", lambda: HostDevice(limit))
    found = failed()
    assert found.code == ENVIRONMENT, found.err
    assert what in found.err
    assert "--max-kv-cache-capacity" in found.err
    device = HostDevice.current
    assert device is not None
    assert device.closed
    assert not device.memory


def test_an_engine_file_that_is_damaged(
    engines: Path, trt: Simulator, failed: Callable[[], Outcome]
) -> None:
    path = next(engines.glob("*.engine"))
    path.write_bytes(b"x" + path.read_bytes()[1:])
    found = failed()
    assert found.code == DAMAGED, found.err


def test_no_python_package_of_cuda(
    failed: Callable[[], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "open_device", open_device)
    monkeypatch.setattr(opening, "installed", lambda module: False)
    found = failed()
    assert found.code == ENVIRONMENT, found.err
    assert "no Python package of CUDA" in found.err
    assert "pip install 'edgespec[cuda]'" in found.err


def test_an_engine_whose_profiles_are_not_those_of_its_config(
    engines: Path, failed: Callable[[], Outcome]
) -> None:
    config = engines / "base_config.json"
    raw = json.loads(config.read_text())
    shapes = raw["backend_config"]["profiles"][0]["shapes"]["inputs_embeds"]
    shapes[1][1] -= 1
    config.write_text(json.dumps(raw))
    found = failed()
    assert found.code == DAMAGED, found.err


def test_a_build_that_runs_out_of_memory(cli: Cli, trt: Simulator, tmp_path: Path) -> None:
    trt.faults.after["build_serialized_network"] = 0
    base = exported("eagle3")[0]
    line = ["build", "--onnx-dir", base, "--engine-dir", tmp_path / "out", *SIZES, *TREES]
    found = cli(*line, "--backend", "tensorrt", "--compute", "fp32")
    assert found.code == ENVIRONMENT, found.err
    assert "OutOfMemory" in found.err
    assert not (tmp_path / "out").exists()


def test_an_engine_that_the_disk_has_no_room_for(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, NATIVE, own_process=True)
    base, out = exported("eagle3")[0], tmp_path / "out"
    line = ["build", "--onnx-dir", base, "--engine-dir", out, *SIZES, *TREES]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_DISK, limits[1]))  # of each file
    try:
        found = cli(*line, "--backend", "tensorrt", "--compute", "fp32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found.code == ENVIRONMENT, found.err
    assert "error: spec_base.engine: File too large" in found.err
    assert "raise the limit" in found.err
    assert not out.exists()


def test_a_timing_cache_that_cannot_be_kept_costs_no_engine(
    cli: Cli, trt: Simulator, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    line = ["build", "--onnx-dir", exported("eagle3")[0], "--engine-dir", tmp_path / "out"]
    to = ["--backend", "tensorrt", "--timing-cache", tmp_path / "file" / "below"]
    found = cli("--verbose", *line, *SIZES, *TREES, *to, "--compute", "fp32")
    assert found.code == 0, found.err
    assert "the timing cache is not kept" in found.err


def test_a_cache_that_is_not_written_in_place_is_refused(
    engines: Path, failed: Callable[[], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "get_aliased_input_tensor", lambda self, name: None)
    found = failed()
    assert found.code == ENVIRONMENT, found.err
    assert "does not write its cache in place" in found.err
