"""LowBitMatMul at every level of instructions: against float64, and row by row."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edgespec.backends.ort.native.layout import WeightLayout
from edgespec.backends.ort.native.library import LAYOUT_VERSION, kernels
from tests.unit.backends.ort.native.sessions import compiled, matmul_session, session_of

Floats = NDArray[np.float32]

# in, out: below a block, a tile and a line; just above; several of each
SIZES = [(1, 1), (7, 3), (32, 16), (33, 17), (129, 40), (300, 100), (512, 192)]
FORMATS = [(4, 32), (4, 128), (8, 32), (8, 128), (4, 64)]
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 33]

pytestmark = compiled


def some_weight(layout: WeightLayout, seed: int = 0) -> tuple[NDArray[np.int8], Floats]:
    random = np.random.default_rng(seed)
    shape = (layout.out_features, layout.in_features)
    values = random.integers(-layout.middle, layout.middle, shape, np.int8)
    scales = random.uniform(0.5, 2, (layout.out_features, layout.num_blocks)) / 100
    return values, scales.astype(np.float32)


def some_rows(layout: WeightLayout, count: int, seed: int = 1) -> Floats:
    random = np.random.default_rng(seed)
    x = random.standard_normal((count, layout.in_features)).astype(np.float32)
    return x * np.exp(random.uniform(-3, 3, (count, 1))).astype(np.float32)


def rounded(layout: WeightLayout, x: Floats, by_row: bool = False) -> NDArray[np.float64]:
    """Rows as the kernel rounds them: to 127 steps of the largest of each block, or of the row."""
    padded = np.zeros((len(x), layout.num_blocks * layout.block), np.float32)
    padded[:, : x.shape[1]] = x
    blocks = padded.reshape(len(x), layout.num_blocks, layout.block)
    axes = (1, 2) if by_row else (2,)
    scale = np.abs(blocks).max(axes, keepdims=True) / np.float32(127)
    steps = np.rint(blocks / np.where(scale == 0, np.float32(1), scale))
    found = (steps.astype(np.float64) * scale).reshape(len(x), -1)
    return found[:, : x.shape[1]]


def dequantized(
    layout: WeightLayout, values: NDArray[np.int8], scales: Floats
) -> NDArray[np.float64]:
    each = np.repeat(scales.astype(np.float64), layout.block, axis=1)[:, : layout.in_features]
    return values * each


@pytest.mark.parametrize(("bits", "block"), FORMATS)
@pytest.mark.parametrize(("in_features", "out_features"), SIZES)
def test_product_is_that_of_the_rounded_rows(
    level: str, bits: int, block: int, in_features: int, out_features: int
) -> None:
    layout = WeightLayout(4 if bits == 4 else 8, block, in_features, out_features)
    values, scales = some_weight(layout)
    session = matmul_session(layout, layout.pack(values, scales))
    weight = dequantized(layout, values, scales)
    for count in ROWS:
        x = some_rows(layout, count)
        (y,) = session.run(None, {"x": x})
        wanted = rounded(layout, x) @ weight.T
        size = np.abs(rounded(layout, x)) @ np.abs(weight.T)  # what the sums pass through
        assert np.all(np.abs(y - wanted) <= 1e-6 * size + 1e-12)


def test_all_levels_give_the_same_bits() -> None:
    layout = WeightLayout(4, 32, 299, 75)
    session = matmul_session(layout, layout.pack(*some_weight(layout)))
    x = some_rows(layout, 11)
    found = []
    for name in kernels().levels:
        kernels().use_level(name)
        found.append(session.run(None, {"x": x})[0].tobytes())
    kernels().use_level(kernels().levels[0])
    assert len(set(found)) == 1


@pytest.mark.parametrize("bits", [4, 8])
def test_bits_of_a_row_do_not_depend_on_its_neighbours(level: str, bits: int) -> None:
    layout = WeightLayout(4 if bits == 4 else 8, 32, 96, 70)
    packed = layout.pack(*some_weight(layout))
    one, two = matmul_session(layout, packed), matmul_session(layout, packed, threads=2)
    x = some_rows(layout, 40)
    alone = np.concatenate([one.run(None, {"x": row[None]})[0] for row in x])
    random = np.random.default_rng(2)
    for count in range(1, 41):
        order = random.permutation(40)[:count]
        for session in (one, two):
            (together,) = session.run(None, {"x": x[order]})
            assert together.tobytes() == alone[order].tobytes()


def test_a_weight_may_come_with_each_call(level: str) -> None:
    layout = WeightLayout(4, 32, 96, 70)
    packed, x = layout.pack(*some_weight(layout)), some_rows(layout, 7)
    form = {"bits": 4, "block_size": 32, "layout_version": LAYOUT_VERSION}
    given = session_of(
        "LowBitMatMul",
        {"x": ("float32", ["rows", 96]), "weight": ("uint8", list(packed.shape))},
        {"y": ("float32", ["rows", 70])},
        {"K": 96, "N": [70], **form},
    )
    (wanted,) = matmul_session(layout, packed).run(None, {"x": x})
    (found,) = given.run(None, {"x": x, "weight": packed})
    assert found.tobytes() == wanted.tobytes()


def test_several_weights_share_the_rows_of_one_call(level: str) -> None:
    layouts = [WeightLayout(4, 32, 96, out) for out in (70, 5, 64)]
    packed = [one.pack(*some_weight(one, seed)) for seed, one in enumerate(layouts)]
    x = some_rows(layouts[0], 7)
    sizes = [one.out_features for one in layouts]
    together = session_of(
        "LowBitMatMul",
        {"x": ("float32", ["rows", 96])},
        {f"y{size}": ("float32", ["rows", size]) for size in sizes},
        {"K": 96, "N": sizes, "bits": 4, "block_size": 32, "layout_version": LAYOUT_VERSION},
        {f"weight{size}": one for size, one in zip(sizes, packed, strict=True)},
        threads=2,
    )
    for one, weight, found in zip(layouts, packed, together.run(None, {"x": x}), strict=True):
        (alone,) = matmul_session(one, weight).run(None, {"x": x})
        assert found.tobytes() == alone.tobytes()


def test_a_scale_per_row_rounds_the_whole_row_alike(level: str) -> None:
    layout = WeightLayout(8, 32, 100, 20)
    values, scales = some_weight(layout)
    session = matmul_session(layout, layout.pack(values, scales), round_by_row=1)
    x = some_rows(layout, 5)
    x[:, :32] *= 100
    (y,) = session.run(None, {"x": x})
    wanted = rounded(layout, x, by_row=True) @ dequantized(layout, values, scales).T
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    assert np.abs(rounded(layout, x) @ dequantized(layout, values, scales).T - wanted).max() > 1e-3


def test_a_static_scale_saturates_as_quantize_linear_does(level: str) -> None:
    layout = WeightLayout(8, 32, 40, 17)
    values, scales = some_weight(layout)
    step = np.float32(0.03)
    session = matmul_session(layout, layout.pack(values, scales), activation_scale=float(step))
    x = some_rows(layout, 4) * 3
    steps = np.clip(np.rint(x / step), -128, 127)
    assert steps.min() == -128
    assert steps.max() == 127
    wanted = (steps * np.float64(step)) @ dequantized(layout, values, scales).T
    np.testing.assert_allclose(session.run(None, {"x": x})[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_static_scale_hides_nothing_that_is_no_number(level: str, bad: float) -> None:
    layout = WeightLayout(8, 32, 40, 17)
    session = matmul_session(layout, layout.pack(*some_weight(layout)), activation_scale=0.03)
    x = some_rows(layout, 3)
    (calm,) = session.run(None, {"x": x})
    x[1, 35] = bad
    (y,) = session.run(None, {"x": x})
    assert not np.isfinite(y[1]).any()
    assert y[[0, 2]].tobytes() == calm[[0, 2]].tobytes()


def test_a_call_of_no_rows_gives_none(level: str) -> None:
    layout = WeightLayout(4, 32, 96, 70)
    session = matmul_session(layout, layout.pack(*some_weight(layout)))
    assert session.run(None, {"x": some_rows(layout, 0)})[0].shape == (0, 70)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch sets it on x86 alone")
def test_denormals_stay_whatever_the_thread_is_set_to(level: str) -> None:
    layout = WeightLayout(4, 32, 96, 70)
    values, scales = some_weight(layout)
    session = matmul_session(layout, layout.pack(values, scales * np.float32(1e-20)))
    x = some_rows(layout, 1) * np.float32(1e-18)
    (wanted,) = session.run(None, {"x": x})
    assert np.any(wanted)
    torch.set_flush_denormal(True)
    try:
        (found,) = session.run(None, {"x": x})
        flushed = torch.tensor(1e-40) * torch.tensor(0.5)
    finally:
        torch.set_flush_denormal(False)
    assert flushed == 0  # as the thread was set, and is again
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(("bits", "block"), FORMATS)
def test_sums_of_the_largest_values_are_exact(level: str, bits: int, block: int) -> None:
    layout = WeightLayout(4 if bits == 4 else 8, block, 2 * block, 20)
    values = np.full((layout.out_features, layout.in_features), layout.middle - 1, np.int8)
    values[1::2] = -layout.middle
    scales = np.ones((layout.out_features, layout.num_blocks), np.float32)
    session = matmul_session(layout, layout.pack(values, scales), activation_scale=1.0)
    x = np.full((5, layout.in_features), -128, np.float32)
    x[1], x[2, ::2], x[3, 1::2], x[4, :block] = 127, 127, 127, 127
    (y,) = session.run(None, {"x": x})
    np.testing.assert_array_equal(y, x.astype(np.int64) @ values.astype(np.int64).T)


def test_zeros_and_tiny_rows_give_zeros_and_nan_gives_nan(level: str) -> None:
    layout = WeightLayout(4, 32, 64, 20)
    session = matmul_session(layout, layout.pack(*some_weight(layout)))
    x = some_rows(layout, 5)
    x[1], x[2] = 0, 1e-33
    x[3, 40], x[4, 3] = np.nan, -np.inf
    (y,) = session.run(None, {"x": x})
    assert np.all(y[1:3] == 0)
    assert np.all(np.isnan(y[3]))
    assert not np.any(np.isfinite(y[4]))
    (calm,) = session.run(None, {"x": x[:1]})
    assert y[0].tobytes() == calm[0].tobytes()


@pytest.mark.parametrize(("bits", "block"), FORMATS)
@pytest.mark.parametrize(("in_features", "out_features"), [(33, 17), (300, 100)])
def test_rows_of_a_packed_weight_come_back(
    bits: int, block: int, in_features: int, out_features: int
) -> None:
    layout = WeightLayout(4 if bits == 4 else 8, block, in_features, out_features)
    values, scales = some_weight(layout)
    packed = layout.pack(values, scales)
    rows = np.array([[0, out_features - 1], [5, 5]])
    wanted = dequantized(layout, values, scales).astype(np.float32)[rows]
    np.testing.assert_allclose(layout.rows(packed, rows), wanted, rtol=1e-6)


def test_a_weight_of_another_size_or_layout_is_refused() -> None:
    layout = WeightLayout(4, 32, 64, 20)
    packed = layout.pack(*some_weight(layout))
    with pytest.raises(Exception, match="another version of the kernels"):
        matmul_session(layout, packed, layout_version=99)
    with pytest.raises(Exception, match="LowBitMatMul: its weight has 0 bytes instead of 2560"):
        matmul_session(layout, packed[:0]).run(None, {"x": some_rows(layout, 1)})
