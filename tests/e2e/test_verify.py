"""`edgespec verify` on engines as they are, and on broken ones, which it finds; on ONNX Runtime and
on the simulated TensorRT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.artifacts import file_names, hashes
from edgespec.artifacts.component import ComponentConfig
from edgespec.backends.cuda.caches import KvCache, RowTable
from edgespec.backends.ort import runner
from edgespec.backends.ort.runner import OrtRunner
from edgespec.backends.tensorrt import staging
from edgespec.cli.main import run
from edgespec.contract import Role, canonical_contract
from edgespec.runtime.checks import token_check
from tests import shared, toys
from tests.e2e.tensorrt_pairs import NATIVE, PORTABLE, SIZES, TREES, exported
from tests.e2e.workshop import Cli, Outcome, asked, cli, infer
from tests.tensorrt_simulator.installed import install
from tests.tensorrt_simulator.library import simulator
from tests.tensorrt_simulator.wrong_results import GIVES, READS

__all__ = ["cli"]

DAMAGED = 3


def built(name: str, *options: str, version: str = "") -> Path:
    """The engines of a pair, made once."""

    def make(out: Path) -> None:
        for component in exported(name):
            line = ["build", "--onnx-dir", component, "--engine-dir", out, *SIZES, *TREES, *options]
            assert run([str(arg) for arg in line]) == 0

    return shared.made_once(("engines to verify", name, options, version), make)


def simulated(
    monkeypatch: pytest.MonkeyPatch, version: str, name: str = "eagle3", compute: str = "fp32"
) -> Path:
    """The same with the simulator, which stays installed."""
    install(monkeypatch, version)
    return built(name, "--backend", "tensorrt", "--compute", compute, version=version)


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are compared in two of the usual answers, at an eighth of their length."""
    monkeypatch.setattr(token_check, "MAX_TOKENS", 6)
    monkeypatch.setattr(token_check, "PROMPTS", token_check.PROMPTS[:2])


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
        pytest.param("eagle3", ("--max-batch-size", "2"), marks=pytest.mark.deep),
        ("dflash", ()),
        ("mtp", ("--max-batch-size", "2")),
    ],
)
def test_engines_that_are_right_pass_every_check(
    verify: Verify, name: str, options: tuple[str, ...]
) -> None:
    done, report = verify(built(name, *options), name=name)
    assert done.code == 0, done.out
    found = outcomes(report)
    measured = {name for name in found if found[name] == "measured"}
    assert measured == {f"{r}: {n}" for r in ("base", "draft") for n in ("kernels", "times")}
    assert {found[name] for name in found.keys() - measured} == {"passed"}
    assert report["failed"] == report["not_run"] == 0
    assert report["passed"] == len(found) - 4
    assert "passed    base   golden outputs: differ by" in done.out
    assert report["engines"]["base"]["checks"][-1]["step_16_s"] > 0


def test_the_result_has_what_a_report_needs_and_no_paths(verify: Verify, tmp_path: Path) -> None:
    engines = built("eagle3")
    done, report = verify(engines, "--json")
    assert json.loads(done.out) == report
    manifest = json.loads((engines / file_names.MANIFEST).read_text())
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
    assert "`onnx_dir`" in detail(report, "base", "golden outputs")
    assert "2 not run" in done.out


def test_a_changed_weight_is_found(verify: Verify, tmp_path: Path) -> None:
    """With a manifest that has the hash of the changed file."""
    engines = Path(shutil.copytree(built("eagle3"), tmp_path / "engines"))
    data = engines / "spec_base.onnx.data"
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2 // 4 * 4 + 3] ^= 0x40  # the exponent of a float32
    data.write_bytes(raw)
    path = engines / file_names.MANIFEST
    manifest = json.loads(path.read_text())
    entry = manifest["engines"]["base"]["files"][data.name]
    entry |= {"sha256": hashes.sha256_file(data), "mtime_ns": data.stat().st_mtime_ns}
    path.write_text(json.dumps(manifest))
    done, report = verify(engines)
    assert done.code == DAMAGED
    assert outcomes(report)["base: golden outputs"] == "failed"
    assert outcomes(report)["draft: golden outputs"] == "passed"


