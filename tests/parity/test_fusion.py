"""Nodes that were made one compute what they computed apart."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from edgespec.artifacts import file_names
from edgespec.backends.build import build
from edgespec.backends.golden import golden_calls
from edgespec.backends.ort import lowering, weights
from edgespec.backends.ort.options import FP32, WeightFormat
from edgespec.backends.registry import open_runner
from edgespec.contract import Limits, Role
from edgespec.export.components import ExportOptions, export
from tests import toys
from tests.calls import outputs_of

LIMITS = Limits(max_input_len=32, max_kv_cache_capacity=32)
LAYERS = 7
# sums in another order may let a rounded activation fall to the other side; wrong columns give
# above 0.5
STEP = 0.1


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases behind q, k and v, and as many outputs for each as no block divides."""
    work = tmp_path_factory.mktemp("fusion")
    checkpoint = toys.make_base(
        work / "base",
        layers=LAYERS,
        hidden=64,
        intermediate=160,
        dtype="bfloat16",
        attention_bias=True,
    )
    return export(str(checkpoint), work, ExportOptions(base_for="eagle3")).directory


def answers(onnx_dir: Path, engine_dir: Path) -> list[NDArray[np.float32]]:
    """Logits and taps of the golden calls: a prompt and a tree."""
    runner, config = open_runner(engine_dir, Role.BASE)
    found = []
    for call in golden_calls(load_file(onnx_dir / file_names.GOLDEN), config.component.ropes):
        result = outputs_of(runner.run(call))
        assert result.hidden_states is not None
        found += [result.logits.copy(), result.hidden_states.copy()]
    runner.close()
    return found


def operators(engine_dir: Path) -> Counter[str]:
    return Counter(node.op_type for node in ir.load(engine_dir / "spec_base.onnx").graph)


@pytest.mark.parametrize("block", [32, pytest.param(128, marks=pytest.mark.deep)])
def test_joined_products_are_the_products(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    wanted = WeightFormat("int4", block)
    build(base, tmp_path / "joined", LIMITS, options=wanted)
    monkeypatch.setattr(weights.NBitsProduct, "group", property(id))
    build(base, tmp_path / "apart", LIMITS, options=wanted)
    assert operators(tmp_path / "joined")["MatMulNBits"] == 4 * LAYERS + 1
    assert operators(tmp_path / "apart")["MatMulNBits"] == 7 * LAYERS + 1
    for joined, apart in zip(
        answers(base, tmp_path / "joined"), answers(base, tmp_path / "apart"), strict=True
    ):
        assert np.abs(joined - apart).max() <= STEP * np.abs(apart).max()


@pytest.mark.parametrize("weight_format", [FP32, WeightFormat("int4", 32)])
def test_joined_residuals_are_the_sums_and_norms(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight_format: WeightFormat
) -> None:
    build(base, tmp_path / "joined", LIMITS, options=weight_format)
    monkeypatch.setattr(lowering, "fuse_residuals", lambda graph: None)
    build(base, tmp_path / "apart", LIMITS, options=weight_format)
    # The last sum feeds the rows that are gathered before their norm: it stays.
    assert operators(tmp_path / "joined")["SkipSimplifiedLayerNormalization"] == 2 * LAYERS - 1
    assert operators(tmp_path / "joined")["Add"] == operators(tmp_path / "apart")["Add"] - (
        2 * LAYERS - 1
    )
    tolerance = 1e-5 if weight_format is FP32 else STEP
    for joined, apart in zip(
        answers(base, tmp_path / "joined"), answers(base, tmp_path / "apart"), strict=True
    ):
        assert np.abs(joined - apart).max() <= tolerance * np.abs(apart).max()
