"""A backend of one's own, registered by test code alone: ONNX's reference evaluator runs the
exported graph as it is. Taken through export, build, infer, inspect and check."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from edgespec.backends.base import (
    AccuracySpec,
    Backend,
    BuildOption,
    BuildOptions,
    EngineMemory,
    Listeners,
    OptionValue,
    PairDevice,
    PlanHints,
    Remedies,
    Runner,
    Staged,
)
from edgespec.backends.call import Call, Result
from edgespec.backends.engine_config import EngineConfig, EngineWeights
from edgespec.backends.host import HostLogits, host_results
from edgespec.backends.onnx_dir import OnnxDir
from edgespec.backends.registry import BACKENDS
from edgespec.cli.main import run
from edgespec.contract import (
    GraphContract,
    Limits,
    Role,
    canonical_contract,
)
from edgespec.errors import EngineMismatch, LimitError, OptionError
from edgespec.runtime.engine import Engine
from tests import toys
from tests.e2e.workshop import Cli, asked, cli, infer, responses
from tests.host_runner import HostRunner

__all__ = ["cli"]

LIMITS = ["--max-input-len", "24", "--max-kv-cache-capacity", "40", "--max-verify-tree-size", "8"]
USAGE, INVALID, ENVIRONMENT = 2, 3, 4
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class ToyOptions(BuildOptions):
    """Slots of the cache behind its capacity."""

    spare_slots: int


class ToyRunner(HostRunner):
    """The canonical graph on the reference evaluator, its whole cache copied by every call."""

    prefill_chunk = 16  # a long prompt is read in several calls

    def __init__(
        self, path: Path, contract: GraphContract, capacity: int, spare_slots: int
    ) -> None:
        super().__init__(contract, capacity, capacity + spare_slots)
        self.evaluator = ReferenceEvaluator(onnx.load(path))

    def run(self, call: Call) -> list[Result]:
        began = time.perf_counter()
        outputs = self.evaluator.run(None, self.feeds(call) | self.cache)
        self.engine_s += time.perf_counter() - began
        named = dict(zip(self.evaluator.output_names, outputs, strict=True))
        self.cache = {past: named[present] for past, present in self.presents.items()}
        return host_results(call, named["logits"], named.get("hidden_states"))

    def close(self) -> None: ...


class ToyDevice(PairDevice):
    """Remembers what was opened on it."""

    made: ClassVar[list[ToyDevice]] = []

    def __init__(self) -> None:
        self.opened: list[Role] = []
        self.closed = 0
        self.made.append(self)

    def close(self) -> None:
        self.closed += 1


class ToyBackend(Backend):
    """What a backend must be, and nothing else."""

    name = "toy"
    title = "ONNX's reference evaluator"
    suffixes = (".toy",)
    remedies = Remedies(mismatch="This evaluator computes another result.", too_coarse="None.")
    plan_hints = PlanHints(steps=2, block_nodes=4)
    float32_tolerance = 1e-3
    options = (
        BuildOption(name="spare_slots", choices=("1", "2"), default="1", help="Slots to spare."),
        BuildOption(name="polite", default=False, help="Be polite."),
    )

    def parse_options(self, values: Mapping[str, OptionValue]) -> ToyOptions:
        slots = int(str(values.get("spare_slots", "1")))
        if values.get("polite") and slots == 2:
            raise OptionError("--polite takes one spare slot", "Leave --spare-slots out.")
        return ToyOptions(slots)

    def stage(
        self,
        onnx: OnnxDir,
        limits: Limits,
        options: BuildOptions,
        staging: Path,
        progress: Listeners,
    ) -> Staged:
        assert isinstance(options, ToyOptions)
        if limits.max_batch_size > 1:
            raise LimitError("the toy has one lane", "Build with --max-batch-size 1.")
        path = self.engine_path(staging, onnx.role)
        write_engine(onnx.model, path)
        progress.start(path.stat().st_size)
        progress.advance(path.stat().st_size)
        return Staged(
            engine=path,
            contract=canonical_contract(onnx.config.graph),
            weights=EngineWeights(scheme="fp32", method="as exported", exact=False),
            accuracy=AccuracySpec(tolerance=self.float32_tolerance),
        )

    def open_staged(self, staged: Staged, capacity: int, lanes: int) -> Runner:
        return ToyRunner(staged.engine, staged.contract, capacity, 1)

    def open_device(self) -> ToyDevice:
        return ToyDevice()

    def open(self, engine_dir: Path, config: EngineConfig, device: PairDevice) -> Runner:
        assert isinstance(device, ToyDevice)
        device.opened.append(config.role)
        path, contract = self.engine_path(engine_dir, config.role), self.contract(config)
        return ToyRunner(path, contract, config.limits.max_kv_cache_capacity, 1)

    def contract(self, config: EngineConfig) -> GraphContract:
        return canonical_contract(config.component.graph)

    def fingerprint(self) -> dict[str, Any]:
        return {"onnx": onnx.__version__}

    def check_fingerprint(self, stored: Mapping[str, Any], name: str) -> None:
        if stored.get("onnx") != onnx.__version__:
            raise EngineMismatch(f"{name} was built with another onnx", "Build it again.")

    def memory(self, config: EngineConfig) -> EngineMemory:
        return EngineMemory(kv_bytes_per_token=self.contract(config).kv_bytes_per_token)

    def notes(self, config: EngineConfig) -> tuple[str, ...]:
        return ("it is slow",)


def write_engine(source: Path, target: Path) -> None:
    """The graph with its weights inside."""
    model = onnx.load(source)
    target.write_bytes(model.SerializeToString())


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "toy", ToyBackend())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy-backend")
    base = toys.make_base(path / "base", "llama", layers=7)
    toys.make_draft(path / "draft", base, "specforge")
    return path


@pytest.fixture(scope="module")
def exported(checkpoints: Path) -> dict[str, Path]:
    """The components of a pair."""
    base, draft = str(checkpoints / "base"), str(checkpoints / "draft")
    out = {role: checkpoints / f"onnx-{role}" for role in ("base", "draft")}
    assert run(["export", base, str(out["base"]), "--eagle-base"]) == 0
    assert run(["export", draft, str(out["draft"]), "--base-model-dir", base]) == 0
    return {role: path / "llm" for role, path in out.items()}


@pytest.fixture
def engines(checkpoints: Path, exported: dict[str, Path], cli: Cli, tmp_path: Path) -> Path:
    """A pair of toy engines, built once and copied, so that a test may change its copy."""
    made = checkpoints / "engines"
    if not made.exists():
        for component in exported.values():
            done = cli(*build_args(component, made))
            assert done.code == 0, done.err
    return Path(shutil.copytree(made, tmp_path / "engines"))


def build_args(component: Path, engine_dir: Path, *more: str) -> list[object]:
    files = ["--onnx-dir", component, "--engine-dir", engine_dir]
    return ["build", *files, "--backend", "toy", *LIMITS, *more]


def test_a_pair_of_toy_engines_answers_losslessly(engines: Path, tmp_path: Path, cli: Cli) -> None:
    """Trees, committed rows and a prefix that is reused: --check-lossless compares every token."""
    requests = [asked("one two"), asked("one two three")]
    sizes = ["--spec-draft-top-k", "2", "--spec-draft-step", "2", "--spec-verify-size", "5"]
    args = infer(engines, tmp_path, *requests)
    done = cli(*args, "--spec-decode", *sizes, "--check-lossless")
    assert done.code == 0, done.err
    found = responses(tmp_path)
    assert [len(response["output_ids"]) for response in found] == [8, 8]
    assert cli(*args).code == 0
    assert [r["output_ids"] for r in responses(tmp_path)] == [r["output_ids"] for r in found]


def test_base_and_draft_share_a_device_that_is_closed_with_them(
    engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ToyDevice, "made", [])
    with Engine(engines, spec_decode=True):
        (device,) = ToyDevice.made
        assert (device.opened, device.closed) == ([Role.BASE, Role.DRAFT], 0)
    assert device.closed == 1


def test_toy_engines_say_what_they_are(engines: Path, cli: Cli) -> None:
    done = cli("inspect", engines, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert {engine["backend"] for engine in found["engines"].values()} == {"toy"}
    base = found["engines"]["base"]
    assert base["runs_here"] == {"answer": True, "why": None}
    assert base["fingerprint"] == {"onnx": onnx.__version__}
    assert base["golden_difference"] < 1e-3
    assert base["exact"] == "its weights are fp32"
    assert base["cache_bytes_per_token"] == 2 * 7 * 2 * 16 * 4
    assert (found["pairing"]["fits"], found["not_in_manifest"]) == (True, [])
    assert "runs on this machine" in cli("inspect", engines).out


def test_a_checkpoint_pair_is_checked_without_a_word_about_the_backend(
    checkpoints: Path, cli: Cli
) -> None:
    done = cli("check", checkpoints / "base", checkpoints / "draft")
    assert done.code == 0, done.err
    assert "toy" not in done.out


def test_options_of_the_backend_are_its_own(
    exported: dict[str, Path], tmp_path: Path, cli: Cli
) -> None:
    """--help lists them instead of ONNX Runtime's; what contradicts itself is refused."""
    shown = cli("build", "--backend", "toy", "--help").out
    assert "--spare-slots" in shown
    assert "--polite / --no-polite" in shown
    assert "--weights" not in shown
    assert "--spare-slots" not in cli("build", "--help").out
    component, engines = exported["base"], tmp_path / "engines"
    done = cli(*build_args(component, engines, "--weights", "int8"))
    assert (done.code, "--weights" in done.err) == (USAGE, True)
    done = cli(*build_args(component, engines, "--polite", "--spare-slots", "2"))
    assert (done.code, "Leave --spare-slots out" in done.err) == (USAGE, True)
    done = cli(*build_args(component, engines, "--max-batch-size", "2"))
    assert (done.code, "one lane" in done.err) == (INVALID, True)


