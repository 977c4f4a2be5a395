"""An input that the package does not know, added by one row of `contract.INPUTS` and one of the
graphs: a gain for each row of a call, by which the stream behind the first layers is multiplied.

It goes the whole way, from export to both runners, and no file of the package is touched.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file

from edgespec.artifacts import file_names
from edgespec.backends.call import Call
from edgespec.backends.made_calls import made_call
from edgespec.backends.registry import open_runner
from edgespec.config import ModelConfig
from edgespec.contract import INPUTS, GraphInput, Kind, Role
from edgespec.graphs.builder import GraphBuilder
from edgespec.graphs.optional_inputs import OPTIONAL_INPUTS, OptionalInput
from tests import toys
from tests.e2e.tensorrt_pairs import NATIVE, PORTABLE, SIZES
from tests.e2e.workshop import Cli, cli
from tests.tensorrt_simulator.installed import install

__all__ = ["cli"]

NAME, LAYERS, ROWS = "row_gain", 2, 5


def behind_layer(
    b: GraphBuilder, config: ModelConfig, index: int, x: ir.Value, gain: ir.Value
) -> ir.Value:
    return b.op("Mul", x, gain, name=f"layers.{index}/gain") if index < LAYERS else x


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    gain = GraphInput(NAME, Kind.ROWS, ("B", "S", 1), default=1.0, size="gain_layers")
    monkeypatch.setitem(INPUTS, NAME, gain)
    monkeypatch.setitem(OPTIONAL_INPUTS, NAME, OptionalInput(lambda _: LAYERS, behind_layer))


def logits(engines: Path, *calls: Call) -> list[np.ndarray]:
    runner, _ = open_runner(engines, Role.LLM)
    found = [runner.run(call)[0].logits.rows().copy() for call in calls]
    runner.close()
    return found


@pytest.mark.usefixtures("row")
@pytest.mark.parametrize(
    "version",
    [None, pytest.param(PORTABLE, marks=pytest.mark.deep), NATIVE],
    ids=["ort", "portable", "native"],
)
def test_one_row_takes_an_input_from_export_to_a_runner(
    version: str | None, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = toys.make_base(tmp_path / "base", layers=3)
    assert cli("export", base, tmp_path / "onnx").code == 0
    onnx, engines = tmp_path / "onnx" / "llm", tmp_path / "engines"
    assert json.loads((onnx / "config.json").read_text())["graph"]["gain_layers"] == LAYERS
    assert load_file(onnx / file_names.GOLDEN)[f"tree_{NAME}"].std() > 0.1
    options: tuple[str, ...] = ()
    if version is not None:
        install(monkeypatch, version)
        options = ("--backend", "tensorrt", "--compute", "fp32")
    line = ("--onnx-dir", onnx, "--engine-dir", engines, *SIZES, "--max-batch-size", 2)
    built = cli("build", *line, "--no-measure-costs", *options)
    assert "golden outputs reproduced" in built.out, built.err
    report = "--output-file", tmp_path / "verify.json"
    verified = cli("verify", "--engine-dir", engines, "--onnx-dir", onnx, *report)
    assert verified.code == 0, verified.out + verified.err
    runner, _ = open_runner(engines, Role.LLM)
    given = made_call(runner.contract, 0, 0, ROWS, heads=ROWS)
    runner.close()
    left_out, ones = (
        replace(given, extras=extras) for extras in ({}, {NAME: np.ones((1, ROWS, 1), np.float32)})
    )
    told, default, neutral = logits(engines, given, left_out, ones)
    assert np.array_equal(default, neutral)
    assert np.abs(told - neutral).max() > 0.01
