"""NVIDIA's parser takes image encoders of both dialects, and its compiler builds those of half
types, heads of the published widths among them.

Nothing is run on a GPU: that an engine is compiled says nothing about what it computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from edgespec.backends.tensorrt.lowering.encoder import lower_encoder
from edgespec.backends.tensorrt.target import Compute, Dialect, Target
from edgespec.vision.component import VisualConfig
from edgespec.vision.contract import vision_contract
from tests import made, shared
from tests.tensorrt import rtx
from tests.tensorrt_on_ort import as_bytes
from tests.toys.towers import write_vlm

pytestmark = pytest.mark.tensorrt
# Heads of 16, and of the published widths: 80 in Qwen2.5-VL, 72 in Qwen3-VL
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5_vl": ("qwen2_5_vl", {}),
    "qwen2_5_vl-80": ("qwen2_5_vl", {"hidden_size": 160, "num_heads": 2}),
    "qwen3_vl": ("qwen3_vl", {}),
    "qwen3_vl-72": ("qwen3_vl", {"hidden_size": 144, "num_heads": 2}),
}
dialects = pytest.mark.parametrize("dialect", list(Dialect))
names = pytest.mark.parametrize("name", ROWS)


@pytest.fixture(autouse=True)
def whole_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches come in fours, which are a token."""
    monkeypatch.setattr(rtx, "ROWS", (4, 32, 256))


def exported(name: str) -> Path:
    rtx.bindings()  # before anything is exported
    model_type, vision = ROWS[name]
    checkpoint = shared.made_once(
        ("vlm", model_type, vision), lambda path: write_vlm(path, model_type, **vision)
    )
    return made.exported(checkpoint) / "visual"


def lowered(name: str, dialect: Dialect, compute: Compute) -> bytes:
    directory = exported(name)
    config = VisualConfig.read(directory / "config.json")
    target = Target(dialect=dialect, compute=compute, capacity=64, max_rows=64)
    model = ir.load(directory / "model.onnx")
    return as_bytes(lower_encoder(model, vision_contract(config.vision), target))


@dialects
@names
def test_the_parser_takes_an_encoder_in_float32(name: str, dialect: Dialect) -> None:
    answer = rtx.ask(lowered(name, dialect, "float32"), build=False)
    assert answer.step == "", answer.lines


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@dialects
@names
def test_the_compiler_builds_an_encoder_in_half_types(
    name: str, dialect: Dialect, compute: Compute
) -> None:
    rtx.needs_builds()
    answer = rtx.ask(lowered(name, dialect, compute), build=True)
    assert answer.step == "", answer.lines


def test_a_canonical_encoder_is_refused() -> None:
    """What the tests above would not notice if everything were taken."""
    model = ir.load(exported("qwen2_5_vl") / "model.onnx")
    assert rtx.ask(as_bytes(model), build=True).step != ""
