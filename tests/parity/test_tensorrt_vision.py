"""Image encoders that are lowered for TensorRT, run by ONNX Runtime, against the golden rows of the
export; and whether the parsers of its releases take them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file

from edgespec.backends.golden import cosine
from edgespec.backends.ort import vision_lowering
from edgespec.backends.tensorrt.contract import lowered_contract
from edgespec.backends.tensorrt.lowering.vision import lower_vision
from edgespec.backends.tensorrt.parser_check import check
from edgespec.backends.tensorrt.rules import Level
from edgespec.backends.tensorrt.target import Compute, Dialect, Target
from edgespec.backends.tensorrt.versions import release_of
from edgespec.errors import ContractError
from edgespec.progress import Silent
from edgespec.quantize.llm import Options, quantize_llm
from edgespec.quantize.modelopt import Log
from edgespec.vision.component import VisionComponentConfig
from edgespec.vision.contract import PIXELS, vision_contract
from edgespec.vision.grid import Grid, encoder_inputs
from tests import made, shared
from tests.tensorrt_on_ort import open_session, widened
from tests.toys.vision import write_vlm

# Largest difference of a row's element, relative to the largest: what half precision rounds
TOLERANCE: dict[Compute, float] = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}
BASIC = {"Attention", "RotaryEmbedding", "RMSNormalization"}

families = pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
dialects = pytest.mark.parametrize("dialect", list(Dialect))


def exported(model_type: str) -> Path:
    checkpoint = shared.made_once(("vlm", model_type, {}), lambda path: write_vlm(path, model_type))
    return made.exported(checkpoint) / "visual"


def lowered(
    directory: Path, dialect: Dialect, compute: Compute, model: ir.Model | None = None
) -> ir.Model:
    config = VisionComponentConfig.read(directory / "config.json")
    target = Target(dialect=dialect, compute=compute, capacity=64, max_rows=64)
    model = model or ir.load(directory / "model.onnx")
    return lower_vision(model, vision_contract(config.vision), target)


@pytest.mark.parametrize("compute", list(TOLERANCE))
@dialects
@families
def test_a_lowered_encoder_gives_the_golden_rows(
    model_type: str, dialect: Dialect, compute: Compute
) -> None:
    directory = exported(model_type)
    config, golden = (
        VisionComponentConfig.read(directory / "config.json"),
        load_file(directory / "golden.safetensors"),
    )
    model = lowered(directory, dialect, compute)
    for narrow in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        model = widened(model, narrow)
    frames, height, width = (int(size) for size in golden["grid"])
    grid: Grid = (frames, height, width)
    feeds = {PIXELS: golden[PIXELS], **encoder_inputs(config.vision, grid)}
    names = [spec.name for spec in vision_contract(config.vision).outputs]
    for name, rows in zip(names, open_session(model).run(names, feeds), strict=True):
        wanted = golden[name]
        np.testing.assert_allclose(
            rows, wanted, rtol=0, atol=TOLERANCE[compute] * float(np.abs(wanted).max())
        )
        assert cosine(rows, wanted) > 0.999


@dialects
@families
def test_a_lowered_encoder_keeps_its_contract(model_type: str, dialect: Dialect) -> None:
    directory = exported(model_type)
    model = lowered(directory, dialect, "float16")
    config = VisionComponentConfig.read(directory / "config.json")
    target = Target(dialect=dialect, compute="float16", capacity=64, max_rows=64)
    contract = lowered_contract(vision_contract(config.vision), target)
    assert [v.name for v in model.graph.inputs] == [spec.name for spec in contract.inputs]
    assert [v.name for v in model.graph.outputs] == [spec.name for spec in contract.outputs]
    types = {str(value.name): value.dtype for value in model.graph.inputs}
    assert types["pixel_values"] == ir.DataType.FLOAT16
    assert types["rope_cos"] == ir.DataType.FLOAT
    operators = {node.op_type for node in model.graph}
    assert bool(operators & BASIC) == (dialect is Dialect.NATIVE)


@pytest.mark.parametrize("release", ["10.13", "10.15", "11.4", "rtx-1.4", "rtx-1.7"])
@families
def test_the_parsers_of_releases_take_an_encoder(model_type: str, release: str) -> None:
    report = check(exported(model_type), release_of(release)).report
    assert [finding for finding in report.findings if finding.level is Level.REFUSED] == []


@dialects
@families
def test_fp8_stays_where_the_export_has_it(model_type: str, dialect: Dialect) -> None:
    """22 Linears, each with rounded activations; the sums are the golden ones."""
    checkpoint = shared.made_once(("vlm", model_type, {}), lambda path: write_vlm(path, model_type))
    options = Options(None, visual_quantization="fp8")
    quantized = shared.made_once(
        ("vlm fp8", model_type),
        lambda path: quantize_llm(str(checkpoint), path, options, Silent(), Log()),
    )
    directory = made.exported(quantized) / "visual"
    config = VisionComponentConfig.read(directory / "config.json").vision
    golden = load_file(directory / "golden.safetensors")
    model = lowered(directory, dialect, "float32")
    assert sum(node.op_type == "QuantizeLinear" for node in model.graph) == 22
    frames, height, width = (int(size) for size in golden["grid"])
    feeds = {PIXELS: golden[PIXELS], **encoder_inputs(config, (frames, height, width))}
    names = [spec.name for spec in vision_contract(config).outputs]
    for name, rows in zip(names, open_session(model).run(names, feeds), strict=True):
        assert cosine(rows, golden[name]) > 0.9999


@pytest.mark.parametrize("dialect", [*Dialect, None], ids=str)
@pytest.mark.parametrize(("name", "value"), [("softcap", 30.0), ("scale", 0.5)])
def test_an_attention_of_another_kind_is_refused(
    dialect: Dialect | None, name: str, value: float
) -> None:
    directory = exported("qwen2_5_vl")
    model = ir.load(directory / "model.onnx")
    node = next(node for node in model.graph if node.op_type == "Attention")
    node.attributes[name] = ir.AttrFloat32(name, value)
    lower: Callable[[], object] = (
        partial(vision_lowering.lower_vision, model, "model.onnx.data")
        if dialect is None
        else partial(lowered, directory, dialect, "float32", model)
    )
    with pytest.raises(ContractError, match="scale"):
        lower()
