"""What it costs to have some weights in 4 bits: measured in one pass as one by one, and on from
where a run was stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.base import SILENT
from edgespec.backends.onnx_dir import OnnxDir, open_onnx_dir
from edgespec.backends.ort import sensitivity
from edgespec.backends.ort.calibration import embedded
from edgespec.backends.ort.layerwise import Floats, LayerwiseGraph, causal_feeds
from edgespec.backends.ort.sensitivity import measured_groups
from edgespec.quantization.bit_budget import WeightGroup
from edgespec.quantization.quantized_weight import QuantizedWeight, dequantize
from edgespec.quantization.super_blocks import quantize_super_blocks
from tests import made, toys

WINDOWS = np.random.default_rng(0).integers(3, 256, (2, 24))


@pytest.fixture(scope="module")
def onnx(tmp_path_factory: pytest.TempPathFactory) -> OnnxDir:
    base = toys.make_base(tmp_path_factory.mktemp("base") / "base", "qwen3", layers=2)
    return open_onnx_dir(made.exported(base) / "llm")


def rounded(name: str, array: Floats) -> QuantizedWeight:
    return quantize_super_blocks(array, name=name)


def names_of(graph: LayerwiseGraph) -> set[str]:
    linears = [linear for piece in graph.pieces for linear in piece.linears]
    return {linear.name for linear in (*linears, graph.head.linear) if "gate.w" not in linear.name}


def measured(onnx: OnnxDir, directory: Path) -> list[WeightGroup]:
    names = names_of(LayerwiseGraph.open(onnx))
    directory.mkdir(exist_ok=True)
    return measured_groups(onnx, WINDOWS, 64, names, rounded, directory, SILENT, tied=True)


def divergence(onnx: OnnxDir, coarse: set[str]) -> float:
    """Of the whole model with these weights alone in 4 bits."""
    graph = LayerwiseGraph.open(onnx)
    feeds, head = causal_feeds(onnx.config, 1, WINDOWS.shape[1], 64), graph.head.linear
    log_probs = []
    for names in (set(), coarse):
        table = dequantize(rounded(head.name, head.read())) if head.name in names else head.read()
        x = table[WINDOWS[:1]] if head.name in names else embedded(onnx, WINDOWS[:1])
        for piece in graph.pieces:
            weights = {
                linear.name: dequantize(rounded(linear.name, linear.read()))
                for linear in piece.linears
                if linear.name in names
            }
            x = piece.run(x, feeds, weights=weights)
        logits = (graph.head.rows(x, feeds) @ table.T).astype(np.float64)
        log_probs.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    exact, other = log_probs
    return float((np.exp(exact) * (exact - other)).sum(-1).mean())


def test_a_layer_costs_what_the_whole_model_loses(onnx: OnnxDir, tmp_path: Path) -> None:
    groups = measured(onnx, tmp_path)
    graph = LayerwiseGraph.open(onnx)
    for names in (*({one.name for one in p.linears} for p in graph.pieces), {groups[-1].names[0]}):
        parts = [group for group in groups if set(group.names) <= names]
        assert sum(len(group.names) for group in parts) == len(names)
        total = sum(group.loss for group in parts)
        assert total == pytest.approx(divergence(onnx, names), rel=1e-3)
        assert all(0 < group.loss <= total for group in parts)
    assert [len(group.names) for group in groups[:4]] == [3, 1, 2, 1]
    for group in groups:
        assert group.errors[4] == 1 > group.errors[6] > group.errors[8] > 0


def test_a_run_goes_on_where_it_was_stopped(
    onnx: OnnxDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, kept = measured(onnx, tmp_path / "whole"), []
    put = sensitivity.put_whole

    def stopped(path: Path, **arrays: np.ndarray) -> None:
        put(path, **arrays)
        kept.append(path)
        if len(kept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(sensitivity, "put_whole", stopped)
    with pytest.raises(KeyboardInterrupt):
        measured(onnx, tmp_path / "part")
    assert measured(onnx, tmp_path / "part") == whole
    assert len(kept) == len(LayerwiseGraph.open(onnx).pieces)


def test_experts_of_a_layer_are_one_group(tmp_path: Path) -> None:
    base = toys.make_qwen3_moe(tmp_path / "base", layers=1, experts=4, per_token=1, expert_size=64)
    groups = measured(open_onnx_dir(made.exported(base) / "llm"), tmp_path / "work")
    experts = [group for group in groups if ".experts." in group.names[0]]
    assert [len(group.names) for group in experts] == [3 * 4]
    assert experts[0].loss > 0
    assert experts[0].errors[6] < 0.5
