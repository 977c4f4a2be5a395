"""Rounding to blocks with scales and minimums: without data, and by GPTQ."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.errors import CheckpointError
from edgespec.quantization.block_forms import FOUR_BITS, SIX_BITS, BlockForm
from edgespec.quantization.gptq import InputStatistics, quantize_gptq
from edgespec.quantization.quantized_weight import dequantize, quantize_rtn
from edgespec.quantization.super_blocks import quantize_super_blocks

FORMS = pytest.mark.parametrize("form", [FOUR_BITS, SIX_BITS], ids=["4 bits", "6 bits"])


def weights(rows: int, columns: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_t(6, (rows, columns)).astype(np.float32)


def error_of(wanted: NDArray[np.float32], rounded: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean((rounded - wanted) ** 2) / np.mean(wanted**2)))


def test_minimums_err_less_than_a_scale_alone_in_fewer_bits() -> None:
    """Q4_K's own error on such weights is 0.0805, at 4.5 bits; that of int4/32 is 0.10 at 5.0."""
    wanted = weights(256, 512)
    error = error_of(wanted, dequantize(quantize_super_blocks(wanted)))
    assert error < 0.082 < 0.097 < error_of(wanted, dequantize(quantize_rtn(wanted, 4, 32)))
    assert FOUR_BITS.bits_per_weight == 4.625


def test_weights_on_a_grid_of_four_bits_stay() -> None:
    """As a published Q4_1 has them: what was rounded once is not rounded again."""
    rng = np.random.default_rng(0)
    scale, minimum = rng.uniform(0.5, 1, (8, 16, 1)), rng.uniform(0.2, 8, (8, 16, 1))
    values = rng.integers(0, 16, (8, 16, 32))
    values[..., :2] = 0, 15
    wanted = (values * scale - minimum).reshape(8, 512).astype(np.float32)
    stored = quantize_super_blocks(wanted)
    assert np.array_equal(stored.values.astype(np.uint8), values.reshape(8, 512))


@FORMS
def test_rows_of_odd_lengths_and_of_zeros(form: BlockForm) -> None:
    wanted = weights(3, form.block * form.super_block + 5)
    wanted[1] = 0
    rounded = dequantize(quantize_super_blocks(wanted, form))
    assert error_of(wanted, rounded) < (0.1 if form is FOUR_BITS else 0.025)
    assert not rounded[1].any()


def test_what_is_no_number_is_refused_by_name() -> None:
    wanted = weights(4, 64)
    wanted[2, 3] = np.nan
    with pytest.raises(CheckpointError, match=r"lm_head has NaN or Inf in rows 0 to 3"):
        quantize_super_blocks(wanted, name="lm_head")


@FORMS
def test_gptq_changes_the_outputs_less_than_rounding(form: BlockForm) -> None:
    """On inputs that go together, as those of a model do; the weights themselves err more."""
    rng = np.random.default_rng(0)
    wanted = weights(64, 256)
    inputs = rng.standard_normal((2000, 40)) @ rng.standard_normal((40, 256))
    inputs += 0.1 * rng.standard_normal(inputs.shape)
    inputs[:, 7] = 0  # an input that the text never has
    seen, unseen = np.split(inputs.astype(np.float32), 2)
    rounded = dequantize(quantize_super_blocks(wanted, form))
    moved = dequantize(
        quantize_gptq(wanted, InputStatistics.of(seen.T.astype(np.float64) @ seen), form)
    )
    assert error_of(unseen @ wanted.T, unseen @ moved.T) < 0.5 * error_of(
        unseen @ wanted.T, unseen @ rounded.T
    )
    assert error_of(wanted, moved) < 0.5


def test_blocks_that_are_constant_keep_their_number() -> None:
    wanted = np.repeat(np.array([[-0.5], [0.25], [0.0]], np.float32), 64, axis=1)
    np.testing.assert_allclose(dequantize(quantize_super_blocks(wanted)), wanted, rtol=0.01)


def test_numbers_too_small_for_float16_are_refused_with_the_remedy() -> None:
    with pytest.raises(CheckpointError, match=r"too small for scales in float16") as refused:
        quantize_super_blocks(weights(4, 64) * np.float32(1e-6))
    assert "`weight_block` 32" in refused.value.remedy


def test_inputs_that_are_no_numbers_are_refused_by_name() -> None:
    hessian = np.full((64, 64), np.nan)
    with pytest.raises(CheckpointError, match=r"lm_head is given NaN or Inf"):
        InputStatistics.of(hessian, "lm_head")