def test_a_runner_that_moves_its_rows_is_found(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, real = built("eagle3"), OrtRunner.run

    def run_and_spill(self: OrtRunner, call: Any) -> Any:
        found = real(self, call)
        self.slab[:, call.first_lane, :, call.width] = 1.0  # the row behind its own
        return found

    monkeypatch.setattr(OrtRunner, "run", run_and_spill)
    done, report = verify(engines)
    assert done.code == DAMAGED
    assert outcomes(report)["base: cache, lane 0"] == "failed"
    assert "lane 0, row 7 was changed" in detail(report, "base", "cache, lane 0")


def test_rows_that_see_what_they_must_not_are_found(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--max-batch-size", "2", "--kernels", "onnxruntime")
    engines, real = built("eagle3", *options), runner.attention_mask  # built as they should be

    def all_visible(call: Any, attention: Any, out: Any) -> Any:
        real(call, attention, out)[...] = True
        return out

    monkeypatch.setattr(runner, "attention_mask", all_visible)
    done, report = verify(engines)
    assert done.code == DAMAGED
    for lane in (0, 1):
        said = detail(report, "base", f"cache, lane {lane}")
        assert said.startswith("rows that no row sees change the logits")


def test_tokens_that_differ_with_drafts_are_found(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only calls of the size that verifies go wrong, and no golden call has that size."""
    engines, real = built("eagle3"), OrtRunner.run

    def wrong_in_one_size(self: OrtRunner, call: Any) -> Any:
        found = real(self, call)
        if self.contract.shape.role is Role.BASE and len(call.gather[0]) == 4:
            found[0].logits.array[:] = -found[0].logits.array
        return found

    monkeypatch.setattr(OrtRunner, "run", wrong_in_one_size)
    done, report = verify(engines)
    assert done.code == DAMAGED
    found = outcomes(report)
    assert found["base: golden outputs"] == "passed"
    assert found["tokens, greedy"] == found["tokens, sampled"] == "failed"


def test_requests_of_ones_own_are_compared(verify: Verify, tmp_path: Path) -> None:
    infer(built("eagle3"), tmp_path, asked("one two"), asked("word " * 80))
    _, report = verify(built("eagle3"), "--input-file", tmp_path / "input.json", name=None)
    (check,) = report["checks"]
    assert (check["check"], check["outcome"], check["answers"]) == ("tokens", "passed", 1)
    assert check["tokens"] == 8
    assert "1 request refused" in check["detail"]


def test_a_plain_engine_without_room_for_drafts_compares_no_tokens(
    cli: Cli, verify: Verify, tmp_path: Path
) -> None:
    base = toys.make_base(tmp_path / "base", "llama")
    assert run(["export", str(base), str(tmp_path / "onnx")]) == 0
    engines, export = tmp_path / "engines", tmp_path / "onnx" / "llm"
    line = ["build", "--onnx-dir", export, "--engine-dir", engines, *SIZES]
    assert cli(*line, "--max-verify-tree-size", "1").code == 0
    done, report = verify(engines, f"--onnx-dir={export}", name=None)
    assert done.code == 0
    found = outcomes(report)
    assert (found["llm: golden outputs"], found["tokens"]) == ("passed", "not run")


def test_an_engine_without_room_for_the_checks_is_not_judged(
    cli: Cli, verify: Verify, tmp_path: Path
) -> None:
    engines, export = tmp_path / "engines", exported("eagle3")[0]
    line = ["build", "--onnx-dir", export, "--engine-dir", engines, "--max-input-len", "4"]
    assert cli(*line, "--max-kv-cache-capacity", "6", "--max-verify-tree-size", "6").code == 0
    done, report = verify(engines, f"--onnx-dir={export}", name=None)
    assert done.code == 0
    found = outcomes(report)
    for name in ("golden outputs", "cache, lane 0", "times"):
        assert found[f"base: {name}"] == "not run"
        assert "slots" in detail(report, "base", name)


def test_an_export_of_another_engine_is_refused(cli: Cli, tmp_path: Path) -> None:
    line = ["verify", "--engine-dir", built("eagle3"), "--onnx-dir", exported("dflash")[0]]
    done = cli(*line, "--output-file", tmp_path / "result.json")
    assert done.code == DAMAGED
    assert "has no engine of" in done.err
    assert not (tmp_path / "result.json").exists()


# ---- TensorRT, simulated


@pytest.mark.parametrize(
    ("name", "version", "compute"),
    [
        ("eagle3", NATIVE, "fp32"),
        ("eagle3", NATIVE, "fp16"),
        pytest.param("eagle3", NATIVE, "bf16", marks=pytest.mark.deep),
        ("mtp", NATIVE, "fp16"),
        ("dflash", PORTABLE, "fp32"),
    ],
)
def test_engines_of_the_simulated_library_pass(
    verify: Verify, monkeypatch: pytest.MonkeyPatch, name: str, version: str, compute: str
) -> None:
    done, report = verify(simulated(monkeypatch, version, name, compute), name=name)
    assert done.code == 0, done.out
    found = outcomes(report)
    aliases = "passed" if version == NATIVE else "not run"
    assert found.pop("base: aliases") == found.pop("draft: aliases") == aliases
    assert set(found.values()) == {"passed", "measured"}
    assert "1 fused" in detail(report, "base", "kernels")
    assert report["engines"]["base"]["settings"]["version"] == version
    assert report["engines"]["base"]["device"]["driver"] == "13.0"
    memory = {role: report["engines"][role]["memory_bytes"] for role in ("base", "draft")}
    known = {"files", "kv_cache", "work"} | ({"weights"} if version == NATIVE else set())
    assert memory["draft"].keys() == known
    assert memory["base"].keys() == known | ({"recurrent_state"} if name == "mtp" else set())
    assert min(memory["base"].values()) > 0
    assert memory["base"]["files"] > memory["base"].get("weights", 0)
    if name == "mtp":  # both places of the state, and the rows before the convolution
        contract = canonical_contract(
            ComponentConfig.read(exported(name)[0] / file_names.CONFIG).graph
        )
        assert memory["base"]["recurrent_state"] > 2 * contract.state_bytes


def test_an_engine_that_was_built_elsewhere_brings_its_golden_outputs(
    cli: Cli, verify: Verify, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, NATIVE)
    monkeypatch.setattr(staging, "unproven", lambda plan: "no CUDA device is here")
    engines, flags = tmp_path / "engines", ["--backend", "tensorrt", "--compute", "fp32"]
    for component in exported("eagle3"):
        line = ["build", "--onnx-dir", component, "--engine-dir", engines, *flags]
        done = cli(*line, *SIZES, *TREES)
        assert "not compared with the golden outputs: no CUDA device is here" in done.out
    done, report = verify(engines, name=None)
    assert done.code == 0, done.out
    assert outcomes(report)["base: golden outputs"] == "passed"
    assert outcomes(report)["draft: golden outputs"] == "passed"
    assert report["engines"]["base"]["checks"][0]["difference"] < 1e-4


def test_an_engine_that_the_library_cannot_open_is_in_the_report(
    verify: Verify, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engines = Path(shutil.copytree(simulated(monkeypatch, NATIVE), tmp_path / "engine"))
    library = install(monkeypatch, NATIVE)
    library.faults.after["deserialize_cuda_engine"] = 1  # the base is opened
    monkeypatch.chdir(tmp_path)
    done, report = verify(Path("engine"))
    assert done.code == DAMAGED
    found = outcomes(report)
    assert found["base: golden outputs"] == "passed"
    assert (found["draft: opening"], found["tokens"]) == ("failed", "not run")
    assert "OutOfMemory" in detail(report, "draft", "opening")
    assert report["engines"]["draft"]["files"]
    # The directory's name is a word of this sentence
    assert report["checks"][0]["detail"] == "not every engine can be opened"
    assert str(engines) not in json.dumps(report)


def test_rows_that_the_runner_copies_to_a_wrong_place_are_found(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, real = simulated(monkeypatch, PORTABLE), KvCache.append

    def append(self: KvCache, lane: int, start: int, source: RowTable, count: int) -> None:
        real(self, lane, start + 1, source, count)

    monkeypatch.setattr(KvCache, "append", append)
    done, report = verify(engines)
    assert done.code == DAMAGED
    assert outcomes(report)["base: cache, lane 0"] == "failed"
    assert "row 4 was not written" in detail(report, "base", "cache, lane 0")


CACHE, GOLDEN = "base: cache, lane 0", "base: golden outputs"
# A fault of all engines, and the checks of the base that must find it
WRONG: dict[str, set[str]] = {
    "every_row_visible": {CACHE, GOLDEN},
    "a_row_further": {CACHE, GOLDEN},
    "next_rotation": {GOLDEN},
    "one_more_row": {CACHE},
    "louder": {GOLDEN},
    "swapped_rows": {GOLDEN},
    "wrong_in_verification": {"tokens, greedy", "tokens, sampled"},
    "not_a_number": {GOLDEN},
}


@pytest.mark.parametrize(
    ("fault", "compute"),
    [
        *((fault, "fp16") for fault in WRONG),
        pytest.param("louder", "bf16", marks=pytest.mark.deep),
        ("louder", "fp32"),
    ],
)
def test_an_engine_that_computes_something_wrong_is_found(
    verify: Verify, monkeypatch: pytest.MonkeyPatch, fault: str, compute: str
) -> None:
    engines = simulated(monkeypatch, NATIVE, compute=compute)
    simulator(NATIVE).faults.plant(fault)
    done, report = verify(engines)
    assert done.code == DAMAGED
    failed = {name for name, outcome in outcomes(report).items() if outcome == "failed"}
    assert WRONG[fault] <= failed
    if fault == "one_more_row":
        assert "lane 0, row 20 was changed" in detail(report, "base", "cache, lane 0")


def test_each_fault_of_a_simulated_engine_is_tried() -> None:
    assert WRONG.keys() == READS.keys() | GIVES.keys()
