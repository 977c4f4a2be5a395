"""A quantised Linear in a graph of its own on ONNX Runtime, against the weight that its values
stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from edgespec.contract import TensorSpec
from edgespec.errors import UnsupportedModel
from edgespec.export import pieces, stored_weights
from edgespec.export.pieces import open_piece
from edgespec.export.writer import write_weights
from edgespec.graphs.assembly import GraphPart
from edgespec.graphs.builder import GraphBuilder, WeightPlan, save
from edgespec.graphs.linear import linear, products, quantized_weight
from edgespec.graphs.packing import BlockPart, Packing, stored_bytes
from edgespec.quantization.quantized_weight import QuantizedWeight, dequantize, dequantize_stored
from edgespec.quantization.schemes import SCHEMES
from tests.one_weight import NAME, table_of, weights_of_forms

OUT, IN = 24, 64
RNG = np.random.default_rng(0)
FP8 = ml_dtypes.float8_e4m3fn


def weight(
    scheme: str = "int4_wo",
    block: tuple[int, int] = (1, 16),
    scales_dtype: Any = np.float16,
    **more: Any,
) -> QuantizedWeight:
    """Random quantized values and scales of a scheme."""
    kind = SCHEMES[scheme].weight
    values = (
        RNG.integers(-7, 8, (OUT, IN))
        if kind.startswith("int")
        else RNG.standard_normal((OUT, IN)) * 4
    )
    quantized = values.astype(getattr(ml_dtypes, kind, kind))
    shape = -(-OUT // block[0]), -(-IN // block[1])
    scales = RNG.uniform(0.01, 0.1, shape).astype(scales_dtype)
    return QuantizedWeight(NAME, SCHEMES[scheme], quantized, scales, block, **more)


def run(
    stored: QuantizedWeight, x: NDArray[np.float32], path: Path, *, in_parts: bool = False
) -> NDArray[Any]:
    """The product by ONNX Runtime alone, or as a piece whose weight is dequantized in parts."""
    plan = WeightPlan("data")
    b = GraphBuilder("graph", plan)
    value = b.input(TensorSpec("x", "float32", ("B", IN)))
    b.output(linear(b, table_of(stored), value, NAME, "up"), TensorSpec("y", "float32", ("B", OUT)))
    write_weights(plan, path / "data", lambda _: None)
    if in_parts:
        return open_piece(GraphPart(b.model(), ("x",)), path).run(["y"], [{"x": x}])[0][0]
    save(b.model(), path / "model.onnx")
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = ort.InferenceSession(
        str(path / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )
    y: NDArray[Any] = session.run(None, {"x": x})[0]
    return y


def some_rows() -> NDArray[np.float32]:
    return RNG.standard_normal((3, IN)).astype(np.float32)


WEIGHTS = {
    "int4 in blocks": weight(),
    "int4 in one block a row": weight(block=(1, IN)),
    "int8 a channel": weight("int8_wo", (1, IN)),
    "int8 in blocks": weight("int8_wo", (1, 32)),
    "fp8 a tensor": weight("fp8_block", (OUT, IN)),
    "fp8 a channel": weight("fp8_block", (1, IN)),
    "fp8 in squares": weight("fp8_block", (16, 32)),
    "smoothed": weight(
        "int4_awq", (1, 32), pre_quant_scale=RNG.uniform(0.5, 2, IN).astype(np.float32)
    ),
    "inputs in another order": weight(input_order=RNG.permutation(IN)),
    **weights_of_forms((OUT, IN)),
}


# ONNX Runtime has no kernels for them
PIECES_ALONE = {
    "fp4 by powers of two": WEIGHTS.pop("fp4 by powers of two"),
    "fp4 in blocks": weight("w4a16_nvfp4", scales_dtype=FP8, global_scale=0.25),
    "fp8 with powers of two": weight("mxfp8", (1, 32), scales_dtype=ml_dtypes.float8_e8m0fnu),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_product_is_that_of_the_weight_that_values_and_scales_stand_for(
    tmp_path: Path, name: str
) -> None:
    x = some_rows()
    y = run(WEIGHTS[name], x, tmp_path)
    np.testing.assert_allclose(y, x @ dequantize(WEIGHTS[name]).T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", [7, 16 * 24, 1 << 16])
@pytest.mark.parametrize("name", [*WEIGHTS, *PIECES_ALONE])
def test_a_piece_that_dequantizes_in_parts_has_the_same_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, part: int
) -> None:
    """Whatever rows and blocks a part has, and however many outputs are dequantized at a time."""
    monkeypatch.setattr(stored_weights, "PART_ELEMENTS", part)
    monkeypatch.setattr(pieces, "CHUNK_ELEMENTS", 8 * IN)
    monkeypatch.setattr(pieces, "TILE_ROWS", 8)
    stored, x = (WEIGHTS | PIECES_ALONE)[name], some_rows()
    y = run(stored, x, tmp_path, in_parts=True)
    np.testing.assert_allclose(y, x @ dequantize(stored).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*WEIGHTS, *PIECES_ALONE])
def test_outputs_of_a_stored_weight_are_dequantized_to_the_bit(tmp_path: Path, name: str) -> None:
    stored = (WEIGHTS | PIECES_ALONE)[name]
    plan, table = WeightPlan("data"), table_of(stored)
    b = GraphBuilder("graph", plan)
    packing = table.packing(NAME)
    assert packing is not None
    value = quantized_weight(b, table, packing, NAME, "up")
    write_weights(plan, tmp_path / "data", lambda _: None)
    found = stored_weights.quantized_weight(value, tmp_path)
    assert found is not None
    assert found.shape == (IN, OUT)
    some = found.outputs(8, 22)
    wanted = dequantize_stored(stored)[8:22]
    if stored.input_order is not None:
        wanted = wanted[:, stored.input_order]
    assert np.array_equal(some if found.rows_are_outputs else some.T, wanted)


def test_rows_of_an_odd_number_of_4_bit_values_are_read(tmp_path: Path) -> None:
    """Two values of different rows share a byte."""
    whole = weight()
    odd = replace(whole, values=whole.values[:-1], scales=whole.scales[:-1])
    x = some_rows()
    y = run(odd, x, tmp_path, in_parts=True)
    np.testing.assert_allclose(y, x @ dequantize(odd).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("scheme", "step", "top"), [("int8_sq", 0.02, 127), ("fp8", 0.004, 448)])
def test_static_activations_are_rounded_and_clipped(
    tmp_path: Path, scheme: str, step: float, top: int
) -> None:
    stored = weight(scheme, (1, IN) if scheme == "int8_sq" else (OUT, IN), input_scale=step)
    x = some_rows() * 2  # some beyond what the scale reaches
    assert (np.abs(x) > top * step).any()
    units = x / np.float32(step)
    fp8 = np.clip(units, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    rounded = (np.clip(np.rint(units), -128, 127) if scheme == "int8_sq" else fp8) * np.float32(
        step
    )
    wanted = rounded @ dequantize(stored).T
    np.testing.assert_allclose(run(stored, x, tmp_path), wanted, rtol=1e-4, atol=1e-4)
    assert np.abs(x @ dequantize(stored).T - wanted).max() > 0.01  # or the rounding would not show


def test_a_scale_of_zero_becomes_one_and_its_values_zero(tmp_path: Path) -> None:
    """TensorRT wants scales above zero."""
    stored = weight()
    stored.scales[3, 2] = 0
    packing = Packing(stored)
    assert (packing.array("weight_scale") > 0).all()
    assert not packing.array("weight")[32:48, 3].astype(np.int8).any()
    assert packing.array("weight")[32:48, 4].astype(np.int8).any()
    x = some_rows()
    np.testing.assert_allclose(
        run(stored, x, tmp_path), x @ dequantize(stored).T, rtol=1e-4, atol=1e-5
    )


def test_inputs_that_do_not_fill_their_blocks_are_refused_by_the_layers_name() -> None:
    with pytest.raises(
        UnsupportedModel,
        match=f"{NAME} has 64 inputs, which is not a multiple of",
    ):
        Packing(weight("fp8_block", (48, 48)))


@pytest.mark.parametrize(("factor", "inputs", "count"), [(1, "xx", 1), (2, "xx", 2), (1, "xz", 2)])
def test_linears_share_the_multiplication_of_one_input_with_equal_scales(
    factor: int, inputs: str, count: int
) -> None:
    stored = WEIGHTS["smoothed"]
    assert stored.pre_quant_scale is not None
    other = replace(stored, pre_quant_scale=stored.pre_quant_scale * factor)
    b = GraphBuilder("graph", WeightPlan("data"))
    values = {name: b.input(TensorSpec(name, "float32", ("B", IN))) for name in "xz"}
    for each, value, name in ((stored, inputs[0], "q"), (other, inputs[1], "k")):
        linear(b, table_of(each), values[value], NAME, name)
    assert sum(node.op_type == "Mul" for node in b.nodes) == count


def test_what_a_graph_says_of_its_products() -> None:
    b = GraphBuilder("graph", WeightPlan("data"))
    x = b.input(TensorSpec("x", "float32", ("B", IN)))
    nvfp4 = replace(weight("nvfp4"), global_scale=0.5, input_scale=0.25)
    for each, name in ((weight(), "a"), (weight("int8_wo", (1, IN)), "b"), (nvfp4, "c")):
        linear(b, table_of(each), x, NAME, name)
    b.op("MatMul", x, b.constant("plain", np.zeros((IN, OUT), np.float32)), name="d")
    b.op("MatMul", x, x, name="no Linear")
    assert list(products(b.model())) == [
        ("a", "int4_wo", 16),
        ("b", "int8_wo", None),
        ("c", "nvfp4", 16),
        ("d", None, None),
    ]
    last = next(node for node in b.nodes if node.name == "c")
    assert last.metadata_props["edgespec.activations"] == "dynamic block"
    assert last.metadata_props["edgespec.input_scale"] == "0.25"


@pytest.mark.parametrize("name", WEIGHTS)
def test_parts_have_the_size_that_was_planned(name: str) -> None:
    packing = Packing(WEIGHTS[name])
    of_blocks = [part for part in get_args(BlockPart) if packing.has(part)]
    for part in ("weight", *of_blocks):
        info, array = packing.info(part), packing.array(part)
        assert (array.shape, array.dtype.name) == (info.shape, info.dtype)
        assert stored_bytes(array).size == info.num_bytes


def test_one_block_a_row_is_still_a_block() -> None:
    """Lowerings find INT4 in one form, whatever its group size is."""
    packing = Packing(WEIGHTS["int4 in one block a row"])
    assert (packing.sharing, packing.axis, packing.block_size) == ("block", 0, IN)
    assert packing.info("weight_scale").shape == (1, OUT)


def test_of_two_small_values_the_first_is_in_the_low_half() -> None:
    values = np.array([[1, -2, 3], [7, -8, 0]], ml_dtypes.int4)
    assert stored_bytes(values).tolist() == [0xE1, 0x73, 0x08]
    assert stored_bytes(values[:, :1]).tolist() == [0x71]
    assert stored_bytes(values[0]).tolist() == [0xE1, 0x03]
