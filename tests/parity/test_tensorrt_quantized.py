"""Quantized products lowered for TensorRT, against the canonical graph whose activations are
rounded as the formats say (`emulate`): both by onnx's reference evaluator, with TensorRT's own
operators in numpy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from edgespec.artifacts import file_names
from edgespec.artifacts.component import ComponentConfig
from edgespec.backends.tensorrt.lowering import lower, precision, quantization
from edgespec.backends.tensorrt.target import Compute, Dialect
from edgespec.contract import (
    ACTIVATIONS,
    INPUT_SCALE,
    SCHEME,
    GraphShape,
    canonical_contract,
    past_names,
)
from edgespec.errors import ContractError, UnsupportedModel
from edgespec.export.components import ExportOptions
from edgespec.quantization.quantized_weight import QuantizedWeight
from edgespec.quantization.schemes import SCHEMES
from tests import made, toys
from tests.one_weight import weights_of_forms
from tests.quantized_products import (
    EXACT,
    EXPORTS,
    HALVES,
    IN,
    NOT_ROUNDED,
    OUT,
    ROWS,
    WEIGHTS,
    Array,
    Product,
    keep_static,
    target,
)
from tests.tensorrt_operators import evaluated
from tests.unit.graphs.test_linear import NAME


def test_each_quantized_scheme_is_tried() -> None:
    read = {row.name for row in SCHEMES.values() if row.quantized and not row.signed_scales}
    assert read < {name.split("-")[0] for name in WEIGHTS}


def some_rows() -> Array:
    """Of sizes from a tenth to ten times; the third of them is silent in one block."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((1, ROWS, IN)) * 10.0 ** rng.uniform(-1, 1, (1, ROWS, 1))
    x[0, 2, :32] = 0
    return x.astype(np.float16).astype(ml_dtypes.bfloat16).astype(np.float32)


def difference(found: Array, wanted: Array) -> float:
    """Relative to the largest value."""
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def canonical(name: str, directory: Path) -> Product:
    product = Product.of(WEIGHTS[name], directory)
    return keep_static(product) if name in NOT_ROUNDED else product.emulate()


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_lowered_product_is_the_canonical_one_with_rounded_activations(
    tmp_path: Path, name: str
) -> None:
    x = some_rows()
    found = Product.of(WEIGHTS[name], tmp_path).lower("float32").run(x)
    assert difference(found, canonical(name, tmp_path).run(x)) < EXACT


