"""Products of integers: what they compute, by integers of numpy, and that a row has its own
bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from edgespec.backends.ort import int8_gemm
from edgespec.backends.ort.int8_gemm import Int8Kernel, is_exact_here, pack
from edgespec.errors import BuildError
from edgespec.quantization.quantized_weight import QuantizedWeight, quantize_rtn
from edgespec.quantization.schemes import SCHEMES

Floats = NDArray[np.float32]
IN, OUT = 160, 72
STEPS = (None, np.float32(0.05))


def weight() -> QuantizedWeight:
    return quantize_rtn(np.random.default_rng(1).standard_normal((OUT, IN), np.float32), 8)


def product(x: Floats, step: np.float32 | None) -> Floats:
    kernel = Int8Kernel(IN, OUT, step)
    return int8_gemm.run(kernel, x, *pack(kernel, weight()))


def rows(count: int) -> Floats:
    normal = np.random.default_rng(0).standard_normal((count, IN))
    return (normal * 10.0 ** (np.arange(count)[:, None] % 5 - 2)).astype(np.float32)


@pytest.mark.parametrize("step", STEPS)
def test_rows_have_the_same_bits_in_calls_of_any_size(step: np.float32 | None) -> None:
    x = rows(40)
    together = product(x, step)
    for count in range(1, 21):
        for first in (0, 7, 20):
            here = slice(first, first + count)
            np.testing.assert_array_equal(product(x[here], step), together[here])


@pytest.mark.parametrize("step", STEPS)
def test_a_product_is_the_one_of_its_values(step: np.float32 | None) -> None:
    x, kept = rows(12), weight()
    for found, row in zip(product(x, step), x.astype(np.float64), strict=True):
        scale = np.abs(row).max() / 127 if step is None else float(step)
        values = np.clip(np.round(row / scale), -128, 127)
        sums = kept.values.astype(np.int64) @ values.astype(np.int64)
        np.testing.assert_allclose(
            found, sums * kept.scales[:, 0].astype(np.float64) * scale, rtol=1e-6
        )


def test_rows_of_zeros_and_of_any_size_are_told_by_their_own_scale() -> None:
    sizes = np.array([0, 1e-44, 1e-30, 1, 1e30], np.float32)[:, None]
    x = np.random.default_rng(0).uniform(-1, 1, (1, IN)).astype(np.float32) * sizes
    found, wanted = (
        product(x, None),
        x.astype(np.float64) @ (weight().values * weight().scales).T.astype(np.float64),
    )
    assert not found[0].any()
    assert np.isfinite(found).all()
    for i in (2, 3, 4):
        assert np.abs(found[i] - wanted[i]).max() < 0.02 * np.abs(wanted[i]).max()


def test_static_values_end_at_both_sides() -> None:
    x = np.array([[1e6], [-1e6]], np.float32) * np.eye(1, IN, dtype=np.float32)
    first = weight().values[:, 0].astype(np.float64) * weight().scales[:, 0]
    np.testing.assert_allclose(product(x, np.float32(1)), [127 * first, -128 * first], rtol=1e-6)


def test_one_scale_for_the_whole_weight_is_one_for_each_channel() -> None:
    values = np.random.default_rng(0).integers(-128, 128, (OUT, IN)).astype(np.int8)
    whole = QuantizedWeight(
        "w", SCHEMES["int8_sq"], values, np.full((1, 1), 0.5, np.float32), (OUT, IN)
    )
    _, scales = pack(Int8Kernel(IN, OUT, np.float32(0.25)), whole)
    np.testing.assert_array_equal(scales, np.full(OUT, 0.125, np.float32))


# What reads what


def quantised(node: ir.Node, step: float, to: ir.DataType, other: float | None = None) -> ir.Node:
    """QuantizeLinear and DequantizeLinear before a product."""
    scales = [
        ir.Value(name=f"s{i}", const_value=ir.tensor(np.float32(value)))
        for i, value in enumerate((step, other or step))
    ]
    values = ir.node(
        "QuantizeLinear", [node.inputs[0], scales[0]], {"output_dtype": int(to)}, name="q"
    )
    back = ir.node("DequantizeLinear", [values.outputs[0], scales[1 if other else 0]], name="dq")
    node.replace_input_with(0, back.outputs[0])
    return node


def matmul() -> ir.Node:
    return ir.node("MatMul", [ir.Value(name="x"), ir.Value(name="w")], name="product")


def test_a_static_input_is_found_behind_its_two_nodes() -> None:
    node = matmul()
    x = node.inputs[0]
    assert int8_gemm.static_input(node) is None
    assert int8_gemm.static_input(quantised(node, 0.5, ir.DataType.INT8)) == (x, np.float32(0.5))


@pytest.mark.parametrize(
    "node",
    [
        quantised(matmul(), 0.5, ir.DataType.FLOAT8E4M3FN),
        quantised(matmul(), 0.5, ir.DataType.INT8, 0.25),
    ],
    ids=["fp8", "another scale behind"],
)
def test_other_nodes_are_no_static_input(node: ir.Node) -> None:
    assert int8_gemm.static_input(node) is None


# Broken ones


def in_16_bits(kernel: Int8Kernel, x: Floats, values: Any, scales: Any) -> Floats:
    """What a CPU without the instruction computes: pairs of products saturate."""
    assert kernel.step is not None
    unsigned = np.clip(np.rint(x / kernel.step), -128, 127).astype(np.int64) + 128
    terms = unsigned[:, :, None] * values.astype(np.int64)[None]
    pairs = np.clip(terms[:, 0::2] + terms[:, 1::2], -(2**15), 2**15 - 1)
    sums = pairs.sum(1) - 128 * values.astype(np.int64).sum(0)
    return np.asarray(sums * scales, np.float32)


@pytest.mark.parametrize("rows", [(1,), (2,), (64,), (1, 2, 64)])
def test_sums_in_16_bits_are_noticed_in_calls_of_any_size(
    monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...]
) -> None:
    """A CPU has kernels of its own for one row and for many."""
    is_exact_here.cache_clear()
    assert is_exact_here()
    is_exact_here.cache_clear()
    run = int8_gemm.run
    monkeypatch.setattr(
        int8_gemm,
        "run",
        lambda kernel, x, *arrays: (in_16_bits if len(x) in rows else run)(kernel, x, *arrays),
    )
    assert not is_exact_here()
    is_exact_here.cache_clear()


def turned(values: Any, scales: Any) -> Any:
    return values[::-1], scales


def zero_point_off(values: Any, scales: Any) -> Any:
    return values + np.int8(1), scales


def scales_of_others(values: Any, scales: Any) -> Any:
    return values, scales[::-1]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", [turned, zero_point_off, scales_of_others])
def test_a_kernel_that_reads_something_else_is_found(
    monkeypatch: pytest.MonkeyPatch, fault: Any, step: np.float32 | None
) -> None:
    run = int8_gemm.run
    monkeypatch.setattr(
        int8_gemm,
        "run",
        lambda kernel, x, *arrays: run(kernel, x, *map(np.ascontiguousarray, fault(*arrays))),
    )
    with pytest.raises(BuildError, match=r"MatMulInteger computes the weight with an error of"):
        pack(Int8Kernel(IN, OUT, step), weight())
