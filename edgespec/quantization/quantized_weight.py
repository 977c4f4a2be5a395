"""A quantized weight, its dequantization, and round-to-nearest quantization.

Knows the arithmetic of quantized values, scales and zero points. Knows no files: layouts.py reads
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.errors import CheckpointError
from edgespec.quantization.schemes import SCHEMES, Scheme

# Weights processed at a time: they stay in the CPU's cache, which makes rounding three times faster
_CHUNK = 256 * 1024
_SLOW = ("float8_e4m3fn", "float4_e2m1fn")


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """The quantized weight of a Linear, independent of its layout on disk.

    It multiplies x[..., input_order] * pre_quant_scale, where these are given. `values` holds the
    quantized values, one per byte, in the dtype of the format (ml_dtypes). Values of asymmetric
    weights are unsigned, with `zero_points` (AWQ, GPTQ) or with `minimums` (GGUF's Q4_1, Q4_K):

        weight[o, i] = (values[o, i] - zero_points[g]) * scales[g] * super_scales[s] * global_scale
                       - minimums[g] * super_minimums[s]
        g = [o // block[0], i // block[1]], s = [o // block[0], i // block[1] // super_block]
    """

    name: str  # of the module: model.layers.0.mlp.up_proj
    scheme: Scheme
    values: NDArray[Any]  # [out, in]: int4, uint4, int8, uint8, float8_e4m3fn, float4_e2m1fn
    # [ceil(out / block[0]), ceil(in / block[1])], as stored; float8_e8m0fnu: powers of two
    scales: NDArray[Any]
    block: tuple[int, int]  # weights along out and in that share a scale
    zero_points: NDArray[Any] | None = None  # shape of scales, dtype of values
    global_scale: float | None = None  # nvfp4: float32, multiplies every scale
    minimums: NDArray[Any] | None = None  # shape of scales, as stored; what is subtracted
    # Blocks along in that share a factor of their scales, and one of their minimums; these are
    # [ceil(out / block[0]), ceil(blocks / super_block)]
    super_block: int = 1
    super_scales: NDArray[Any] | None = None
    super_minimums: NDArray[Any] | None = None
    # Static activations: x / input_scale is rounded; nvfp4: the global scale of the activations
    input_scale: float | None = None
    pre_quant_scale: NDArray[np.float32] | None = None  # [in]
    # [in], GPTQ with desc_act: column j of values multiplies input input_order[j]
    input_order: NDArray[np.intp] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight: [out, in]."""
        out_features, in_features = self.values.shape
        return out_features, in_features

    @property
    def symmetric(self) -> bool:
        """Whether the weight has neither zero points nor minimums."""
        return self.zero_points is None and self.minimums is None


def dequantize(weight: QuantizedWeight, rows: slice = slice(None)) -> NDArray[np.float32]:
    """Returns the effective weight [rows, in], which multiplies raw activations.

    This is the one to compare with the original. `rows` is a slice of out with step 1.
    """
    stored = dequantize_stored(weight, rows)
    if weight.pre_quant_scale is not None:
        # pre_quant_scale is in the order of the inputs: it is applied before input_order
        stored *= weight.pre_quant_scale
    return stored


def dequantize_stored(weight: QuantizedWeight, rows: slice = slice(None)) -> NDArray[np.float32]:
    """Returns the weight [rows, in] for activations already multiplied by pre_quant_scale.

    Columns are in the order of the inputs. `rows` is a slice of out with step 1.
    """
    out_features, in_features = weight.shape
    start, stop, step = rows.indices(out_features)
    assert step == 1
    result = np.empty((max(stop - start, 0), in_features), np.float32)
    scales = block_scales(weight)
    minimums = block_minimums(weight)
    zeros = None if weight.zero_points is None else _float32(weight.zero_points)
    for low, high in _row_chunks(start, stop, in_features):
        part = _float32(weight.values[low:high])
        group = np.arange(low, high) // weight.block[0]
        if zeros is not None:
            part -= _expand_blocks(zeros[group], weight.block[1], in_features)
        part *= _expand_blocks(scales[group], weight.block[1], in_features)
        if minimums is not None:
            part -= _expand_blocks(minimums[group], weight.block[1], in_features)
        if weight.input_order is None:
            result[low - start : high - start] = part
        else:
            result[low - start : high - start, weight.input_order] = part
    return result


def block_scales(weight: QuantizedWeight) -> NDArray[np.float32]:
    """Returns what a block's values are multiplied by: [rows, blocks], all factors multiplied."""
    scales = _of_blocks(weight.scales, weight.super_scales, weight.super_block)
    return scales if weight.global_scale is None else scales * np.float32(weight.global_scale)


def block_minimums(weight: QuantizedWeight) -> NDArray[np.float32] | None:
    """Returns what is subtracted from a block's weights: [rows, blocks]; None: nothing."""
    if weight.minimums is None:
        return None
    return _of_blocks(weight.minimums, weight.super_minimums, weight.super_block)


def _of_blocks(
    parts: NDArray[Any], factors: NDArray[Any] | None, super_block: int
) -> NDArray[np.float32]:
    numbers = _float32(parts)
    if factors is None:
        return numbers
    return numbers * _expand_blocks(_float32(factors), super_block, numbers.shape[1])


# Candidate factors of the scale by number of bits; the one with the least squared error is used.
# Factor 1 is the smallest scale with which the block fits into -8..7. A smaller factor clips the
# extreme value and rounds all others more finely. For normal weights in blocks of 128 the relative
# error is 0.102; symmetric rounding to -7..7 has 0.117.
_SCALE_FACTORS: dict[int, tuple[float, ...]] = {4: (1.0, 0.95, 0.9, 0.85), 8: (1.0,)}


def quantize_rtn(
    array: NDArray[Any], bits: Literal[4, 8], block: int | None = None, name: str = "the weight"
) -> QuantizedWeight:
    """Quantizes [out, in] by round-to-nearest: int4_wo or int8_wo, symmetric, scales > 0.

    `block` is the number of weights along in that share a scale (the last block may be shorter);
    None means one scale per row. Holds a few rows in float32 at a time. Raises CheckpointError for
    NaN or Inf; `name` is the weight's name in the message.
    """
    assert array.ndim == 2
    out_features, in_features = array.shape
    width = min(block or in_features, in_features)
    count = -(-in_features // width)
    values = np.empty((out_features, in_features), ml_dtypes.int4 if bits == 4 else np.int8)
    scales = np.empty((out_features, count), np.float32)
    for low, high in _row_chunks(0, out_features, in_features):
        part = np.zeros((high - low, count * width), np.float32)
        part[:, :in_features] = array[low:high]
        if not np.isfinite(part).all():
            raise CheckpointError(
                f"{name} has NaN or Inf in rows {low} to {high - 1}.",
                "Download it again, or ask its authors: such a weight cannot be quantized.",
            )
        chosen, scale = _round(part.reshape(high - low, count, width), bits)
        values[low:high] = chosen.reshape(high - low, -1)[:, :in_features].astype(values.dtype)
        scales[low:high] = scale[..., 0]
    return QuantizedWeight(name, SCHEMES[f"int{bits}_wo"], values, scales, (1, width))


def _round(
    blocks: NDArray[np.float32], bits: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns quantized values [rows, blocks, width] and scales [rows, blocks, 1]."""
    top = 2 ** (bits - 1) - 1
    high, low = blocks.max(-1, keepdims=True), blocks.min(-1, keepdims=True)
    full_scale = np.maximum(high / top, -low / (top + 1))
    full_scale[full_scale < np.finfo(np.float32).tiny] = 1.0  # a block of zeros
    units = blocks / full_scale
    values, factor = np.empty_like(units), np.ones_like(full_scale)
    min_error = np.full_like(full_scale, np.inf)
    for candidate in _SCALE_FACTORS[bits]:
        rounded = np.clip(np.rint(units / np.float32(candidate)), -top - 1, top)
        difference = rounded * np.float32(candidate) - units
        error = np.einsum("rbw,rbw->rb", difference, difference)[..., None]
        better = error < min_error
        np.copyto(values, rounded, where=better)
        np.copyto(min_error, error, where=better)
        np.copyto(factor, candidate, where=better)
    return values, full_scale * factor


def _expand_blocks(
    per_block: NDArray[np.float32], width: int, in_features: int
) -> NDArray[np.float32]:
    """[rows, blocks] -> [rows, in]; one value per row stays one column."""
    if per_block.shape[1] == 1:
        return per_block
    return np.repeat(per_block, width, axis=1)[:, :in_features]


def _row_chunks(start: int, stop: int, in_features: int) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK // max(in_features, 1))
    for low in range(start, stop, step):
        yield low, min(low + step, stop)


def decoded(
    codes: NDArray[np.uint8],
    dtype: str,
    *,
    packed: bool = False,
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Returns the numbers that bytes [..., n] stand for in a format of ml_dtypes of 8 or 4 bits, in
    `out` where it is given.

    A byte has one number, or if `packed` two of 4 bits, the first in its low half. Two numbers at a
    time come from a table: a conversion of each takes five times as long.
    """
    pairs = not packed and codes.shape[-1] % 2 == 0 and codes.flags.c_contiguous
    if pairs:
        codes = codes.view("<u2")
    two = packed or pairs
    if out is None:
        shape = (*codes.shape[:-1], codes.shape[-1] * (2 if two else 1))
        out = np.empty(shape, np.float32)
    table = _of_bytes(dtype) if packed else _of_pairs(dtype) if pairs else _of_codes(dtype)
    np.take(table, codes, out=out.view(table.dtype), mode="wrap")
    return out


@cache
def _of_codes(dtype: str) -> NDArray[np.float32]:
    """[256], the number of each byte."""
    every = np.arange(256, dtype=np.uint8)
    values: NDArray[np.float32] = every.view(getattr(ml_dtypes, dtype, dtype)).astype(np.float32)
    return values


@cache
def _of_pairs(dtype: str) -> NDArray[np.complex64]:
    """[65536], the two numbers of each pair of bytes, the first in the low one."""
    code, one = np.arange(1 << 16), _of_codes(dtype)
    return np.stack([one[code & 0xFF], one[code >> 8]], -1).view(np.complex64)[:, 0].copy()


@cache
def _of_bytes(dtype: str) -> NDArray[np.complex64]:
    """[256], the two numbers of each byte of a 4-bit format, the first in its low half."""
    code, one = np.arange(256), _of_codes(dtype)
    return np.stack([one[code & 0xF], one[code >> 4]], -1).view(np.complex64)[:, 0].copy()


def _float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """The numbers of an array; those of formats that convert slowly are looked up."""
    if array.dtype.name in _SLOW and array.ndim:
        return decoded(array.view(np.uint8), array.dtype.name)
    return array.astype(np.float32)
