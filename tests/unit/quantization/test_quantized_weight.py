"""Claims about checkpoint/quantized.py: what a weight stands for, and rounding to the nearest."""

from __future__ import annotations

import tracemalloc
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.errors import CheckpointError
from edgespec.quantization import quantized_weight
from edgespec.quantization.quantized_weight import (
    QuantizedWeight,
    decoded,
    dequantize,
    dequantize_stored,
    quantize_rtn,
)
from edgespec.quantization.schemes import SCHEMES


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def relative_error(got: NDArray[Any], wanted: NDArray[Any]) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def one_by_one(weight: QuantizedWeight) -> NDArray[np.float64]:
    """The formula of QuantizedWeight's docstring, an element at a time."""
    result = np.zeros(weight.shape)
    for o in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            group = o // weight.block[0], i // weight.block[1]
            zero = 0.0 if weight.zero_points is None else float(weight.zero_points[group])
            scale = float(weight.scales[group]) * (weight.global_scale or 1.0)
            column = i if weight.input_order is None else int(weight.input_order[i])
            result[o, column] = (float(weight.values[o, i]) - zero) * scale
    return result


def some_weight(block: tuple[int, int], **more: Any) -> QuantizedWeight:
    rng = np.random.default_rng(1)
    values = rng.integers(0, 16, (5, 12)).astype(np.uint8).view(ml_dtypes.uint4)
    scales = rng.uniform(0.5, 2, (-(-5 // block[0]), -(-12 // block[1]))).astype(np.float16)
    return QuantizedWeight("w", SCHEMES["int4_wo"], values, scales, block, **more)


@pytest.mark.parametrize("block", [(1, 4), (1, 5), (1, 12), (5, 12), (2, 4), (4, 8), (128, 128)])
def test_dequantized_is_the_formula(
    block: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_weight, "_CHUNK", 24)  # two rows at a time
    rng = np.random.default_rng(2)
    plain = some_weight(block)
    zeros = rng.integers(0, 16, plain.scales.shape).astype(np.uint8).view(ml_dtypes.uint4)
    whole = some_weight(
        block, zero_points=zeros, global_scale=0.25, input_order=rng.permutation(12)
    )
    for weight in (plain, whole):
        np.testing.assert_allclose(dequantize_stored(weight), one_by_one(weight), rtol=1e-6)
        np.testing.assert_array_equal(
            dequantize_stored(weight, slice(1, 4)), dequantize_stored(weight)[1:4]
        )
        assert dequantize(weight).dtype == np.float32


def test_effective_weight_is_what_raw_activations_meet() -> None:
    order = np.random.default_rng(3).permutation(12)
    scale = normal(12, seed=4) ** 2 + 0.1
    weight = some_weight((1, 4), pre_quant_scale=scale, input_order=order)
    x = normal(3, 12, seed=5)
    values = weight.values.astype(np.float64) * np.repeat(
        weight.scales.astype(np.float64), 4, axis=1
    )
    as_a_graph_does = (x * scale)[:, order] @ values.T
    np.testing.assert_allclose(x @ dequantize(weight).T, as_a_graph_does, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        (x * scale) @ dequantize_stored(weight).T, as_a_graph_does, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("bits", "block", "least", "most"),
    [
        (4, 32, 0.085, 0.089),
        (4, 128, 0.099, 0.1025),
        (8, 128, 0.005, 0.007),
        (8, None, 0.007, 0.01),
    ],
)
def test_rounding_leaves_the_error_that_is_told(
    bits: Literal[4, 8], block: int, least: float, most: float
) -> None:
    array = normal(256, 1024)
    weight = quantize_rtn(array, bits, block)
    assert least < relative_error(dequantize(weight), array) < most
    assert (weight.scheme.name, weight.values.dtype.name) == (f"int{bits}_wo", f"int{bits}")
    assert weight.block == (1, block or 1024)
    assert weight.scales.dtype == np.float32
    assert (weight.scales > 0).all()


def test_int4_is_better_than_seven_steps_to_both_sides() -> None:
    array = normal(64, 256)
    for block in (32, 128):
        parts = array.reshape(64, -1, block)
        step = np.abs(parts).max(-1, keepdims=True) / 7
        plain = (np.rint(parts / step) * step).reshape(array.shape)
        assert relative_error(
            dequantize(quantize_rtn(array, 4, block)), array
        ) < 0.93 * relative_error(plain, array)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_can_be_held_exactly_is(bits: Literal[4, 8]) -> None:
    top = 2 ** (bits - 1)
    values = np.random.default_rng(6).integers(-top, top, (16, 64))
    values[:, ::32], values[:, 1::32] = -top, top - 1  # each block reaches both ends
    array = (values * 2.0**-5).astype(ml_dtypes.bfloat16)
    weight = quantize_rtn(array, bits, 32)
    np.testing.assert_array_equal(weight.values.astype(np.int64), values)
    np.testing.assert_array_equal(dequantize(weight), array.astype(np.float32))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 70),
    st.sampled_from([4, 8]),
    st.sampled_from([None, 1, 16, 32]),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    st.integers(0, 2**32 - 1),
)
def test_no_weight_is_further_off_than_its_block_allows(
    rows: int, columns: int, bits: Literal[4, 8], block: int | None, size: float, seed: int
) -> None:
    array = normal(rows, columns, seed=seed) * np.float32(size)
    array[0] = 0
    weight = quantize_rtn(array, bits, block)
    width = min(block or columns, columns)
    assert weight.scales.shape == (rows, -(-columns // width))
    off = np.abs(dequantize(weight) - array)
    reach = np.repeat(weight.scales, width, axis=1)[:, :columns]
    # Clipped at 0.85 of its reach, an extreme of 8 / 0.85 steps becomes 8 of them.
    assert (off <= reach * (0.5001 if bits == 8 else 1.42)).all()
    assert not dequantize(weight)[0].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_by_name(value: float) -> None:
    array = normal(8, 32)
    array[5, 3] = value
    with pytest.raises(CheckpointError, match=r"model\.x has NaN or Inf"):
        quantize_rtn(array, 4, 32, "model.x")


def test_rounding_holds_only_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_weight, "_CHUNK", 64 * 1024)
    array = np.ones((4096, 1024), ml_dtypes.bfloat16)  # 8 MiB; as float32 it would be 16
    tracemalloc.start()
    try:
        weight = quantize_rtn(array, 4, 32)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < weight.values.nbytes + weight.scales.nbytes + 4 * 1024 * 1024


@pytest.mark.parametrize(
    ("dtype", "codes"),
    [("float8_e4m3fn", 256), ("float8_e8m0fnu", 256), ("float4_e2m1fn", 16), ("int4", 16)],
)
def test_numbers_that_are_looked_up_are_those_of_a_conversion(dtype: str, codes: int) -> None:
    """Of an even and an odd number of bytes, and of some that stand apart."""
    kind = np.dtype(getattr(ml_dtypes, dtype))
    every = np.random.default_rng(0).permutation(256).reshape(8, 32) % codes
    every = every.astype(np.uint8)
    for some in (every, every[:, :7].copy(), every[:, ::3], every.T):
        wanted = some.view(kind).astype(np.float32)
        assert np.array_equal(decoded(some, dtype), wanted, equal_nan=True)
        out = np.empty(some.shape, np.float32)
        assert decoded(some, dtype, out=out) is out
        assert np.array_equal(out, wanted, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "int4"])
def test_of_two_packed_numbers_the_first_is_in_the_low_half(dtype: str) -> None:
    packed = np.arange(256, dtype=np.uint8).reshape(2, 128)
    apart = np.stack([packed & 0xF, packed >> 4], -1).reshape(2, 256)
    wanted = apart.view(getattr(ml_dtypes, dtype)).astype(np.float32)
    assert np.array_equal(decoded(packed, dtype, packed=True), wanted)
