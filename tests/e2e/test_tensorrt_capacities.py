"""Engines for several cache lengths as their user meets them: built, listed, verified and used over
the simulated TensorRT; and what a build says of memory and of slow attention."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.call import Call, Result
from edgespec.backends.engine_config import EngineConfig
from edgespec.backends.tensorrt import devices, estimate
from edgespec.backends.tensorrt.runner import TensorRTRunner
from edgespec.cli.main import run
from edgespec.errors import BundleError
from edgespec.runtime.checks import token_check
from tests import shared
from tests.e2e.tensorrt_pairs import NATIVE, TREES, exported
from tests.e2e.workshop import Cli, Outcome, asked, cli, infer, responses
from tests.lossless.tensorrt_pairs import medusa
from tests.tensorrt_simulator.installed import install

__all__ = ["cli"]

USAGE, INVALID, ENVIRONMENT = 2, 3, 4
LENGTHS = ("--max-input-len", "80", "--max-kv-cache-capacity")
QUESTIONS = ("one", "three four five six seven eight nine ten")
TARGET = ("--library-version", "10.16", "--compute-capability", "SM110")


def build_line(component: Path, out: Path, capacities: str, *more: object) -> list[object]:
    dirs = ["--onnx-dir", component, "--engine-dir", out]
    return ["build", *dirs, *LENGTHS, capacities, *TREES, "--backend", "tensorrt", *more]


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a base and its draft, each for 48 and for 128 tokens."""
    install(monkeypatch, NATIVE)

    def make(out: Path) -> None:
        for component in exported("eagle3"):
            line = build_line(component, out, "128,48", "--compute", "fp32")
            assert run([str(arg) for arg in line]) == 0

    made = shared.made_once(("engines of two lengths", NATIVE), make)
    return Path(shutil.copytree(made, tmp_path / "engines"))


def answers(cli: Cli, engines: Path, tmp_path: Path, *more: object) -> tuple[Outcome, list[object]]:
    line = infer(engines, tmp_path, *map(asked, QUESTIONS), max_generate_length=20)
    done = cli(*line, *more)
    assert done.code == 0, done.err
    return done, [answer["output_ids"] for answer in responses(tmp_path)]


def test_a_request_is_answered_by_the_smallest_engine_that_holds_it(
    cli: Cli, engines: Path, tmp_path: Path
) -> None:
    reference = tmp_path / "ort"
    for component in exported("eagle3"):
        dirs = ["--onnx-dir", component, "--engine-dir", reference]
        assert cli("build", *dirs, *LENGTHS, "128", *TREES).code == 0
    _, expected = answers(cli, reference, tmp_path)
    done, found = answers(cli, engines, tmp_path, "--verbose")
    assert found == expected
    assert "opened the engine for up to 128 tokens" in done.err
    assert answers(cli, engines, tmp_path, "--spec-decode", "--check-lossless")[1] == expected


def test_a_directory_says_which_lengths_it_has(cli: Cli, engines: Path) -> None:
    names = {path.name for path in engines.glob("*.engine")}
    assert names == {
        *("spec_base.engine", "spec_base.48.engine"),
        *("spec_draft.engine", "spec_draft.48.engine"),
    }
    config = EngineConfig.read(engines / "base_config.json")
    assert config.limits.capacities == (48, 128)
    assert config.at(48).settings["cache_slots"] < config.at(128).settings["cache_slots"]
    assert EngineConfig.from_dict(config.to_dict(), "again") == config
    shown = cli("inspect", engines)
    assert "an engine for each kv cache capacity: 48, 128" in shown.out
    raw = json.loads(cli("inspect", engines, "--json").out)["engines"]["draft"]
    assert raw["config"]["builder_config"]["smaller_kv_cache_capacities"] == [48]
    assert set(raw["config"]["smaller_backend_configs"]) == {"48"}
    assert "spec_draft.48.engine" in raw["files"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw["smaller_backend_configs"].pop("48"), "smaller_backend_configs"),
        (lambda raw: raw["builder_config"].pop("smaller_kv_cache_capacities"), "smaller_backend"),
        (
            lambda raw: raw["builder_config"].update(smaller_kv_cache_capacities=[128]),
            "smaller_kv_cache_capacities",
        ),
        (
            lambda raw: raw["builder_config"].update(smaller_kv_cache_capacities="48"),
            "smaller_kv_cache_capacities",
        ),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(
    cli: Cli, engines: Path, tmp_path: Path, change: object, said: str
) -> None:
    path = engines / "base_config.json"
    raw = json.loads(path.read_text())
    change(raw)  # type: ignore[operator]
    path.write_text(json.dumps(raw))
    with pytest.raises(BundleError, match=said):
        EngineConfig.read(path)
    done = cli(*infer(engines, tmp_path))
    assert done.code == INVALID, done.err


