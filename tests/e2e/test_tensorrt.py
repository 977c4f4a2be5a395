"""`edgespec build` for TensorRT without TensorRT: what it plans, what it writes for a device, and
what it refuses."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgespec.backends.onnx_dir import open_onnx_dir
from edgespec.backends.tensorrt.options import TensorRTOptions
from edgespec.backends.tensorrt.staging import check_device, checked_model, plan_of
from edgespec.backends.tensorrt.target import Dialect
from edgespec.backends.tensorrt.versions import RTX, TENSORRT, Library
from edgespec.cli.main import run
from edgespec.contract import Limits
from edgespec.errors import BuildError, EnvironmentProblem, MissingDependency
from tests import toys
from tests.e2e.workshop import Cli, cli

__all__ = ["cli"]

LIMITS = ["--max-input-len", "24", "--max-kv-cache-capacity", "40", "--max-verify-tree-size", "8"]
USAGE, INVALID, ENVIRONMENT = 2, 3, 4


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tensorrt")
    base = toys.make_base(path / "base", "llama", layers=7)
    assert run(["export", str(base), str(path / "onnx"), "--eagle-base"]) == 0
    return path / "onnx" / "llm"


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither library, even where one is installed, and no CUDA device."""

    def missing(library: Library) -> None:
        raise MissingDependency(f"{library.title} cannot be imported", library.remedy)

    monkeypatch.setattr("edgespec.backends.tensorrt.bindings.load", missing)
    monkeypatch.setattr("edgespec.backends.tensorrt.staging.device_here", lambda: None)
    monkeypatch.setattr("edgespec.backends.tensorrt.backend.device_here", lambda: None)


def args(export: Path, engines: Path, backend: str, *more: object) -> list[object]:
    files = ["--onnx-dir", export, "--engine-dir", engines]
    return ["build", *files, "--backend", backend, *LIMITS, *more]


def for_version(version: str, sm: str = "SM110") -> list[str]:
    return ["--library-version", version, "--compute-capability", sm]


@pytest.mark.parametrize("library", [TENSORRT, RTX])
def test_without_the_library_the_build_says_what_to_install(
    export: Path, tmp_path: Path, cli: Cli, library: Library
) -> None:
    target = ["--compute-capability", "SM120"]
    done = cli(*args(export, tmp_path / "new", library.backend, *target))
    assert done.code == ENVIRONMENT
    assert f"{library.title} cannot be imported" in done.err
    assert library.remedy[:40] in done.err
    assert not (tmp_path / "new").exists()


def test_help_needs_no_library(cli: Cli) -> None:
    shown = cli("build", "--backend", "tensorrt-rtx", "--help")
    assert shown.code == 0
    assert "--compute-capability SM" in shown.out
    assert "--timing-cache" not in shown.out
    assert "--timing-cache FILE" in cli("build", "--backend", "tensorrt", "--help").out


@pytest.mark.parametrize(
    ("version", "dialect", "slots"), [("10.13.3.9", "portable", 64), ("10.16", "native", 64)]
)
def test_a_dry_run_says_what_would_be_built_and_writes_nothing(
    export: Path, tmp_path: Path, cli: Cli, version: str, dialect: str, slots: int
) -> None:
    done = cli(*args(export, tmp_path / "new", "tensorrt", "--dry-run", *for_version(version)))
    assert done.code == 0, done.err
    assert f"{dialect} graph" in done.out
    assert f"{slots} cache slots" in done.out
    assert "SM110 (Jetson Thor)" in done.out
    assert "profile prefill: inputs_embeds 1x1x64|1x24x64|1x24x64" in done.out
    assert "profile generation: inputs_embeds 1x1x64|1x8x64|1x8x64" in done.out
    assert "memory on the device" in done.out
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_is_there_for_every_backend(export: Path, tmp_path: Path, cli: Cli) -> None:
    done = cli(*args(export, tmp_path / "new", "ort", "--dry-run", "--json"))
    assert json.loads(done.out)["role"] == "base"
    done = cli(*args(export, tmp_path / "new", "ort", "--dry-run", "--max-input-len", "50"))
    assert (done.code, "exceeds --max-kv-cache-capacity" in done.err) == (INVALID, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("backend", "more", "code", "said"),
    [
        ("tensorrt", for_version("10.3"), ENVIRONMENT, "10.13 to 10.16"),
        ("tensorrt", ["--library-version", "10.16"], ENVIRONMENT, "--compute-capability SM120"),
        ("tensorrt", ["--compute-capability", "SM110"], ENVIRONMENT, "--library-version"),
        ("tensorrt", [*for_version("10.16", "SM75"), "--compute", "bf16"], INVALID, "bfloat16"),
        ("tensorrt-rtx", for_version("1.7"), USAGE, "SM75, SM80, SM86, SM89, SM120, SM121"),
        ("tensorrt", for_version("10.16", "Thor"), USAGE, "SM120, or as 12.0"),
    ],
)
def test_what_cannot_be_built_is_refused_before_any_work(
    export: Path, tmp_path: Path, cli: Cli, backend: str, more: list[str], code: int, said: str
) -> None:
    done = cli(*args(export, tmp_path / "new", backend, "--dry-run", *more))
    assert (done.code, said in done.err) == (code, True), done.err
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_breaks_a_rule_of_its_version_is_refused(export: Path) -> None:
    """The native dialect for a version that has none of its operators."""
    onnx_dir = open_onnx_dir(export)
    options = TensorRTOptions(sm=110)
    limits = Limits(max_input_len=24, max_kv_cache_capacity=40)
    plan = plan_of(TENSORRT, onnx_dir, limits, options, "10.13.3.9")
    native = replace(plan, target=replace(plan.target, dialect=Dialect.NATIVE))
    with pytest.raises(BuildError) as error:
        checked_model(onnx_dir, native)
    assert "breaks rules of NVIDIA TensorRT 10.13" in error.value.what
    assert "TensorScatter" in error.value.what