@pytest.mark.parametrize("compute", HALVES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_lowered_product_in_half_precision_is_near_it(
    tmp_path: Path, name: str, compute: Compute
) -> None:
    x = some_rows()
    found = Product.of(WEIGHTS[name], tmp_path).lower(compute)
    types = {value.dtype for value in (*found.model.graph.inputs, *found.model.graph.outputs)}
    assert types == {precision.TYPES[compute]}
    assert difference(found.run(x), canonical(name, tmp_path).run(x)) < HALVES[compute]


# ---- what would go wrong


def node_of(product: Product, op_type: str, ending: str) -> ir.Node:
    (node,) = [
        node
        for node in product.model.graph
        if node.op_type == op_type and str(node.name).endswith(ending)
    ]
    return node


def doubled(product: Product, node: ir.Node, index: int) -> None:
    """Let a node read twice its constant."""
    old = node.inputs[index]
    assert old is not None
    assert old.const_value is not None
    tensor = ir.tensor(old.const_value.numpy() * np.float32(2), name="doubled")
    value = ir.Value(name="doubled", type=ir.TensorType(tensor.dtype), const_value=tensor)
    value.shape = ir.Shape(tensor.shape)
    product.model.graph.register_initializer(value)
    node.replace_input_with(index, value)


def other_global_scale(product: Product) -> None:
    doubled(product, node_of(product, "DequantizeLinear", "/x/scale"), 1)


def other_static_scale(product: Product) -> None:
    doubled(product, node_of(product, "QuantizeLinear", "/x/quantize"), 1)


def not_rounded(product: Product) -> None:
    node = node_of(product, "TRT_MXFP8DequantizeLinear", "up/x/dequantize")
    source = node_of(product, "TRT_MXFP8DynamicQuantize", "/x/quantize").inputs[0]
    assert source is not None
    node.outputs[0].replace_all_uses_with(source)


def neighbours_powers(product: Product) -> None:
    """The weights' scales a block further."""
    node = node_of(product, "TRT_MXFP8DequantizeLinear", "weight/dequantize/x/dequantize")
    stored = node.inputs[1].const_value if node.inputs[1] is not None else None
    assert isinstance(stored, ir.ExternalTensor)
    data = (product.directory / "data").read_bytes()
    first, count = stored.offset or 0, stored.size
    shifted = data[first + OUT : first + count] + data[first : first + OUT]
    (product.directory / "data").write_bytes(data[:first] + shifted + data[first + count :])


FAULTS: dict[str, Callable[[Product], None]] = {
    "nvfp4": other_global_scale,
    "fp8": other_static_scale,
    "int8_sq": other_static_scale,
    "mxfp8": not_rounded,
    "mxfp8-weights": neighbours_powers,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_product_is_noticed(tmp_path: Path, name: str) -> None:
    scheme, x = name.split("-")[0], some_rows()
    wanted = canonical(scheme, tmp_path).run(x)
    found = Product.of(WEIGHTS[scheme], tmp_path).lower("float32")
    FAULTS[name](found)
    assert difference(found.run(x), wanted) > 100 * EXACT


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8", "int8_sq"])
def test_rounded_activations_show(tmp_path: Path, name: str) -> None:
    """Or the tests above would say nothing about them."""
    x, plain = some_rows(), keep_static(Product.of(WEIGHTS[name], tmp_path))
    assert difference(plain.run(x), canonical(name, tmp_path).run(x)) > 100 * EXACT


# ---- the form of it


def test_powers_of_two_stay_where_export_wrote_them(tmp_path: Path) -> None:
    product = Product.of(WEIGHTS["mxfp8"], tmp_path)
    before = product.model.graph.initializers[f"{NAME}.weight_scale"].const_value
    product.lower("bfloat16")
    after = product.model.graph.initializers[f"{NAME}.weight_scale"].const_value
    assert isinstance(before, ir.ExternalTensor)
    assert isinstance(after, ir.ExternalTensor)
    assert (before.dtype, after.dtype) == (ir.DataType.FLOAT8E8M0, ir.DataType.UINT8)
    assert (after.path, after.offset, after.length) == (before.path, before.offset, before.length)
    assert (after.numpy() == before.numpy().view(np.uint8)).all()
    assert product.model.graph.opset_imports["trt"] == 1


def test_scales_of_int4_are_of_the_compute_type(tmp_path: Path) -> None:
    """The compiler wants them so: it knows no product of int4 by scales of another type."""
    product = Product.of(WEIGHTS["int4_wo"], tmp_path).lower("float16")
    (node,) = [
        n for n in product.model.graph if n.op_type == "DequantizeLinear" and n.outputs[0].uses()
    ]
    assert [v.dtype for v in (*node.inputs[1:], *node.outputs) if v] == [ir.DataType.FLOAT16] * 2


@pytest.mark.parametrize("name", ["nvfp4", "w4a16_nvfp4"])
def test_scales_of_scales_are_float32(tmp_path: Path, name: str) -> None:
    """Those of small weights are below the least normal number of float16."""
    product = Product.of(WEIGHTS[name], tmp_path).lower("float16")
    nodes = [n for n in product.model.graph if n.op_type == "DequantizeLinear"]
    assert {v.dtype for n in nodes for v in n.outputs if v.uses()} == {ir.DataType.FLOAT}


@pytest.mark.parametrize("name", WEIGHTS)
def test_no_two_nodes_share_a_scalar_scale(tmp_path: Path, name: str) -> None:
    product = Product.of(WEIGHTS[name], tmp_path).lower("float16")
    for value in product.model.graph.initializers.values():
        scales = [node for node, i in value.uses() if i == 1 and quantization.quantizes(node)]
        assert value.shape is None or value.shape.rank() > 0 or len(scales) < 2


def test_layers_and_constants_have_names_of_their_own(tmp_path: Path) -> None:
    """The parser names layers after nodes and constants, and refuses a name twice."""
    for name, stored in WEIGHTS.items():
        (tmp_path / name).mkdir()
        graph = Product.of(stored, tmp_path / name).lower("float16").model.graph
        names = [*(node.name for node in graph), *graph.initializers]
        assert len(names) == len(set(names))


# ---- what is refused


def with_scale(name: str, scale: float, *, silent: bool = False) -> QuantizedWeight:
    """A weight of which one scale, that of its last block, is another; `silent`: of zeros."""
    stored = WEIGHTS[name]
    scales, values = stored.scales.copy(), stored.values.copy()
    scales[-1, -1] = scale
    if silent:
        values[-stored.block[0] :, -stored.block[1] :] = 0
    return replace(stored, scales=scales, values=values)


@pytest.mark.parametrize("scale", [1e-8, 2e-6, 1e5])
@pytest.mark.parametrize("name", ["fp8", "int8_wo", "int8_wo-blocks", "int4_wo", "fp8_block"])
def test_scales_that_float16_does_not_hold_are_refused(
    tmp_path: Path, name: str, scale: float
) -> None:
    product = Product.of(with_scale(name, scale), tmp_path)
    with pytest.raises(UnsupportedModel, match="weight_scale: float16 does not hold") as error:
        product.lower("float16")
    assert f"{scale:.1e}" in error.value.what
    assert "`compute` bf16" in error.value.remedy
    Product.of(with_scale(name, scale), tmp_path).lower("bfloat16")
    Product.of(with_scale(name, 1e-5), tmp_path).lower("float16")
    silent = Product.of(with_scale(name, scale, silent=True), tmp_path)
    if scale < 1:
        silent.lower("float16")
        return
    with pytest.raises(UnsupportedModel, match="float16"):  # zeros times infinity
        silent.lower("float16")


def test_a_scale_of_activations_that_float16_does_not_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="float16"):
        Product.of(replace(WEIGHTS["fp8"], input_scale=1e-9), tmp_path).lower("float16")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("zero points", "int4_wo with zero points"),
        ("minimums", "q4_1 with minimums"),
        ("6 bits", "q6_k with scales of super-blocks"),
        ("either sign", "q4_0 with scales of zero or below"),
        ("fp4 by powers of two", "mxfp4 with FP4 by powers of two"),
    ],
)
def test_what_its_parser_does_not_take_is_refused_by_name(
    tmp_path: Path, name: str, what: str
) -> None:
    product = Product.of(weights_of_forms((OUT, IN))[name], tmp_path)
    with pytest.raises(UnsupportedModel, match=f"up is {what}, which TensorRT's ONNX parser"):
        product.lower("float32")