def test_an_engine_that_the_manifest_does_not_list_is_refused(
    cli: Cli, engines: Path, tmp_path: Path
) -> None:
    path = engines / "manifest.json"
    raw = json.loads(path.read_text())
    del raw["engines"]["base"]["files"]["spec_base.48.engine"]
    path.write_text(json.dumps(raw))
    done = cli(*infer(engines, tmp_path))
    assert (done.code, "spec_base.48.engine" in done.err) == (INVALID, True), done.err
    (engines / "spec_base.48.engine").unlink()
    done = cli(*infer(engines, tmp_path))
    assert (done.code, "does not list spec_base.48.engine" in done.err) == (INVALID, True)


def test_a_build_for_one_length_takes_the_others_away(cli: Cli, engines: Path) -> None:
    line = build_line(exported("eagle3")[0], engines, "96", "--compute", "fp32")
    done = cli(*line)
    assert done.code == 0, done.err
    assert not (engines / "spec_base.48.engine").exists()
    assert (engines / "spec_draft.48.engine").exists()


@pytest.fixture
def verify_line(engines: Path, tmp_path: Path) -> list[object]:
    exports = [f"--onnx-dir={path}" for path in exported("eagle3")]
    return ["verify", "--engine-dir", engines, *exports, "--output-file", tmp_path / "r.json"]


def test_verify_checks_the_engine_of_each_length(
    cli: Cli, verify_line: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_check, "MAX_TOKENS", 8)
    done = cli(*verify_line)
    assert done.code == 0, done.out
    report = json.loads((tmp_path / "r.json").read_text())
    names = {check["check"] for check in report["engines"]["base"]["checks"]}
    assert {"golden outputs, 48 tokens", "golden outputs, 128 tokens"} <= names
    assert {"cache, lane 0, 48 tokens", "cache, lane 0, 128 tokens"} <= names
    tokens = [check for check in report["checks"] if check["check"].startswith("tokens")]
    assert [check["check"] for check in tokens] == [
        *("tokens, greedy, 48 tokens", "tokens, sampled, 48 tokens"),
        *("tokens, greedy, 128 tokens", "tokens, sampled, 128 tokens"),
    ]
    assert {check["outcome"] for check in tokens} == {"passed"}


@pytest.mark.deep
def test_verify_finds_the_engine_of_one_length_that_is_wrong(
    cli: Cli, verify_line: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TensorRTRunner.run

    def broken(runner: TensorRTRunner, call: Call) -> list[Result]:
        """The engine of the larger length is wrong."""
        assert runner.cache is not None
        more = 1 if runner.cache.slots > 100 else 0
        return real(runner, replace(call, rope_sin=call.rope_sin + np.float32(more)))

    monkeypatch.setattr(TensorRTRunner, "run", broken)
    done = cli(*verify_line)
    assert done.code == INVALID, done.out
    failed = [text for text in done.out.splitlines() if text.startswith("failed")]
    assert failed
    assert all("128 tokens" in text for text in failed)


# ---- before a build


def test_a_dry_run_shows_each_length_with_its_memory(cli: Cli, tmp_path: Path) -> None:
    line = build_line(exported("eagle3")[0], tmp_path / "new", "48,128", "--dry-run", *TARGET)
    done = cli(*line)
    assert done.code == 0, done.err
    assert "KV cache of 1 sequence, each of 48 tokens" in done.out
    assert "KV cache of 1 sequence, each of 128 tokens" in done.out
    assert "64 cache slots" in done.out
    assert "192 cache slots" in done.out
    assert done.out.count("memory on the device") == 2
    assert "all 2 engines at once: about" in done.out
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("backend", "capacities", "more", "code", "said"),
    [
        ("ort", "48,128", (), INVALID, "Give the largest alone: 128"),
        ("tensorrt", "48,128,48", TARGET, INVALID, "Give each once"),
        ("tensorrt", "0,128", TARGET, INVALID, "--max-kv-cache-capacity is 0"),
        ("tensorrt", "48,many", TARGET, USAGE, "1024,4096"),
        ("tensorrt", "48,64", TARGET, INVALID, "--max-input-len 80 exceeds"),
    ],
)
def test_lengths_that_cannot_be_are_refused(
    cli: Cli,
    tmp_path: Path,
    backend: str,
    capacities: str,
    more: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    dirs = ["--onnx-dir", exported("eagle3")[0], "--engine-dir", tmp_path / "new"]
    line = ["build", *dirs, *LENGTHS, capacities, "--backend", backend, "--dry-run", *more]
    done = cli(*line)
    assert (done.code, said in done.err) == (code, True), done.err
    assert not (tmp_path / "new").exists()


def test_what_keeps_no_cache_has_one_engine(cli: Cli, tmp_path: Path) -> None:
    heads = medusa().draft
    done = cli(*build_line(heads, tmp_path / "new", "48,128", "--dry-run", *TARGET))
    assert done.code == 0, done.err
    assert "it keeps no cache: one engine does for every capacity" in done.out
    assert done.out.count("memory on the device") == 1


def test_a_graph_is_written_for_one_length(cli: Cli, tmp_path: Path) -> None:
    emit = ("--emit-onnx", tmp_path / "graph", *TARGET)
    done = cli(*build_line(exported("eagle3")[0], tmp_path / "new", "48,128", *emit))
    assert (done.code, "to a directory of its own" in done.err) == (INVALID, True), done.err
    assert list(tmp_path.iterdir()) == []


# ---- memory and attention


@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "build"])
def test_an_engine_without_room_on_its_device_is_refused_before_work(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry: bool
) -> None:
    trt = install(monkeypatch, NATIVE)
    monkeypatch.setattr(estimate, "memory_of", lambda sm: 1_000_000)
    more = ("--dry-run", *TARGET) if dry else ()
    line = build_line(exported("eagle3")[0], tmp_path / "new", "40000", "--compute", "fp16", *more)
    done = cli(*line)
    assert done.code == INVALID, done.err
    assert "do not fit: SM1" in done.err
    assert "1.0 MB" in done.err
    assert "Build with --max-kv-cache-capacity" in done.err
    assert not (tmp_path / "new").exists()
    assert trt.faults.calls["build_serialized_network"] == 0


