"""LowBitMatMul at every level of instructions: against float64, and row by row."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edgespec.backends.ort import low_bit_matmul
from edgespec.backends.ort.low_bit_matmul import PackedTable
from edgespec.backends.ort.native.layout import WeightLayout, layout_of
from edgespec.backends.ort.native.library import kernels
from edgespec.quantization.quantized_weight import QuantizedWeight, dequantize
from edgespec.quantization.schemes import SCHEMES
from tests.unit.backends.ort.native.sessions import compiled, matmul_session, session_of
from tests.unit.backends.ort.native.weights import FORMS, named, sized, some_weight

Floats = NDArray[np.float32]

# in, out: below a block, a tile and a line; just above; several of each
SIZES = [(1, 1), (32, 16), (33, 17), (300, 100), (512, 192)]
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 33]

pytestmark = compiled


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
    reach = np.abs(blocks).max(axes, keepdims=True)
    steps = np.rint(blocks * (np.float32(127) / np.where(reach == 0, np.float32(1), reach)))
    found = (steps.astype(np.float64) * (reach / np.float32(127))).reshape(len(x), -1)
    return found[:, : x.shape[1]]


every_form = pytest.mark.parametrize("form", FORMS, ids=named)


@every_form
@pytest.mark.parametrize(("in_features", "out_features"), SIZES)
def test_product_is_that_of_the_rounded_rows(
    level: str, form: WeightLayout, in_features: int, out_features: int
) -> None:
    layout = sized(form, in_features, out_features)
    stored = some_weight(layout)
    session, weight = matmul_session(layout, layout.pack(stored)), dequantize(stored)
    largest = np.abs(weight).max() if layout.has_minimums else 0  # is subtracted from more
    for count in ROWS:
        x = some_rows(layout, count)
        (y,) = session.run(None, {"x": x})
        taken = rounded(layout, x)
        wanted = taken @ weight.T.astype(np.float64)
        size = np.abs(taken) @ (np.abs(weight.T) + 2 * largest)  # of what is added
        assert np.all(np.abs(y - wanted) <= 1e-6 * size + 1e-12)


@every_form
def test_all_levels_give_the_same_bits(form: WeightLayout) -> None:
    layout = sized(form, 299, 75)
    session = matmul_session(layout, layout.pack(some_weight(layout)))
    for count in (1, 11, 70):
        x, found = some_rows(layout, count), []
        for name in kernels().levels:
            kernels().use_level(name)
            found.append(session.run(None, {"x": x})[0].tobytes())
        kernels().use_level(kernels().levels[0])
        assert len(set(found)) == 1


@every_form
def test_bits_of_a_row_do_not_depend_on_its_neighbours(level: str, form: WeightLayout) -> None:
    layout = sized(form, 96, 70)
    packed = layout.pack(some_weight(layout))
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
    packed, x = layout.pack(some_weight(layout)), some_rows(layout, 7)
    given = session_of(
        "LowBitMatMul",
        {"x": ("float32", ["rows", 96]), "weight": ("uint8", list(packed.shape))},
        {"y": ("float32", ["rows", 70])},
        {"K": 96, "N": [70], **layout.attributes},
    )
    (wanted,) = matmul_session(layout, packed).run(None, {"x": x})
    (found,) = given.run(None, {"x": x, "weight": packed})
    assert found.tobytes() == wanted.tobytes()


def test_several_weights_share_the_rows_of_one_call(level: str) -> None:
    layouts = [WeightLayout(4, 32, 96, out) for out in (70, 5, 64)]
    packed = [one.pack(some_weight(one, seed)) for seed, one in enumerate(layouts)]
    x = some_rows(layouts[0], 7)
    sizes = [one.out_features for one in layouts]
    together = session_of(
        "LowBitMatMul",
        {"x": ("float32", ["rows", 96])},
        {f"y{size}": ("float32", ["rows", size]) for size in sizes},
        {"K": 96, "N": sizes, **layouts[0].attributes},
        {f"weight{size}": one for size, one in zip(sizes, packed, strict=True)},
        threads=2,
    )
    for one, weight, found in zip(layouts, packed, together.run(None, {"x": x}), strict=True):
        (alone,) = matmul_session(one, weight).run(None, {"x": x})
        assert found.tobytes() == alone.tobytes()


def test_a_scale_per_row_rounds_the_whole_row_alike(level: str) -> None:
    layout = WeightLayout(8, 32, 100, 20)
    weight = some_weight(layout)
    session = matmul_session(layout, layout.pack(weight), round_by_row=1)
    x = some_rows(layout, 5)
    x[:, :32] *= 100
    (y,) = session.run(None, {"x": x})
    wanted = rounded(layout, x, by_row=True) @ dequantize(weight).T
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    assert np.abs(rounded(layout, x) @ dequantize(weight).T - wanted).max() > 1e-3


def test_a_static_scale_saturates_as_quantize_linear_does(level: str) -> None:
    layout = WeightLayout(8, 32, 40, 17)
    weight = some_weight(layout)
    step = np.float32(0.03)
    session = matmul_session(layout, layout.pack(weight), activation_scale=float(step))
    x = some_rows(layout, 4) * 3
    steps = np.clip(np.rint(x / step), -128, 127)
    assert steps.min() == -128
    assert steps.max() == 127
    wanted = (steps * np.float64(step)) @ dequantize(weight).T
    np.testing.assert_allclose(session.run(None, {"x": x})[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_static_scale_hides_nothing_that_is_no_number(level: str, bad: float) -> None:
    layout = WeightLayout(8, 32, 40, 17)
    session = matmul_session(layout, layout.pack(some_weight(layout)), activation_scale=0.03)
    x = some_rows(layout, 3)
    (calm,) = session.run(None, {"x": x})
    x[1, 35] = bad
    (y,) = session.run(None, {"x": x})
    assert not np.isfinite(y[1]).any()
    assert y[[0, 2]].tobytes() == calm[[0, 2]].tobytes()


def test_a_call_of_no_rows_gives_none(level: str) -> None:
    layout = WeightLayout(4, 32, 96, 70)
    session = matmul_session(layout, layout.pack(some_weight(layout)))
    assert session.run(None, {"x": some_rows(layout, 0)})[0].shape == (0, 70)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch sets it on x86 alone")
def test_denormals_stay_whatever_the_thread_is_set_to(level: str) -> None:
    layout = WeightLayout(4, 32, 96, 70)
    weight = some_weight(layout)
    small = replace(weight, scales=weight.scales * np.float32(1e-20))
    session = matmul_session(layout, layout.pack(small))
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


@every_form
def test_sums_of_the_largest_values_are_exact(level: str, form: WeightLayout) -> None:
    layout = replace(sized(form, 2 * form.block, 20), global_scale=1.0)
    weight = some_weight(layout)
    ones = {
        name: np.ones_like(own)
        for name in ("scales", "minimums", "super_scales", "super_minimums")
        if (own := getattr(weight, name)) is not None
    }
    values = np.full_like(weight.values, weight.values.astype(np.float32).max())
    values[1::2] = weight.values.astype(np.float32).min()
    weight = replace(weight, values=values, **ones)
    layout = replace(layout, global_scale=0.5 if layout.codebook == "fp4" else 1.0)
    session = matmul_session(layout, layout.pack(weight), activation_scale=1.0)
    x = np.full((5, layout.in_features), -128, np.float32)
    x[1], x[2, ::2], x[3, 1::2], x[4, : layout.block] = 127, 127, 127, 127
    (y,) = session.run(None, {"x": x})
    np.testing.assert_array_equal(y, x @ dequantize(weight).T)


def test_zeros_and_tiny_rows_give_zeros_and_nan_gives_nan(level: str) -> None:
    layout = WeightLayout(4, 32, 64, 20)
    session = matmul_session(layout, layout.pack(some_weight(layout)))
    x = some_rows(layout, 5)
    x[1], x[2] = 0, 1e-33
    x[3, 40], x[4, 3] = np.nan, -np.inf
    (y,) = session.run(None, {"x": x})
    assert np.all(y[1:3] == 0)
    assert np.all(np.isnan(y[3]))
    assert not np.any(np.isfinite(y[4]))
    (calm,) = session.run(None, {"x": x[:1]})
    assert y[0].tobytes() == calm[0].tobytes()


@every_form
@pytest.mark.parametrize("out_features", [17, 100])
def test_a_weight_has_its_layout_and_its_rows_come_back_to_the_bit(
    form: WeightLayout, out_features: int
) -> None:
    layout = sized(form, 300, out_features)
    weight = some_weight(layout)
    assert layout_of(weight) == layout
    rows = np.array([[0, out_features - 1], [5, 5]])
    np.testing.assert_array_equal(layout.rows(layout.pack(weight), rows), dequantize(weight)[rows])


def test_zero_points_are_minimums_and_scales_of_any_range_are_halves() -> None:
    random = np.random.default_rng(0)
    scheme = SCHEMES["int4_wo"]
    values = random.integers(0, 16, (70, 300)).astype("uint4")
    scales = (2.0 ** random.integers(-40, -20, (70, 3))).astype("bfloat16")
    zeros = random.integers(0, 16, (70, 3)).astype("uint4")
    weight = QuantizedWeight("w", scheme, values, scales, (1, 128), zeros)
    layout = layout_of(weight)
    assert layout == WeightLayout(4, 128, 300, 70, "super_min", 1, "", 2.0**-36)
    found = layout.rows(layout.pack(weight), np.arange(70))
    np.testing.assert_array_equal(found, dequantize(weight))
    scales[0, 0] = 1.0
    assert layout_of(weight) is None


def test_a_weight_of_another_size_or_layout_is_refused() -> None:
    layout = WeightLayout(4, 32, 64, 20)
    packed = layout.pack(some_weight(layout))
    with pytest.raises(Exception, match="another version of the kernels"):
        matmul_session(layout, packed, layout_version=99)
    with pytest.raises(Exception, match="no kernel for the scales double"):
        matmul_session(layout, packed, scales="double")
    with pytest.raises(Exception, match="not as many global scales as weights"):
        matmul_session(layout, packed, global_scales=[1.0, 2.0])
    with pytest.raises(Exception, match="LowBitMatMul: its weight has 0 bytes instead of 2560"):
        matmul_session(layout, packed[:0]).run(None, {"x": some_rows(layout, 1)})


def test_embedding_gives_the_rows_of_its_weights_kept_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_bit_matmul, "KEPT_BYTES", 4 * 64 * 3)  # three places
    layout = sized(WeightLayout(4, 32, 1, 1, "float16_min"), 64, 40)
    stored = some_weight(layout)
    (tmp_path / "packed").write_bytes(layout.pack(stored).tobytes())
    table, wanted = PackedTable(tmp_path / "packed", layout, 0), dequantize(stored)
    for asked in ([[7]], [[7], [8]], [[8], [7], [7]], [[1], [4]], [[7, 8, 9]], [[*range(40)] * 2]):
        np.testing.assert_array_equal(table.rows(np.array(asked)), wanted[np.array(asked)])
