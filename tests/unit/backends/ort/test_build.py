"""What a build writes, and that nothing is left behind where it fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from edgespec.artifacts import json_files
from edgespec.backends import build as building
from edgespec.backends import row_bits
from edgespec.backends.base import Listeners
from edgespec.backends.build import build
from edgespec.backends.call import Call, Result
from edgespec.backends.manifest import EngineManifest
from edgespec.backends.ort import weight_data
from edgespec.backends.ort.backend import BACKEND
from edgespec.backends.ort.options import NATIVE, WeightFormat
from edgespec.backends.ort.runner import OrtRunner
from edgespec.backends.registry import get_backend
from edgespec.contract import Limits
from edgespec.errors import BuildError, EdgeSpecError, LimitError, OptionError
from edgespec.export.components import ExportOptions, export
from tests import made, toys
from tests.unit.backends.ort.native.sessions import compiled

LIMITS = Limits(max_input_len=32, max_kv_cache_capacity=32)


@pytest.fixture(scope="module")
def onnx_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = toys.make_base(tmp_path_factory.mktemp("onnx") / "base", layers=7)
    return made.exported(base, ExportOptions(base_for="eagle3")) / "llm"


# build


def leave_nothing(engine_dir: Path) -> None:
    assert EngineManifest.read(engine_dir).engines == {}
    assert [path for path in engine_dir.rglob("*") if path.is_file()] == []


def test_a_build_that_computes_something_else_fails_and_leaves_nothing(
    onnx_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = weight_data.read_fp32
    monkeypatch.setattr(
        weight_data, "read_fp32", lambda weight, source: read(weight, source) * np.float32(1.01)
    )
    with pytest.raises(BuildError, match="golden prompt"):
        build(onnx_dir, tmp_path / "engine", LIMITS)
    leave_nothing(tmp_path / "engine")


def test_a_batched_engine_that_is_right_alone_only_is_not_built(
    onnx_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = OrtRunner.run

    def first_for_all(runner: OrtRunner, call: Call) -> list[Result]:
        first, *others = run(runner, call)
        return [first, *(replace(other, logits=first.logits) for other in others)]

    monkeypatch.setattr(OrtRunner, "run", first_for_all)
    build(onnx_dir, tmp_path / "one", LIMITS)
    with pytest.raises(BuildError, match="logits on the golden prompt"):
        build(onnx_dir, tmp_path / "engine", replace(LIMITS, max_batch_size=2))
    leave_nothing(tmp_path / "engine")


def test_an_engine_for_several_sequences_says_what_its_cache_takes(
    onnx_dir: Path, tmp_path: Path
) -> None:
    """7 layers, 2 heads of 16, keys and values, 4 bytes; 61 slots of padding for a tree of 60 and
    its root."""
    built = build(
        onnx_dir, tmp_path, replace(LIMITS, max_batch_size=3, max_kv_cache_capacity=40000)
    )
    assert built.golden_difference is not None
    without = "on ONNX Runtime's kernels"  # said where ours were not compiled
    (beyond, cache) = [note for note in built.notes if not note.startswith(without)]
    assert "beyond the 512 positions" in beyond
    assert cache.startswith(
        f"the KV cache takes {3 * 40061 * 7 * 2 * 16 * 2 * 4 / 1e9:.2f} GB when all 3 sequences"
    )
    limits = json_files.read_json(tmp_path / "base_config.json")["builder_config"]
    assert limits["max_batch_size"] == 3


def test_a_build_that_is_interrupted_leaves_nothing(
    onnx_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(building, "check_golden", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build(onnx_dir, tmp_path / "engine", LIMITS)
    leave_nothing(tmp_path / "engine")


def test_a_failed_rebuild_leaves_the_engine_that_was_there(
    onnx_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(onnx_dir, tmp_path, LIMITS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    read = weight_data.read_fp32
    monkeypatch.setattr(
        weight_data, "read_fp32", lambda weight, source: read(weight, source) * np.float32(1.01)
    )
    with pytest.raises(BuildError):
        build(onnx_dir, tmp_path, LIMITS)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("weights", ["fp32", "int4"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_progress_is_told_of_every_byte_and_of_every_golden_pass(
    onnx_dir: Path, tmp_path: Path, weights: str, lanes: int
) -> None:
    stages: list[list[int]] = []

    def start(total: int) -> None:
        stages.append([total, 0])

    def advance(amount: int) -> None:
        stages[-1][1] += amount

    progress = Listeners(start=start, advance=advance, prove=start)
    limits = replace(LIMITS, max_batch_size=lanes)
    options = get_backend("ort", "a test").parse_options({"weights": weights})
    build(onnx_dir, tmp_path, limits, options=options, progress=progress)
    (num_bytes, told), (passes, made) = stages
    assert told == num_bytes > 0
    assert made == passes > 0


@pytest.mark.parametrize(
    ("limits", "flag"),
    [
        (Limits(max_batch_size=17), "`max_batch_size` 17"),
        (Limits(max_input_len=64, max_kv_cache_capacity=32), "`max_kv_cache_capacity` 32"),
        (Limits(max_verify_tree_size=0), "`max_verify_tree_size`"),
    ],
)
def test_impossible_limits_are_refused_by_their_flag(
    onnx_dir: Path, tmp_path: Path, limits: Limits, flag: str
) -> None:
    with pytest.raises(LimitError, match=flag):
        build(onnx_dir, tmp_path, limits)


def test_a_flag_that_contradicts_the_export_is_refused(onnx_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(EdgeSpecError, match="exported as base, the flag says draft"):
        build(onnx_dir, tmp_path, LIMITS, spec_draft=True)


def test_a_weight_file_that_changed_after_the_export_is_refused(tmp_path: Path) -> None:
    exported = export(
        str(toys.make_base(tmp_path / "base", layers=2)), tmp_path, ExportOptions(golden=False)
    )
    data = bytearray((exported.directory / "model.onnx.data").read_bytes())
    data[100] ^= 1
    (exported.directory / "model.onnx.data").write_bytes(data)
    with pytest.raises(EdgeSpecError, match=r"model\.onnx\.data"):
        build(exported.directory, tmp_path / "engine", LIMITS)


@compiled
def test_an_engine_is_proven_bitwise_without_golden_outputs_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = toys.make_base(tmp_path / "base", layers=1)
    onnx = export(str(base), tmp_path / "onnx", ExportOptions(golden=False)).directory
    int4 = WeightFormat("int4", 32, kernels=NATIVE)
    built = build(onnx, tmp_path / "engine", LIMITS, options=int4)
    assert built.golden_difference is None
    assert built.weights.rounding == 0
    assert built.weights.is_bitwise
    monkeypatch.setattr(row_bits, "first_difference", lambda runner, done: "row 3 has other bits")
    built = build(onnx, tmp_path / "another", LIMITS, options=int4)
    assert not built.weights.is_bitwise


@compiled
def test_an_lm_head_has_6_bits_unless_it_is_a_drafts_own(onnx_dir: Path, tmp_path: Path) -> None:
    base = toys.make_base(tmp_path / "base", layers=7)
    draft = toys.make_draft(tmp_path / "draft", base, "eagle")
    onnx = made.exported(draft, ExportOptions(base_model_dir=str(base)))
    int4 = BACKEND.parse_options({"weights": "int4"})
    for number, (model, head) in enumerate([(onnx_dir, 6), (onnx / "llm", 4)]):
        built = build(model, tmp_path / f"engine{number}", LIMITS, options=int4)
        nodes = {node.op_type: node for node in ir.load(built.engine).graph.all_nodes()}
        assert nodes["LowBitHead"].attributes["bits"].as_int() == head
        assert nodes["LowBitMatMul"].attributes["bits"].as_int() == 4
        assert built.weights.mix.endswith("lm_head 6, all else 4" if head == 6 else "all 4")


@compiled
def test_a_budget_of_bits_is_spent_and_kept(
    onnx_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = replace(BACKEND.parse_options({"size": "6"}), windows=(tuple(range(5, 25)),))
    built = build(onnx_dir, tmp_path / "budget", LIMITS, options=asked)
    weights = EngineManifest.read(tmp_path / "budget").engines[built.role].weights
    nodes = ir.load(built.engine).graph.all_nodes()
    bits = {node.attributes["bits"].as_int() for node in nodes if "bits" in node.attributes}
    assert weights.scheme == "int4"
    assert {4, 6} <= bits
    assert 5.9 < weights.bits <= 6
    assert weights.mix.startswith(f"{weights.bits:.2f} bits a weight: ")
    assert any(weights.mix in note for note in built.notes)
    assert not any((tmp_path / "cache").rglob("*.npz"))
    with pytest.raises(
        BuildError, match=r"`size` 4.63 is less than this model takes in int4: 4\.\d"
    ):
        build(onnx_dir, tmp_path / "engine", LIMITS, options=replace(asked, size=4.63))
    leave_nothing(tmp_path / "engine")


@pytest.mark.parametrize("size", ["4.6", "8.1", "nan", "five"])
def test_a_budget_that_no_format_meets_is_refused(size: str) -> None:
    with pytest.raises(OptionError, match=rf"`size` {size} is no number of bits from 4.625 to 8"):
        BACKEND.parse_options({"size": size})
    with pytest.raises(OptionError, match="`size` is for `weights` int4 without `weight_block`"):
        BACKEND.parse_options({"size": "5", "weights": "int8"})