def test_an_engine_whose_weights_alone_do_not_fit_is_to_be_quantized(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "memory_of", lambda sm: 1000)
    done = cli(*build_line(exported("eagle3")[0], tmp_path / "x", "128", "--dry-run", *TARGET))
    assert (done.code, "Quantize the checkpoint" in done.err) == (INVALID, True), done.err


def test_a_known_device_has_the_memory_of_its_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "device_here", lambda: None)
    assert devices.memory_of(110) == 128 << 30
    assert devices.memory_of(53) is None
    here = devices.DeviceModel("a small one", 120, "13.0", 8 << 30)
    monkeypatch.setattr(devices, "device_here", lambda: here)
    assert (devices.memory_of(120), devices.memory_of(110)) == (8 << 30, 128 << 30)


def test_what_may_not_fit_is_a_warning(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = build_line(exported("eagle3")[0], tmp_path / "new", "48,128", "--dry-run", *TARGET)
    before = cli(*line)
    assert "warning: about" not in before.out
    monkeypatch.setattr(estimate, "memory_of", lambda sm: 2_000_000)
    done = cli(*line)
    assert done.code == 0, done.err
    assert "warning: about" in done.out
    assert "lower --max-kv-cache-capacity, --max-input-len or --max-verify-tree-size" in done.out


def test_a_build_that_the_machine_cannot_hold_is_refused_before_work(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, NATIVE)
    monkeypatch.setattr(estimate, "machine_bytes", lambda: 1000)
    monkeypatch.setattr(estimate, "swap_bytes", lambda: 1000)
    line = build_line(exported("eagle3")[0], tmp_path / "new", "128", "--compute", "fp16")
    done = cli(*line)
    assert done.code == ENVIRONMENT, done.err
    assert "this machine has 0.0 MB" in done.err
    assert "quantize the checkpoint" in done.err
    assert not (tmp_path / "new").exists()
    # The graph for another machine is of no concern to this one's memory
    monkeypatch.setattr("edgespec.backends.tensorrt.staging.device_here", lambda: None)
    done = cli(*line, "--dry-run", *TARGET)
    assert done.code == 0, done.err


def test_a_build_that_may_be_too_large_for_the_machine_says_so(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, NATIVE)
    monkeypatch.setattr(estimate, "machine_bytes", lambda: 1_000_000)
    monkeypatch.setattr(estimate, "swap_bytes", lambda: 0)
    line = build_line(exported("eagle3")[0], tmp_path / "new", "128", "--compute", "fp16")
    done = cli(*line, "--dry-run")
    assert done.code == 0, done.err
    assert "warning: the build may take" in done.out


@pytest.mark.parametrize(
    ("sm", "flags"), [("SM110", "--compute bf16 or fp16"), ("SM75", "--compute fp16")]
)
def test_attention_in_float32_is_said_to_be_slow(
    cli: Cli, tmp_path: Path, sm: str, flags: str
) -> None:
    target = ("--library-version", "10.16", "--compute-capability", sm, "--dry-run")
    line = build_line(exported("eagle3")[0], tmp_path / "new", "128", *target)
    slow = f"attention in float32 has no fused kernel and is slow: build with {flags}"
    done = cli(*line, "--compute", "fp32")
    assert f"warning: {slow}\n" in done.out
    assert "slow" not in cli(*line, "--compute", "fp16").out


def test_a_build_says_of_slow_attention_before_it_begins(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trt = install(monkeypatch, NATIVE)
    trt.faults.after["build_serialized_network"] = 0
    done = cli(*build_line(exported("eagle3")[0], tmp_path / "x", "48,128", "--compute", "fp32"))
    assert done.code == ENVIRONMENT
    assert done.err.count("attention in float32 has no fused kernel and is slow") == 1
