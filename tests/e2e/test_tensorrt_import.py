"""The trtexec way: a graph that --emit-onnx wrote, the engine that its build.sh builds on the
device, and `edgespec import`, which makes an engine directory of both."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgespec.cli.main import run
from tests import shared
from tests.e2e.tensorrt_pairs import PORTABLE, SIZES, TREES, built, exported, tokens
from tests.e2e.workshop import Cli, cli
from tests.tensorrt_simulator import trtexec
from tests.tensorrt_simulator.installed import install

__all__ = ["cli"]

INVALID, ENVIRONMENT = 3, 4
TO = ("--backend", "tensorrt", "--compute", "fp16")


def emitted(out: Path) -> None:
    """Both graphs of the EAGLE-3 pair, and their engines."""
    trtexec.install(out / "bin", PORTABLE)
    for component, name in zip(exported("eagle3"), ("base", "draft"), strict=True):
        place = ["--onnx-dir", component, "--engine-dir", out / "none", "--emit-onnx", out / name]
        assert run([str(arg) for arg in ("build", *place, *SIZES, *TREES, *TO)]) == 0
        build(out, name)


def build(device: Path, name: str) -> None:
    """What the user runs on the device."""
    env = os.environ | {"PATH": f"{device / 'bin'}:{os.environ['PATH']}"}
    subprocess.run(["sh", str(device / name / "build.sh")], env=env, check=True)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where both directories lie on the device."""
    install(monkeypatch, PORTABLE)
    made = shared.made_once("emitted pair", emitted)
    return Path(shutil.copytree(made, tmp_path / "device"))


def imported(cli: Cli, device: Path, *names: str) -> tuple[int, str]:
    done = cli("import", *(device / name for name in names), "--engine-dir", device / "engines")
    return done.code, done.out + done.err


def test_imported_engines_are_those_that_a_build_makes(
    cli: Cli, device: Path, tmp_path: Path
) -> None:
    for name in ("base", "draft"):  # the graph is not needed any more
        for file in ("model.onnx", "model.onnx.data"):
            (device / name / file).unlink(missing_ok=True)
    code, said = imported(cli, device, "base", "draft")
    assert code == 0, said
    assert said.count("golden outputs approached") == 2
    directly = built(cli, "eagle3", tmp_path / "built", *TO)
    names = [
        sorted(path.name for path in place.iterdir()) for place in (device / "engines", directly)
    ]
    golden = ["spec_base.golden.safetensors", "spec_draft.golden.safetensors"]
    assert names[0] == sorted([*names[1], *golden])  # which `verify` reads
    for config in ("base_config.json", "draft_config.json"):
        both = [json.loads((d / config).read_bytes()) for d in (device / "engines", directly)]
        assert both[0] == both[1]
    assert cli("inspect", device / "engines", "--verify").code == 0
    found = tokens(cli, device / "engines", tmp_path, "--spec-decode", "--check-lossless")
    assert found == tokens(cli, directly, tmp_path)


def without_engine(base: Path) -> None:
    (base / "spec_base.engine").unlink()


def truncated(base: Path) -> None:
    data = (base / "spec_base.engine").read_bytes()
    (base / "spec_base.engine").write_bytes(data[:10])


def of_another_graph(base: Path) -> None:
    shutil.copy(base.parent / "draft" / "spec_draft.engine", base / "spec_base.engine")


def changed_config(base: Path) -> None:
    (base / "config.json").write_bytes((base / "config.json").read_bytes() + b" ")


def without_tokenizer(base: Path) -> None:
    (base / "tokenizer.json").unlink()


FAULTS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "no engine": (without_engine, "no engine was built from the graph yet", "build.sh"),
    "half an engine": (truncated, "spec_base.engine", "of this machine: sh build.sh"),
    "another engine": (of_another_graph, "config.json: inputs and outputs", "sh build.sh"),
    "another config": (changed_config, "config.json", "make the directory again"),
    "no tokenizer": (without_tokenizer, "tokenizer.json is missing", "make it again"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_imported_leaves_nothing(cli: Cli, device: Path, name: str) -> None:
    spoil, what, remedy = FAULTS[name]
    spoil(device / "base")
    code, said = imported(cli, device, "base")
    assert (code, what in said, remedy in said) == (INVALID, True, True), said
    assert not (device / "engines").exists()


def test_an_engine_that_computes_something_else_is_not_kept(cli: Cli, device: Path) -> None:
    weights = device / "base" / "model.onnx.data"
    values = np.frombuffer(weights.read_bytes(), np.uint8).copy()
    values[len(values) // 2 :] = 0
    weights.write_bytes(values.tobytes())
    build(device, "base")
    code, said = imported(cli, device, "base")
    assert (code, "cosine" in said) == (INVALID, True), said
    assert not (device / "engines").exists()


def test_without_the_device_nothing_is_imported(
    cli: Cli, device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.backends.tensorrt.backend.device_here", lambda: None)
    code, said = imported(cli, device, "base")
    assert (code, "no CUDA device is here" in said) == (ENVIRONMENT, True), said


def test_other_commands_say_what_the_directory_is(cli: Cli, device: Path, tmp_path: Path) -> None:
    base, remedy = device / "base", "edgespec import"
    for line in (
        ["build", "--onnx-dir", base, "--engine-dir", tmp_path / "new"],
        ["infer", "--engine-dir", base, "--prompt", "one"],
        ["inspect", base],
    ):
        done = cli(*line)
        assert (done.code, remedy in done.err) == (INVALID, True), done.err
    assert imported(cli, exported("eagle3")[0].parent, "llm")[0] == INVALID
