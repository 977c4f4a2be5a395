"""The proof that a build makes of its engine: golden outputs, and nothing left behind where they are missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.backends import engine_dir as engines
from edgespec.backends.base import Call, Golden, Result
from edgespec.backends.ort import build as ort_build
from edgespec.backends.ort.build import GOLDEN_TOLERANCE, build, check_golden
from edgespec.config import RopeConfig
from edgespec.contract import GraphContract, GraphShape, Limits, Role, canonical_contract
from edgespec.errors import BuildError, EdgeSpecError, LimitError
from edgespec.export.components import ExportOptions, export
from tests import toys

LIMITS = Limits(max_input_len=32, max_kv_cache_capacity=32)
SHAPE = GraphShape(Role.BASE, 4, 1, 1, 4, 4, vocab_size=5, features=4)


@pytest.fixture(scope="module")
def onnx_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("onnx")
    return export(str(toys.make_base(work / "base", layers=7)), work, ExportOptions(eagle_base=True)).directory


# check_golden


class Answers:
    """A runner that gives the golden answers, each changed by `change`."""

    contract: GraphContract = canonical_contract(SHAPE)
    capacity = 8

    def __init__(self, golden: Golden, change: dict[str, float]) -> None:
        self.golden, self.change, self.labels = golden, change, iter(("prompt", "tree"))

    def run(self, call: Call) -> Result:
        label = next(self.labels)
        outputs = {name: self.golden[f"{label}_{name}"].copy() for name in ("logits", "hidden_states")}
        for name, value in outputs.items():
            value[0, -1, 0] += self.change.get(f"{label}_{name}", 0.0)
        return Result(**outputs)

    def move_rows(self, slots: np.ndarray, start: int) -> None: ...

    def close(self) -> None: ...


def golden() -> Golden:
    rng = np.random.default_rng(0)
    arrays: Golden = {}
    for label, start, rows in (("prompt", 0, 5), ("tree", 5, 3)):
        arrays[f"{label}_ids"] = np.arange(rows)
        arrays[f"{label}_positions"] = np.arange(start, start + rows)
        arrays[f"{label}_attention_mask"] = np.tri(rows, 8, start, dtype=bool)[None, None]
        for name, width in (("inputs_embeds", 4), ("logits", 5), ("hidden_states", 4)):
            arrays[f"{label}_{name}"] = rng.uniform(-2, 2, (1, rows, width)).astype(np.float32)
        arrays[f"{label}_logits"][0, 0, 0] = 4.0  # the largest value, which differences are measured by
        arrays[f"{label}_hidden_states"][0, 0, 0] = 4.0
    return arrays


def difference(change: dict[str, float]) -> float:
    arrays = golden()
    return check_golden(Answers(arrays, change), arrays, RopeConfig(theta=10000.0, rotary_dim=4), capacity=8)


def test_an_engine_that_gives_the_golden_outputs_differs_by_nothing() -> None:
    assert difference({}) == 0.0


def test_a_difference_is_relative_to_the_largest_golden_value() -> None:
    assert difference({"tree_logits": 2e-4}) == pytest.approx(0.5e-4, rel=1e-2)


@pytest.mark.parametrize("output", ["prompt_logits", "tree_logits", "prompt_hidden_states", "tree_hidden_states"])
@pytest.mark.parametrize("change", [8 * GOLDEN_TOLERANCE, float("nan")])
def test_an_engine_that_misses_any_golden_output_is_refused(output: str, change: float) -> None:
    label, name = output.split("_", 1)
    with pytest.raises(BuildError, match=f"{name} on the golden {label}"):
        difference({output: change})


# build


def leave_nothing(engine_dir: Path) -> None:
    assert engines.read_engines(engine_dir) == {}
    assert [path for path in engine_dir.rglob("*") if path.is_file()] == []


def test_a_build_that_computes_something_else_fails_and_leaves_nothing(
    onnx_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ort_build.read_fp32
    monkeypatch.setattr(ort_build, "read_fp32", lambda weight, source: read(weight, source) * np.float32(1.01))
    with pytest.raises(BuildError, match="golden prompt"):
        build(onnx_dir, tmp_path / "engine", LIMITS)
    leave_nothing(tmp_path / "engine")


def test_a_build_that_is_interrupted_leaves_nothing(
    onnx_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ort_build, "check_golden", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build(onnx_dir, tmp_path / "engine", LIMITS)
    leave_nothing(tmp_path / "engine")


def test_a_failed_rebuild_leaves_the_engine_that_was_there(
    onnx_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(onnx_dir, tmp_path, LIMITS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    read = ort_build.read_fp32
    monkeypatch.setattr(ort_build, "read_fp32", lambda weight, source: read(weight, source) * np.float32(1.01))
    with pytest.raises(BuildError):
        build(onnx_dir, tmp_path, LIMITS)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_progress_is_told_of_every_byte(onnx_dir: Path, tmp_path: Path) -> None:
    totals: list[int] = []
    parts: list[int] = []
    build(onnx_dir, tmp_path, LIMITS, start=totals.append, advance=parts.append)
    assert len(totals) == 1
    assert sum(parts) == totals[0] > 0


@pytest.mark.parametrize(
    ("limits", "flag"),
    [
        (Limits(max_batch_size=2), "--max-batch-size 2"),
        (Limits(max_input_len=64, max_kv_cache_capacity=32), "--max-kv-cache-capacity 32"),
        (Limits(max_verify_tree_size=0), "--max-verify-tree-size"),
    ],
)
def test_impossible_limits_are_refused_by_their_flag(onnx_dir: Path, tmp_path: Path, limits: Limits, flag: str) -> None:
    with pytest.raises(LimitError, match=flag):
        build(onnx_dir, tmp_path, limits)


def test_a_flag_that_contradicts_the_export_is_refused(onnx_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(EdgeSpecError, match="exported as base, the flag says draft"):
        build(onnx_dir, tmp_path, LIMITS, spec_draft=True)


def test_a_weight_file_that_changed_after_the_export_is_refused(tmp_path: Path) -> None:
    exported = export(str(toys.make_base(tmp_path / "base", layers=2)), tmp_path, ExportOptions(golden=False))
    data = bytearray((exported.directory / "model.onnx.data").read_bytes())
    data[100] ^= 1
    (exported.directory / "model.onnx.data").write_bytes(data)
    with pytest.raises(EdgeSpecError, match=r"model\.onnx\.data"):
        build(exported.directory, tmp_path / "engine", LIMITS)
