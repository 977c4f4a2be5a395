"""Image encoders with the TensorRT backend as it is, over a simulated library: rows are those of
ONNX Runtime's engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.build import build
from edgespec.contract import Limits
from edgespec.errors import LimitError
from edgespec.runtime.vision.encoder import VisionEncoder
from edgespec.vision.grid import Grid
from tests import made, shared
from tests.e2e.tensorrt_pairs import NATIVE, PORTABLE
from tests.e2e.workshop import Cli, cli
from tests.parity.test_vision import image
from tests.tensorrt_simulator.device import HostDevice
from tests.tensorrt_simulator.installed import install
from tests.toys.vision import write_vlm

__all__ = ["cli"]

GRIDS: list[Grid] = [(1, 4, 4), (1, 10, 14), (1, 2, 22), (1, 8, 8)]
TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3}


def exported(model_type: str) -> Path:
    checkpoint = shared.made_once(("vlm", model_type, {}), lambda path: write_vlm(path, model_type))
    return made.exported(checkpoint) / "visual"


@pytest.mark.parametrize(
    ("version", "compute"),
    [
        (NATIVE, "fp32"),
        (NATIVE, "fp16"),
        (PORTABLE, "fp32"),
        pytest.param(PORTABLE, "fp16", marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_rows_are_those_of_onnx_runtime(
    model_type: str,
    version: str,
    compute: str,
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    onnx = exported(model_type)
    build(onnx, tmp_path / "ort", Limits())
    install(monkeypatch, version)
    options = ("--backend", "tensorrt", "--compute", compute)
    done = cli("build", "--onnx-dir", onnx, "--engine-dir", tmp_path / "trt", *options)
    assert done.code == 0, done.err
    assert "golden outputs" in done.out
    with (
        VisionEncoder.open(tmp_path / "ort") as ours,
        VisionEncoder.open(tmp_path / "trt") as encoder,
    ):
        config = encoder.config.component.vision
        for grid in GRIDS:
            one = image(config, grid)
            wanted, found = ours.encode(one), encoder.encode(one)
            bound = TOLERANCE[compute] * float(np.abs(wanted.embeds).max())
            np.testing.assert_allclose(found.embeds, wanted.embeds, rtol=0, atol=bound)
            for name, more in wanted.extras.items():
                bound = TOLERANCE[compute] * float(np.abs(more).max())
                np.testing.assert_allclose(found.extras[name], more, rtol=0, atol=bound)
    device = HostDevice.current
    assert device is not None
    assert device.closed
    assert not device.memory


def test_the_profile_holds_what_the_limits_say(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, NATIVE)
    sizes = ("--min-image-tokens", 8, "--max-image-tokens-per-image", 40, "--compute", "fp32")
    files = ("--onnx-dir", exported("qwen2_5_vl"), "--engine-dir", tmp_path)
    assert cli("build", *files, "--backend", "tensorrt", *sizes).code == 0
    config = json.loads((tmp_path / "visual/config.json").read_text())
    (profile,) = config["backend_config"]["profiles"]
    assert [shape[0] for shape in profile["shapes"]["pixel_values"]] == [32, 80, 160]
    with VisionEncoder.open(tmp_path) as encoder:
        vision = encoder.config.component.vision
        for grid in ((1, 2, 80), (1, 80, 2), (1, 4, 40), (1, 10, 16), (1, 4, 8)):
            assert np.isfinite(encoder.encode(image(vision, grid)).embeds).all()
        with pytest.raises(LimitError, match="takes 40"):
            encoder.encode(image(vision, (1, 2, 82)))


def test_a_golden_image_beyond_the_limits_is_still_compared(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, NATIVE)
    sizes = ("--max-image-tokens-per-image", 6, "--compute", "fp32")
    files = ("--onnx-dir", exported("qwen3_vl"), "--engine-dir", tmp_path)
    done = cli("build", *files, "--backend", "tensorrt", *sizes)
    assert done.code == 0, done.err
    assert "golden outputs reproduced" in done.out
    with VisionEncoder.open(tmp_path) as encoder:
        vision = encoder.config.component.vision
        with pytest.raises(LimitError, match="takes 6"):
            encoder.encode(image(vision, (1, 4, 12)))


def test_a_dry_run_refuses_what_a_build_would(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ("--onnx-dir", exported("qwen2_5_vl"), "--engine-dir", tmp_path / "engines")
    dry = ("build", *files, "--backend", "tensorrt", "--dry-run")
    missing = cli(*dry)
    assert missing.code == 4
    assert "--library-version" in missing.err
    version = ("--library-version", NATIVE)
    none_here = cli(*dry, *version)
    assert none_here.code == 4
    assert "no CUDA device is here" in none_here.err
    sm75 = cli(*dry, *version, "--compute-capability", "SM75", "--compute", "bf16")
    assert sm75.code == 3
    assert "has no bfloat16 arithmetic" in sm75.err
    install(monkeypatch, NATIVE)
    done = cli(*dry, "--compute", "fp16")
    assert done.code == 0, done.err
    assert "float16" in done.out
    assert "pixel_values 16x1176|" in done.out
    emitted = cli(*dry, "--emit-onnx", tmp_path / "graph")
    assert emitted.code == 2
    assert "--emit-onnx writes the graph of a language model" in emitted.err
    assert not any(tmp_path.iterdir())
