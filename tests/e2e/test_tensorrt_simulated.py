"""Export, build and infer with the TensorRT backend as it is, over a simulated library: greedy
tokens are those of the same engine without drafts, and those of ONNX Runtime's engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.tensorrt_pairs import NATIVE, PAIRS, PORTABLE, built, tokens
from tests.e2e.workshop import Cli, cli
from tests.tensorrt_simulator.device import HostDevice
from tests.tensorrt_simulator.installed import install

__all__ = ["cli"]


def test_greedy_tokens_are_those_of_plain_decoding_and_of_onnx_runtime(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str
) -> None:
    reference = built(cli, name, tmp_path / "ort")
    expected = tokens(cli, reference, tmp_path)
    install(monkeypatch, version, own_process=(name, version) == ("eagle3", NATIVE))
    engines = built(cli, name, tmp_path / "engines", "--backend", "tensorrt", "--compute", "fp32")
    assert tokens(cli, engines, tmp_path) == expected
    assert tokens(cli, engines, tmp_path, "--spec-decode", "--check-lossless") == expected
    device = HostDevice.current
    assert device is not None
    assert "graph" in device.launched
    assert "attention_mask" in device.launched
    assert ("copy_rows" in device.launched) == (version == PORTABLE)
    assert device.closed
    assert not device.memory


def test_drafts_change_nothing_in_half_precision(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, NATIVE)
    options = ("--backend", "tensorrt", "--compute", "fp16")
    engines = built(cli, "eagle3", tmp_path / "engines", *options)
    plain = tokens(cli, engines, tmp_path)
    device = HostDevice.current
    assert device is not None
    assert "convert" in device.launched  # embeddings come in float32
    assert tokens(cli, engines, tmp_path, "--spec-decode", "--check-lossless") == plain


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"name", "version"} <= set(metafunc.fixturenames):
        # The other pairs go the same way in tests/lossless
        rows = [("eagle3", NATIVE), ("eagle3", PORTABLE)]
        others = [name for name in PAIRS if name != "eagle3"]
        deep = [(name, version) for name in others for version in (NATIVE, PORTABLE)]
        deep_rows = [pytest.param(*row, marks=pytest.mark.deep) for row in deep]
        metafunc.parametrize(("name", "version"), rows + deep_rows, ids=str)