def test_notes_of_the_backend_are_shown(
    exported: dict[str, Path], tmp_path: Path, cli: Cli
) -> None:
    done = cli(*build_args(exported["base"], tmp_path / "new"))
    assert done.code == 0, done.err
    assert "golden outputs reproduced" in done.out
    assert "it is slow" in done.out


def test_an_engine_that_computes_something_else_is_not_kept(
    exported: dict[str, Path], tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = ToyRunner.run

    def louder(runner: ToyRunner, call: Call) -> list[Result]:
        (result,) = honest(runner, call)
        return [Result(HostLogits(result.logits.rows() * np.float32(1.01)), None)]

    monkeypatch.setattr(ToyRunner, "run", louder)
    done = cli(*build_args(exported["base"], tmp_path / "new"))
    assert done.code == INVALID
    assert "This evaluator computes another result." in done.err
    assert not (tmp_path / "new").exists()


def test_an_engine_of_another_machine_is_refused(engines: Path, tmp_path: Path, cli: Cli) -> None:
    path = engines / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["engines"]["base"]["fingerprint"] = {"onnx": "0.1"}
    path.write_text(json.dumps(manifest))
    done = cli(*infer(engines, tmp_path))
    assert (done.code, "was built with another onnx" in done.err) == (ENVIRONMENT, True)
    assert "does not run here" in cli("inspect", engines).out


def test_without_the_backend_its_engines_are_shown_and_not_run(
    engines: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(BACKENDS, "toy")
    done = cli(*infer(engines, tmp_path))
    assert (done.code, "was built for the backend 'toy'" in done.err) == (INVALID, True)
    assert "this version runs ort, tensorrt, tensorrt-rtx, not 'toy'" in cli("inspect", engines).out
    assert cli("build", "--backend", "toy").code == USAGE
