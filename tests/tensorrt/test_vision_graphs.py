"""NVIDIA's parser takes image encoders of both dialects, and its compiler builds those of half
types and in FP8, heads of the published widths among them.

Nothing is run on a GPU: that an engine is compiled says nothing about what it computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from edgespec.backends.tensorrt.lowering.vision import lower_vision
from edgespec.backends.tensorrt.target import Compute, Dialect, Target
from edgespec.progress import Silent
from edgespec.quantize import modelopt
from edgespec.quantize.llm import Options, quantize_llm
from edgespec.vision.component import VisionComponentConfig
from edgespec.vision.contract import vision_contract
from tests import made, shared
from tests.tensorrt import rtx
from tests.tensorrt_on_ort import as_bytes
from tests.toys.vision import write_vlm

pytestmark = pytest.mark.tensorrt
# Heads of 16, and of the published widths: 80 in Qwen2.5-VL, 72 in Qwen3-VL
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5_vl": ("qwen2_5_vl", {}),
    "qwen2_5_vl-80": ("qwen2_5_vl", {"hidden_size": 160, "num_heads": 2}),
    "qwen3_vl": ("qwen3_vl", {}),
    "qwen3_vl-72": ("qwen3_vl", {"hidden_size": 144, "num_heads": 2}),
}
# In FP8: with the published size of an MLP, which is no multiple of 16, and a small one like it
QUANTIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5_vl-3420": (
        "qwen2_5_vl",
        {"hidden_size": 160, "num_heads": 2, "intermediate_size": 3420},
    ),
    "qwen2_5_vl-60": ("qwen2_5_vl", {"intermediate_size": 60}),
    "qwen3_vl-60": ("qwen3_vl", {"intermediate_size": 60}),
}
dialects = pytest.mark.parametrize("dialect", list(Dialect))
names = pytest.mark.parametrize("name", ROWS)


@pytest.fixture(autouse=True)
def whole_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches come in fours, which are a token."""
    monkeypatch.setattr(rtx, "ROWS", (4, 32, 256))


def written(model_type: str, vision: dict[str, Any]) -> Path:
    rtx.bindings()  # before anything is exported
    return shared.made_once(
        ("vlm", model_type, vision), lambda path: write_vlm(path, model_type, **vision)
    )


def exported(name: str) -> Path:
    return made.exported(written(*ROWS[name])) / "visual"


def exported_in_fp8(name: str) -> Path:
    base = written(*QUANTIZED[name])

    def quantize(path: Path) -> None:
        options = Options(None, visual_quantization="fp8")
        quantize_llm(str(base), path, options, Silent(), modelopt.Log())

    return made.exported(shared.made_once(("vlm in fp8", QUANTIZED[name]), quantize)) / "visual"


def lowered(directory: Path, dialect: Dialect, compute: Compute) -> bytes:
    config = VisionComponentConfig.read(directory / "config.json")
    target = Target(dialect=dialect, compute=compute, capacity=64, max_rows=64)
    model = ir.load(directory / "model.onnx")
    return as_bytes(lower_vision(model, vision_contract(config.vision), target))


@dialects
@names
def test_the_parser_takes_an_encoder_in_float32(name: str, dialect: Dialect) -> None:
    answer = rtx.ask(lowered(exported(name), dialect, "float32"), build=False)
    assert answer.step == "", answer.lines


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@dialects
@names
def test_the_compiler_builds_an_encoder_in_half_types(
    name: str, dialect: Dialect, compute: Compute
) -> None:
    rtx.needs_builds()
    answer = rtx.ask(lowered(exported(name), dialect, compute), build=True)
    assert answer.step == "", answer.lines


@pytest.mark.parametrize(("compute", "sm"), [("float16", 120), ("bfloat16", 120), ("float16", 89)])
@dialects
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_compiler_builds_an_encoder_in_fp8(
    name: str, dialect: Dialect, compute: Compute, sm: int
) -> None:
    graph = lowered(exported_in_fp8(name), dialect, compute)
    assert graph.count(b"QuantizeLinear") >= 22  # of activations, a Linear each
    answer = rtx.ask(graph, build=rtx.builds(), sm=sm)  # else what it parses
    assert answer.step == "", answer.lines


def test_a_canonical_encoder_is_refused() -> None:
    """What the tests above would not notice if everything were taken."""
    model = ir.load(exported("qwen2_5_vl") / "model.onnx")
    assert rtx.ask(as_bytes(model), build=True).step != ""
