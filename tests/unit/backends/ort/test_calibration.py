"""GPTQ over an export: each layer on what the rounded ones before it give, and on from where a run
was stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.base import SILENT
from edgespec.backends.onnx_dir import OnnxDir, open_onnx_dir
from edgespec.backends.ort import calibration
from edgespec.backends.ort.calibration import STREAM, CalibratedWeights, calibrated
from edgespec.backends.ort.layerwise import LayerwiseGraph, causal_feeds
from edgespec.quantization.gptq import InputStatistics, quantize_gptq
from edgespec.quantization.quantized_weight import dequantize
from tests import made, toys

WINDOWS = np.random.default_rng(0).integers(3, 256, (2, 24))


@pytest.fixture(scope="module")
def onnx(tmp_path_factory: pytest.TempPathFactory) -> OnnxDir:
    base = toys.make_base(tmp_path_factory.mktemp("base") / "base", "qwen3", layers=2)
    return open_onnx_dir(made.exported(base) / "llm")


def names_of(onnx: OnnxDir) -> set[str]:
    graph = LayerwiseGraph.open(onnx)
    return {linear.name for piece in graph.pieces for linear in piece.linears} | {
        graph.head.linear.name
    }


def run(onnx: OnnxDir, directory: Path, windows: np.ndarray = WINDOWS) -> CalibratedWeights:
    return calibrated(onnx, windows, 64, names_of(onnx), directory, SILENT)


def contents(weights: CalibratedWeights, onnx: OnnxDir) -> list[bytes]:
    return [weights.read(name).values.tobytes() for name in sorted(names_of(onnx))]


def test_each_layer_is_rounded_on_what_rounded_ones_give(onnx: OnnxDir, tmp_path: Path) -> None:
    weights = run(onnx, tmp_path / "work")
    graph = LayerwiseGraph.open(onnx)
    second = graph.pieces[1]
    first = {one.name: dequantize(weights.read(one.name)) for one in graph.pieces[0].linears}
    feeds = causal_feeds(onnx.config, *WINDOWS.shape, 64)
    _, start = calibration.resumed(CalibratedWeights(tmp_path / "new"), onnx, WINDOWS)
    inputs = second.inputs(graph.pieces[0].run(start, feeds, first), feeds)
    for linear in second.linears:
        rows = inputs[linear.x]
        wanted = quantize_gptq(linear.read(), InputStatistics.of(rows.T @ rows))
        np.testing.assert_array_equal(dequantize(weights.read(linear.name)), dequantize(wanted))


def test_an_expert_is_rounded_on_the_tokens_that_chose_it(tmp_path: Path) -> None:
    base = toys.make_qwen3_moe(tmp_path / "base", layers=1, experts=4, per_token=1, expert_size=64)
    onnx = open_onnx_dir(made.exported(base) / "llm")
    attention, mlp = LayerwiseGraph.open(onnx).pieces
    names = {one.name for one in mlp.linears if ".experts." in one.name}
    weights = calibrated(onnx, WINDOWS, 64, names, tmp_path / "work", SILENT)
    feeds = causal_feeds(onnx.config, *WINDOWS.shape, 64)
    _, start = calibration.resumed(CalibratedWeights(tmp_path / "new"), onnx, WINDOWS)
    inputs = mlp.inputs(attention.run(start, feeds), feeds)
    router = next(one for one in mlp.linears if one.name not in names)
    chosen = (inputs[router.x] @ router.read().T).argmax(1)
    assert len(set(np.bincount(chosen, minlength=4))) > 1
    for linear in mlp.linears:
        if linear.name in names:
            rows = inputs[linear.x]
            own = rows[chosen == int(linear.name.split(".")[-3])]
            few = rows.shape[1] / 4 / len(rows)
            hessian = own.T @ own + rows.T @ rows * np.float32(few)
            wanted = quantize_gptq(linear.read(), InputStatistics.of(hessian))
            np.testing.assert_array_equal(dequantize(weights.read(linear.name)), dequantize(wanted))


def test_a_run_goes_on_where_it_was_stopped(
    onnx: OnnxDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = contents(run(onnx, tmp_path / "whole"), onnx)
    put, streams = calibration.put_whole, []

    def stopped(path: Path, **arrays: np.ndarray) -> None:
        put(path, **arrays)
        if path.name == STREAM:
            streams.append(path)
            if len(streams) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "put_whole", stopped)
    with pytest.raises(KeyboardInterrupt) as stop:
        run(onnx, tmp_path / "part")
    assert str(tmp_path / "part") in stop.value.__notes__[0]
    assert contents(run(onnx, tmp_path / "part"), onnx) == whole
    assert len(streams) == len(LayerwiseGraph.open(onnx).pieces)
    other = run(
        onnx, tmp_path / "part", WINDOWS[:, ::-1].copy()
    )  # another text: from the beginning
    assert len(streams) == 2 * len(LayerwiseGraph.open(onnx).pieces)
    assert contents(other, onnx) != whole
