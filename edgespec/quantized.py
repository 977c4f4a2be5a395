"""One quantized weight as a value, what it stands for, and rounding an unquantized one to it.

Knows the arithmetic of codes, scales and zero points. Knows no files: where the parts come from is
for layouts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.errors import CheckpointError
from edgespec.schemes import SCHEMES, Scheme

_CHUNK = (
    256 * 1024
)  # weights worked on at a time: what stays in a cache, which makes rounding three times as fast


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A Linear's weight, whatever the layout it was read from.

    What it multiplies is x[..., input_order] * pre_quant_scale, where it has these. Codes are one
    to a byte and their dtype is the format (ml_dtypes); zero points only where they are not the
    middle, and then the codes are unsigned. weight[o, i] = (codes[o, i] - zero_points[g]) *
    scales[g] * global_scale with g = [o // block[0], i // block[1]].
    """

    name: str  # of the module: model.layers.0.mlp.up_proj
    scheme: Scheme
    codes: NDArray[Any]  # [out, in]: int4, uint4, int8, uint8, float8_e4m3fn, float4_e2m1fn
    scales: NDArray[
        Any
    ]  # [ceil(out / block[0]), ceil(in / block[1])]: as stored, float8_e8m0fnu for powers of two
    block: tuple[int, int]  # weights along out and in that share a scale
    zero_points: NDArray[Any] | None = None  # of the scales' shape and the codes' dtype
    global_scale: float | None = None  # nvfp4: float32, times every scale
    input_scale: float | None = (
        None  # static activations: x / input_scale is rounded; nvfp4: their global scale
    )
    pre_quant_scale: NDArray[np.float32] | None = None  # [in]
    input_order: NDArray[np.intp] | None = (
        None  # [in]: GPTQ with desc_act; column j belongs to input input_order[j]
    )

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        out_features, in_features = self.codes.shape
        return out_features, in_features

    @property
    def symmetric(self) -> bool:
        return self.zero_points is None


def dequantize(weight: QuantizedWeight, rows: slice = slice(None)) -> NDArray[np.float32]:
    """The weight as raw activations meet it, [out, in]: compare this one with the original. `rows`
    of out only."""
    stored = dequantize_stored(weight, rows)
    if weight.pre_quant_scale is not None:
        # The activations are scaled before they are put in order, so the scales follow the inputs'
        # own order.
        stored *= weight.pre_quant_scale
    return stored


def dequantize_stored(weight: QuantizedWeight, rows: slice = slice(None)) -> NDArray[np.float32]:
    """The weight for activations that pre_quant_scale has multiplied already: [out, in], inputs in
    their own order."""
    out_features, in_features = weight.shape
    start, stop, step = rows.indices(out_features)
    assert step == 1
    result = np.empty((max(stop - start, 0), in_features), np.float32)
    scales = _float32(weight.scales)
    if weight.global_scale is not None:
        scales = scales * np.float32(weight.global_scale)
    zeros = None if weight.zero_points is None else _float32(weight.zero_points)
    for low, high in _row_chunks(start, stop, in_features):
        part = _float32(weight.codes[low:high])
        group = np.arange(low, high) // weight.block[0]
        if zeros is not None:
            part -= _spread(zeros[group], weight.block[1], in_features)
        part *= _spread(scales[group], weight.block[1], in_features)
        if weight.input_order is None:
            result[low - start : high - start] = part
        else:
            result[low - start : high - start, weight.input_order] = part
    return result


# Full range: the scale is the least positive one that reaches both ends of -8..7, so that an
# extreme on the negative side gets the eighth step. A tighter scale clips the extreme and rounds
# all others finer: whichever of these is best by its squared error. For normal weights in blocks of
# 128 this leaves 0.102 of relative error; -7..7 leaves 0.117.
_SHRINK: dict[int, tuple[float, ...]] = {4: (1.0, 0.95, 0.9, 0.85), 8: (1.0,)}


def quantize_rtn(
    array: NDArray[Any], bits: Literal[4, 8], block: int | None = None, name: str = "the weight"
) -> QuantizedWeight:
    """Round [out, in] to the nearest of 4 or 8 bits: int4_wo or int8_wo, symmetric, float32 scales
    above zero.

    `block` counts weights along in that share a scale (the last may be short); None: the whole row.
    Beside the result only some rows are held. Raises CheckpointError for NaN and infinity.
    """
    assert array.ndim == 2
    out_features, in_features = array.shape
    width = min(block or in_features, in_features)
    count = -(-in_features // width)
    codes = np.empty((out_features, in_features), ml_dtypes.int4 if bits == 4 else np.int8)
    scales = np.empty((out_features, count), np.float32)
    for low, high in _row_chunks(0, out_features, in_features):
        part = np.zeros((high - low, count * width), np.float32)
        part[:, :in_features] = array[low:high]
        if not np.isfinite(part).all():
            raise CheckpointError(
                f"{name} has values that are not finite, in rows {low} to {high - 1}.",
                "Download it again, or ask whoever trained it: such a weight cannot be quantized.",
            )
        chosen, scale = _round(part.reshape(high - low, count, width), bits)
        codes[low:high] = chosen.reshape(high - low, -1)[:, :in_features].astype(codes.dtype)
        scales[low:high] = scale[..., 0]
    return QuantizedWeight(name, SCHEMES[f"int{bits}_wo"], codes, scales, (1, width))


def _round(
    blocks: NDArray[np.float32], bits: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Codes [rows, blocks, width] and scales [rows, blocks, 1]."""
    top = 2 ** (bits - 1) - 1
    high, low = blocks.max(-1, keepdims=True), blocks.min(-1, keepdims=True)
    reach = np.maximum(high / top, -low / (top + 1))
    reach[reach < np.finfo(np.float32).tiny] = 1.0  # a block of zeros
    units = blocks / reach
    codes, error, factor = np.empty_like(units), np.full_like(reach, np.inf), np.ones_like(reach)
    for candidate in _SHRINK[bits]:
        rounded = np.clip(np.rint(units / np.float32(candidate)), -top - 1, top)
        off = rounded * np.float32(candidate) - units
        its_error = np.einsum("rbw,rbw->rb", off, off)[..., None]
        better = its_error < error
        np.copyto(codes, rounded, where=better)
        np.copyto(error, its_error, where=better)
        np.copyto(factor, candidate, where=better)
    return codes, reach * factor


def _spread(per_block: NDArray[np.float32], width: int, in_features: int) -> NDArray[np.float32]:
    """[rows, blocks] -> [rows, in]; what is per row or per tensor stays one column."""
    return (
        per_block
        if per_block.shape[1] == 1
        else np.repeat(per_block, width, axis=1)[:, :in_features]
    )


def _row_chunks(start: int, stop: int, in_features: int) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK // max(in_features, 1))
    for low in range(start, stop, step):
        yield low, min(low + step, stop)


def _float32(array: NDArray[Any]) -> NDArray[np.float32]:
    return array.astype(np.float32)
