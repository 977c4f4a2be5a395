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
    seen = {}
    second.run(
        graph.pieces[0].run(start, feeds, weights=first),
        feeds,
        lambda name, rows: seen.update({name: rows.T @ rows}),
    )
    for linear in second.linears:
        wanted = quantize_gptq(linear.read(), InputStatistics.of(seen[linear.name]))
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
