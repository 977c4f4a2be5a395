"""NVIDIA's parser takes quantized products of each scheme and type, and its compiler builds them.

Nothing here runs an engine.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx_ir as ir
import pytest

from edgespec.artifacts import file_names
from edgespec.artifacts.component import ComponentConfig
from edgespec.backends.tensorrt.lowering import lower
from edgespec.backends.tensorrt.target import Compute, Dialect, Target
from edgespec.contract import canonical_contract
from edgespec.export.components import ExportOptions
from tests import made, toys
from tests.quantized_products import EXPORTS, WEIGHTS, Product, keep_static, weight
from tests.tensorrt import rtx
from tests.tensorrt_on_ort import as_bytes

pytestmark = pytest.mark.tensorrt
COMPUTES: tuple[Compute, ...] = ("float32", "float16", "bfloat16")


def asked(product: Product, *, build: bool, sm: int = 120) -> rtx.Answer:
    path = product.directory / file_names.MODEL
    ir.save(product.model, path)
    return rtx.ask(path, build=build, sm=sm)


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_product_is_parsed(tmp_path: Path, name: str, compute: Compute, dialect: Dialect) -> None:
    product = Product.of(WEIGHTS[name], tmp_path).lower(compute, dialect)
    answer = asked(product, build=False)
    assert answer.step == "", answer.lines


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_product_is_compiled(tmp_path: Path, name: str, compute: Compute) -> None:
    rtx.needs_builds()
    answer = asked(Product.of(WEIGHTS[name], tmp_path).lower(compute), build=True)
    assert answer.step == "", answer.lines


# What it compiles for older devices too: activations that are rounded there by other means or, of
# w4a8_awq, not at all
OLDER = {"mxfp8": (89,), "w4a8_awq": (80, 86)}


@pytest.mark.parametrize("sm", [75, 80, 86, 89, 120])
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_compiler_has_the_formats_of_a_device_as_the_table_does(
    tmp_path: Path, name: str, sm: int
) -> None:
    rtx.needs_builds()
    answer = asked(Product.of(WEIGHTS[name], tmp_path).lower("float16"), build=True, sm=sm)
    known = sm >= WEIGHTS[name].scheme.min_sm or sm in OLDER.get(name, ())
    assert answer.step == ("" if known else "build"), answer.lines
    assert known or any("HW-specific datatypes" in line for line in answer.lines)


@pytest.mark.parametrize(
    ("scheme", "block", "bits"),
    [
        ("int8_wo", (1, 32), 9),
        ("int8_wo", (1, 128), 9),
        ("fp8_block", (128, 128), 9),
        ("int4_wo", (1, 128), 5),
        ("w4a16_nvfp4", (1, 16), 6),
    ],
)
def test_an_engine_has_weights_as_they_are_stored(
    tmp_path: Path, scheme: str, block: tuple[int, int], bits: int
) -> None:
    """And not in the compute type: a product of 2 million weights, whose kernels take 0.2 MB."""
    rtx.needs_builds()
    shape = (2048, 1024)
    product = Product.of(weight(scheme, block, shape=shape), tmp_path).lower("bfloat16")
    answer = asked(product, build=True)
    assert answer.step == "", answer.lines
    assert answer.engine_bytes < shape[0] * shape[1] * bits / 8 + 250_000


# ---- why it is lowered so: what the compiler says to the graphs as they were


def test_powers_of_two_as_export_wrote_them_are_not_parsed(tmp_path: Path) -> None:
    assert asked(Product.of(WEIGHTS["mxfp8"], tmp_path), build=False).step == "parse"


def test_a_product_of_int4_with_fp8_is_not_compiled(tmp_path: Path) -> None:
    """A release that compiles it is noticed here: then its activations need not stay as they
    are."""
    rtx.needs_builds()
    product = Product.of(WEIGHTS["w4a8_awq"], tmp_path)
    assert asked(product, build=True).step == "build"
    assert asked(keep_static(product), build=True).step == ""


def test_scales_of_int4_in_another_type_are_not_compiled(tmp_path: Path) -> None:
    rtx.needs_builds()
    product = Product.of(WEIGHTS["int4_wo"], tmp_path).lower("float16")
    for node in product.model.graph:
        if node.op_type == "DequantizeLinear" and node.outputs[0].uses():
            scale = node.inputs[1].producer() if node.inputs[1] is not None else None
            assert scale is not None
            assert scale.op_type == "Cast"
            node.replace_input_with(1, scale.inputs[0])
            node.attributes["output_dtype"] = ir.AttrInt64("output_dtype", int(ir.DataType.FLOAT16))
    assert asked(product, build=True).step == "build"


# ---- whole models


@pytest.mark.slow
@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("name", EXPORTS)
def test_a_base_is_compiled(
    modelopt_exports: Path, tmp_path: Path, name: str, dialect: Dialect
) -> None:
    """Parsed in each type, compiled in one."""
    checkpoint = shutil.copytree(modelopt_exports / name, tmp_path / "checkpoint")
    toy = toys.make_base(tmp_path / "toy", "llama", layers=2)
    shutil.copy(toy / "tokenizer.json", checkpoint)
    (onnx_dir,) = made.exported(checkpoint, ExportOptions(golden=False)).iterdir()
    contract = canonical_contract(ComponentConfig.read(onnx_dir / file_names.CONFIG).graph)
    for compute in COMPUTES:
        model = ir.load(onnx_dir / file_names.MODEL)
        lower(model, contract, Target(dialect=dialect, compute=compute, capacity=64, max_rows=16))
        build = compute == "bfloat16" and rtx.builds()
        answer = rtx.ask(as_bytes(model), build=build)
        assert answer.step == "", (compute, answer.lines)