@pytest.mark.parametrize(
    ("name", "key", "text", "message"),
    [
        ("nvfp4", INPUT_SCALE, None, "the global scale of its activations"),
        ("nvfp4", SCHEME, "nvfp5", "a known scheme"),
        ("mxfp8", ACTIVATIONS, "dynamic token", "the activations of mxfp8"),
        ("zero points", SCHEME, None, "a symmetric format"),
    ],
)
def test_marks_that_say_something_else_are_refused(
    tmp_path: Path, name: str, key: str, text: str | None, message: str
) -> None:
    product = Product.of((WEIGHTS | weights_of_forms((OUT, IN)))[name], tmp_path)
    node = node_of(product, "MatMul", "up")
    if text is None:
        del node.metadata_props[key]
    else:
        node.metadata_props[key] = text
    with pytest.raises(ContractError, match=message):
        product.lower("float32")


# ---- whole models

# The opset that the portable dialect declares where it is more than 20
OPSETS = {"fp8": 21, "int4_awq": 21, "int8_sq": 21, "nvfp4": 23, "w4a8_awq": 21, "mixed": 23}


@pytest.mark.slow
@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("name", EXPORTS)
def test_a_lowered_base_is_the_canonical_one(
    modelopt_exports: Path, tmp_path: Path, name: str, dialect: Dialect
) -> None:
    checkpoint = shutil.copytree(modelopt_exports / name, tmp_path / "checkpoint")
    toy = toys.make_base(tmp_path / "toy", "llama", layers=2)
    shutil.copy(toy / "tokenizer.json", checkpoint)
    (onnx_dir,) = made.exported(checkpoint, ExportOptions(golden=False)).iterdir()
    shape = ComponentConfig.read(onnx_dir / file_names.CONFIG).graph
    work = shutil.copytree(onnx_dir, tmp_path / "work")
    wanted = Product(ir.load(work / file_names.MODEL), work).emulate(*NOT_ROUNDED)
    if name == "w4a8_awq":
        keep_static(wanted)
    found = Product(ir.load(work / file_names.MODEL), work)
    lower(found.model, canonical_contract(shape), target("float32", dialect))
    if dialect is Dialect.PORTABLE:
        assert found.model.graph.opset_imports[""] == OPSETS.get(name, 20)
    feeds = prompt(shape)
    outputs = [evaluated(product.model, work, feeds) for product in (found, wanted)]
    assert outputs[0].keys() == outputs[1].keys()
    for key, value in outputs[1].items():
        if dialect is Dialect.PORTABLE and key.startswith("present"):
            value = value[:, :, :ROWS]  # its own rows alone
        assert difference(outputs[0][key], value) < EXACT, key


def prompt(shape: GraphShape) -> dict[str, Array]:
    """Seven rows of a sequence, each after those before it."""
    rng, seen = np.random.default_rng(3), np.zeros((1, 1, ROWS, 32), bool)
    seen[..., :ROWS] = np.tri(ROWS, dtype=bool)
    angles = np.arange(ROWS)[None, :, None] / 10.0 ** np.arange(shape.rotary_dim // 2)
    feeds: dict[str, Array] = {
        "inputs_embeds": rng.standard_normal((1, ROWS, shape.hidden_size)).astype(np.float32),
        "rope_cos": np.cos(angles).astype(np.float32),
        "rope_sin": np.sin(angles).astype(np.float32),
        "attention_mask": seen,
        "write_indices": np.zeros(1, np.int64),
        "gather_idx": np.arange(ROWS)[None],
    }
    cache = np.zeros((1, shape.num_kv_heads, 32, shape.head_dim), np.float32)
    for layer in range(shape.num_layers):
        feeds |= dict.fromkeys(past_names(layer), cache)
    return feeds