def test_a_compiler_that_needs_a_driver_for_quantized_weights_is_not_started(export: Path) -> None:
    onnx_dir = open_onnx_dir(export)
    limits, options = Limits(max_input_len=24), TensorRTOptions(sm=120)
    for version, refused in (("1.4", True), ("1.7", False)):
        plan = plan_of(RTX, onnx_dir, limits, options, version)
        check_device(plan)
        quantized = replace(plan, schemes=("fp8",))
        if not refused:
            check_device(quantized)
            continue
        with pytest.raises(EnvironmentProblem, match="no quantized weights where no CUDA device"):
            check_device(quantized)


def test_a_build_takes_no_other_version_than_the_installed_one(
    export: Path, tmp_path: Path, cli: Cli
) -> None:
    done = cli(*args(export, tmp_path / "new", "tensorrt", *for_version("10.16")))
    assert (done.code, "for --dry-run and --emit-onnx" in done.err) == (USAGE, True)


def test_an_emitted_graph_needs_nothing_else(export: Path, tmp_path: Path, cli: Cli) -> None:
    """The directory moves to a device: every byte of its weights is in it, none is a link."""
    out = tmp_path / "for-thor"
    emit = ["--emit-onnx", out, "--opt-level", "2", "--workspace-mib", "512"]
    done = cli(*args(export, tmp_path / "new", "tensorrt", *emit, *for_version("10.13.3.9")))
    assert done.code == 0, done.err
    assert not any(path.is_symlink() for path in out.iterdir())
    moved = out.rename(tmp_path / "moved")
    model = onnx.load(moved / "model.onnx")
    weights = [onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer]
    assert any(array.size > 1000 and np.any(array) for array in weights)
    script = moved / "build.sh"
    assert script.read_text().rstrip() in done.out
    lines = shlex.split(script.read_text().replace("\\\n", " "), comments=True)
    words = lines[lines.index("trtexec") :]
    assert words[1:4] == ["--onnx=model.onnx", "--saveEngine=spec_base.engine", "--stronglyTyped"]
    assert {"--memPoolSize=workspace:512", "--builderOptimizationLevel=2"} < set(words)
    assert [word for word in words if word.startswith("--profile=")] == [
        "--profile=0",
        "--profile=1",
    ]
    inputs = {value.name for value in model.graph.input}
    (most, _) = (word for word in words if word.startswith("--maxShapes="))
    named = {part.split(":")[0] for part in most.removeprefix("--maxShapes=").split(",")}
    assert named <= inputs
    assert "__LUNOWUD=-peep:fc_h_fusion=off" in lines  # the fault of this version's compiler
    assert subprocess.run(["sh", "-n", str(script)], check=False).returncode == 0
    assert not (tmp_path / "new").exists()


def test_a_graph_for_rtx_is_built_by_its_own_tool(export: Path, tmp_path: Path, cli: Cli) -> None:
    out = ["--emit-onnx", tmp_path / "out", *for_version("1.7", "SM89")]
    done = cli(*args(export, tmp_path / "new", "tensorrt-rtx", *out))
    assert done.code == 0, done.err
    words = shlex.split((tmp_path / "out" / "build.sh").read_text().replace("\\\n", " "))
    assert "tensorrt_rtx" in words
    assert "--computeCapabilities=89" in words
    assert "--stronglyTyped" not in words
    assert "export" not in words


def test_an_emitted_graph_goes_over_nothing(export: Path, tmp_path: Path, cli: Cli) -> None:
    emit = args(export, tmp_path / "new", "tensorrt", *for_version("10.16"), "--emit-onnx")
    done = cli(*emit, export)
    assert (done.code, "is an input" in done.err) == (INVALID, True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    assert cli(*emit, tmp_path / "mine").code == ENVIRONMENT
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
