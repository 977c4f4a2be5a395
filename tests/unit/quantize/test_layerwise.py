"""Claims about quantize/layerwise.py: a layer at a time gives what ModelOpt gives for the whole
model, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.checkpoint.files import Checkpoint
from edgespec.quantization.schemes import MADE
from edgespec.quantize import calibration, layerwise, llm, modelopt
from edgespec.quantize.llm import Options, quantize_llm
from tests import toys
from tests.unit.quantize import whole_model
from tests.unit.quantize.test_llm import Told

pytestmark = pytest.mark.usefixtures("needs_modelopt")

SIZES: dict[str, Any] = {"layers": 3, "hidden": 128, "intermediate": 256, "vocab": 320}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {
        "llama": toys.make_base(root / "llama", "llama", **SIZES),
        # q, k and v have a bias
        "qwen2": toys.make_base(root / "qwen2", "qwen2", dtype="bfloat16", **SIZES),
        "qwen3": toys.make_base(root / "qwen3", "qwen3", dtype="bfloat16", tied=True, **SIZES),
    }


def batches_of(base: Path, samples: int = 3, width: int = 32) -> list[Any]:
    tokenizer = llm.tokenizer_of(Checkpoint(base), modelopt.Log())
    windows = calibration.cut(calibration.read_texts(None, samples), tokenizer, samples, width)
    return layerwise.batches(windows.calibration)


def quantized(base: Path, out: Path, name: str, **more: Any) -> llm.Quantized:
    return quantize_llm(
        str(base),
        out,
        Options(name, num_samples=3, calib_seq_len=32, **more),
        Told(),
        modelopt.Log(),
    )


def same_settings(ours: Path, theirs: Path) -> bool:
    beside, inside = (
        [json.loads((path / name).read_text()) for path in (ours, theirs)]
        for name in ("hf_quant_config.json", "config.json")
    )
    return (
        beside[0] == beside[1]
        and inside[0]["quantization_config"] == inside[1]["quantization_config"]
    )


# Every format, and with biases and a tied head each way of calibrating: scales folded into what
# comes before, scales of activations, of two levels, and none
FORMATS = [("llama", name) for name in MADE]
FORMATS += [("qwen2", "int4_awq"), ("qwen2", "int8_sq"), ("qwen3", "nvfp4")]


@pytest.mark.parametrize(("family", "name"), FORMATS)
def test_tensors_and_settings_are_those_of_modelopts_whole_model(
    bases: dict[str, Path], tmp_path: Path, family: str, name: str
) -> None:
    base = bases[family]
    whole_model.export(base, tmp_path / "theirs", name, batches_of(base))
    quantized(base, tmp_path / "ours", name)
    ours, theirs = (whole_model.tensors_of(tmp_path / side) for side in ("ours", "theirs"))
    assert whole_model.differing(ours, theirs) == []
    assert same_settings(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "int4_awq"])
def test_head_cache_and_exclusions_too(bases: dict[str, Path], tmp_path: Path, name: str) -> None:
    base = bases["llama"]
    left_out = ["model.layers.1.mlp.down_proj", "model.layers.2.mlp.down_proj"]
    # AWQ's search runs with a quantized cache there, and with a plain one here
    cache = name != "int4_awq"
    whole_model.export(
        base,
        tmp_path / "theirs",
        name,
        batches_of(base),
        head=True,
        fp8_cache=cache,
        disabled=left_out,
    )
    more: dict[str, Any] = {"lm_head_quantization": name, "fp8_cache": cache}
    quantized(base, tmp_path / "ours", name, exclude=("*.[12].mlp.down_proj",), **more)
    ours, theirs = (whole_model.tensors_of(tmp_path / side) for side in ("ours", "theirs"))
    assert whole_model.differing(ours, theirs) == []
    assert same_settings(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("name", ["int8_sq", "nvfp4"])
def test_several_batches_are_calibrated_with_alike(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(layerwise, "BATCH_TOKENS", 64)
    base = bases["qwen3"]
    batches = batches_of(base)
    assert [len(batch) for batch in batches] == [1, 2]
    whole_model.export(base, tmp_path / "theirs", name, batches)
    quantized(base, tmp_path / "ours", name)
    ours, theirs = (whole_model.tensors_of(tmp_path / side) for side in ("ours", "theirs"))
    assert whole_model.differing(ours, theirs) == []


def test_mxfp8_with_a_quantized_cache_is_calibrated_for_the_cache_alone(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    quantized(bases["llama"], tmp_path / "plain", "mxfp8")
    quantized(bases["llama"], tmp_path / "cache", "mxfp8", fp8_cache=True)
    plain, cache = (whole_model.tensors_of(tmp_path / side) for side in ("plain", "cache"))
    scales = {
        name: cache.pop(name) for name in list(cache) if name.endswith(("k_scale", "v_scale"))
    }
    assert whole_model.differing(plain, cache) == []
    assert len(scales) == 2 * SIZES["layers"]
    assert len({float(scale) for scale in scales.values()}) > 1


def test_scales_of_shared_inputs_are_shared(bases: dict[str, Path], tmp_path: Path) -> None:
    quantized(bases["qwen3"], tmp_path / "out", "nvfp4")
    tensors = whole_model.tensors_of(tmp_path / "out")
    for group in (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    ):
        for scale in ("input_scale", "weight_scale_2"):
            assert len({float(tensors[f"model.layers.1.{name}.{scale}"]) for name in group}) == 1


def test_batches_are_of_about_one_size() -> None:
    """A small last batch would count as much as a large one in AWQ's search."""
    windows = [tuple(range(256))] * 17
    assert [len(batch) for batch in layerwise.batches(windows)] == [8, 9]
    assert [window for batch in layerwise.batches(windows) for window in batch] == windows
    assert [len(batch) for batch in layerwise.batches(windows[:16])] == [16]
    assert [len(batch) for batch in layerwise.batches([tuple(range(5000))] * 2)] == [1, 1]
