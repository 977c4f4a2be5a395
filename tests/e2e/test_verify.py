"""`edgespec verify` on engines as they are, and on broken ones, which it finds; on ONNX Runtime and
on the simulated TensorRT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec import bundle
from edgespec.backends.ort.runner import OrtRunner
from edgespec.backends.tensorrt.caches import KvCache, Rows
from edgespec.cli.main import run
from tests import shared
from tests.e2e.test_tensorrt_simulated import NATIVE, PORTABLE, SIZES, TREES, exported
from tests.e2e.workshop import Cli, Outcome, cli
from tests.tensorrt_simulator.installed import install
from tests.tensorrt_simulator.library import Context

__all__ = ["cli"]

DAMAGED = 3


def built(name: str, *options: str) -> Path:
    """The engines of a pair, made once."""

    def make(out: Path) -> None:
        for component in exported(name):
            line = ["build", "--onnx-dir", component, "--engine-dir", out, *SIZES, *TREES, *options]
            assert run([str(arg) for arg in line]) == 0

    return shared.made_once(("engines to verify", name, options), make)


def simulated(monkeypatch: pytest.MonkeyPatch, version: str, name: str = "eagle3") -> Path:
    """The same with the simulator, which stays installed."""
    install(monkeypatch, version)
    with pytest.MonkeyPatch.context():
        key = ("simulated engines to verify", name, version)

        def make(out: Path) -> None:
            flags = ["--backend", "tensorrt", "--compute", "fp32", *SIZES, *TREES]
            for component in exported(name):
                line = ["build", "--onnx-dir", component, "--engine-dir", out, *flags]
                assert run([str(arg) for arg in line]) == 0

        return shared.made_once(key, make)


@pytest.fixture
def verify(cli: Cli, tmp_path: Path) -> Callable[..., tuple[Outcome, dict[str, Any]]]:
    """Runs the command on engines of a pair, with the exports; its outcome and its result file."""

    def verified(
        engines: Path, *options: object, name: str | None = "eagle3"
    ) -> tuple[Outcome, dict[str, Any]]:
        exports = [] if name is None else [f"--onnx-dir={path}" for path in exported(name)]
        result = tmp_path / "result.json"
        line = ["verify", "--engine-dir", engines, *exports, "--output-file", result, *options]
        done = cli(*line)
        assert result.is_file(), done.err
        return done, json.loads(result.read_text())

    return verified


Verify = Callable[..., tuple[Outcome, dict[str, Any]]]


def outcomes(report: dict[str, Any]) -> dict[str, str]:
    """The outcome of each check, by role and name."""
    found = {
        f"{role}: {check['check']}": check["outcome"]
        for role, engine in report["engines"].items()
        for check in engine["checks"]
    }
    return found | {check["check"]: check["outcome"] for check in report["checks"]}


def detail(report: dict[str, Any], role: str, name: str) -> str:
    """What a check of an engine says."""
    checks = report["engines"][role]["checks"]
    return next(check["detail"] for check in checks if check["check"] == name)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("eagle3", ()),
        ("eagle3", ("--max-batch-size", "2")),
        ("dflash", ()),
        ("mtp", ("--max-batch-size", "2")),
    ],
)
def test_engines_that_are_right_pass_every_check(
    verify: Verify, name: str, options: tuple[str, ...]
) -> None:
    done, report = verify(built(name, *options), name=name)
    assert done.code == 0, done.out
    assert set(outcomes(report).values()) == {"passed"}
    assert report["failed"] == report["not_run"] == 0
    assert report["passed"] == len(outcomes(report))
    assert "passed   base   golden outputs: differ by" in done.out
    assert report["engines"]["base"]["checks"][-1]["step_16_s"] > 0


def test_the_result_has_what_a_report_needs_and_no_paths(verify: Verify, tmp_path: Path) -> None:
    engines = built("eagle3")
    done, report = verify(engines, "--json")
    assert json.loads(done.out) == report
    manifest = json.loads((engines / bundle.MANIFEST).read_text())
    for role, entry in manifest["engines"].items():
        found = report["engines"][role]["files"]
        assert {name: file["sha256"] for name, file in found.items()} == {
            name: file["sha256"] for name, file in entry["files"].items()
        }
        assert report["engines"][role]["device"]["onnxruntime"]
        assert report["engines"][role]["memory_bytes"]["kv_cache"] > 0
    text = json.dumps(report)
    for private in (
        str(engines),
        str(tmp_path),
        str(Path.home()) + "/",
        str(exported("eagle3")[0]),
    ):
        assert private not in text


def test_without_exports_the_golden_outputs_are_not_run(verify: Verify) -> None:
    done, report = verify(built("eagle3"), name=None)
    assert done.code == 0
    assert outcomes(report)["base: golden outputs"] == "not run"
    assert "--onnx-dir" in detail(report, "base", "golden outputs")
    assert "2 not run" in done.out


def test_a_changed_weight_is_found(verify: Verify, tmp_path: Path) -> None:
    """With a manifest that has the hash of the changed file."""
    engines = Path(shutil.copytree(built("eagle3"), tmp_path / "engines"))
    data = engines / "spec_base.onnx.data"
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2 // 4 * 4 + 3] ^= 0x40  # the exponent of a float32
    data.write_bytes(raw)
    path = engines / bundle.MANIFEST
    manifest = json.loads(path.read_text())
    entry = manifest["engines"]["base"]["files"][data.name]
    entry |= {"sha256": bundle.sha256_file(data), "mtime_ns": data.stat().st_mtime_ns}
    path.write_text(json.dumps(manifest))
    done, report = verify(engines)
    assert done.code == DAMAGED
    assert outcomes(report)["base: golden outputs"] == "failed"
    assert outcomes(report)["draft: golden outputs"] == "passed"


def test_a_runner_that_moves_its_rows_is_found(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = OrtRunner.run

    def run_and_spill(self: OrtRunner, call: Any) -> Any:
        found = real(self, call)
        self.slab[:, call.first_lane, :, call.width] = 1.0  # the row behind its own
        return found

    monkeypatch.setattr(OrtRunner, "run", run_and_spill)
    done, report = verify(built("eagle3"))
    assert done.code == DAMAGED
    assert outcomes(report)["base: cache, lane 0"] == "failed"
    assert "lane 0, row 7 was changed" in detail(report, "base", "cache, lane 0")


def test_an_export_of_another_engine_is_refused(cli: Cli, tmp_path: Path) -> None:
    line = ["verify", "--engine-dir", built("eagle3"), "--onnx-dir", exported("dflash")[0]]
    done = cli(*line, "--output-file", tmp_path / "result.json")
    assert done.code == DAMAGED
    assert "has no engine of" in done.err
    assert not (tmp_path / "result.json").exists()


# ---- TensorRT, simulated


@pytest.mark.parametrize("version", [NATIVE, PORTABLE])
def test_engines_of_the_simulated_library_pass(
    verify: Verify, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    done, report = verify(simulated(monkeypatch, version))
    assert done.code == 0, done.out
    found = outcomes(report)
    aliases = "passed" if version == NATIVE else "not run"
    assert found.pop("base: aliases") == found.pop("draft: aliases") == aliases
    assert set(found.values()) == {"passed"}
    assert report["engines"]["base"]["settings"]["version"] == version
    assert report["engines"]["base"]["device"]["driver"] == "13.0"
    assert report["engines"]["base"]["memory_bytes"]["work"] > 0


def test_rows_that_the_runner_copies_to_a_wrong_place_are_found(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, real = simulated(monkeypatch, PORTABLE), KvCache.append

    def append(self: KvCache, lane: int, start: int, source: Rows, count: int) -> None:
        real(self, lane, start + 1, source, count)

    monkeypatch.setattr(KvCache, "append", append)
    done, report = verify(engines)
    assert done.code == DAMAGED
    assert outcomes(report)["base: cache, lane 0"] == "failed"
    assert "row 4 was not written" in detail(report, "base", "cache, lane 0")


def test_an_engine_that_writes_a_wrong_row_is_found(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = simulated(monkeypatch, NATIVE)
    real = Context.work

    def work(self: Context, device: Any, shapes: Any, addresses: Any, memory: Any) -> None:
        real(self, device, shapes, addresses, memory)
        for output, source in self.engine.header["aliases"].items():
            dims = shapes[source]
            size = int(np.prod(dims)) * 4
            rows = device.at(addresses[output], size).view(np.float32).reshape(dims)
            rows[:, :, 20] = 0.5

    monkeypatch.setattr(Context, "work", work)
    done, report = verify(engines)
    assert done.code == DAMAGED
    assert outcomes(report)["base: cache, lane 0"] == "failed"
    assert "lane 0, row 20 was changed" in detail(report, "base", "cache, lane 0")
