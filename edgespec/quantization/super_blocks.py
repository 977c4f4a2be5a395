"""Rounds weights to 4 bits with a scale and a minimum per block, both bytes with a factor per
super-block, as GGUF's Q4_K has them; or to 6 or 8 bits with a scale alone.

Scales and minimums are those of the least squared error. Knows arrays; Hessians are `gptq`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.errors import CheckpointError
from edgespec.quantization.block_forms import FOUR_BITS, BlockForm
from edgespec.quantization.quantized_weight import QuantizedWeight

Floats = NDArray[np.float32]
_CHUNK = 1 << 18  # weights that are rounded at a time: they stay in the CPU's cache
# Widths of the grid to begin with, relative to the block's range: a narrower one cuts the extreme
# weights off and rounds the others more finely. Measured on normal weights: 0.082 of the root mean
# square from one, 0.081 from three, 0.080 from eight
_WIDTHS = (1.0, 0.9, 0.8)
_FITS = 2  # of scale and minimum to the values, by least squares, and of the values to these
_LARGEST_BYTE = 255
_SMALLEST = 1e-4  # of the largest of many weights: below, factors in float16 have too few bits


def quantize_super_blocks(
    array: NDArray[Any], form: BlockForm = FOUR_BITS, name: str = "the weight"
) -> QuantizedWeight:
    """Quantizes [out, in] without data. Holds a few rows in float32 at a time.

    Raises CheckpointError for NaN or Inf; `name` is the weight's name in the message.
    """
    rows, columns = array.shape
    grid = ScaleGrid.empty(form, rows, columns)
    values = np.empty((rows, columns), np.uint8 if form.has_minimums else np.int8)
    step = max(1, _CHUNK // columns)
    for low in range(0, rows, step):
        part = np.asarray(array[low : low + step], np.float32)
        refuse_odd(part, name, low)
        few = slice(low, low + len(part))
        grid.fit(part, few)
        values[few] = grid.values(part, few)
    return grid.weight(values, name)


def refuse_odd(part: Floats, name: str, low: int) -> None:
    """Raises CheckpointError for NaN and Inf, and for numbers whose scales float16 cannot hold, in
    rows of a weight from `low` on."""
    rows = f"{name} has {{}} in rows {low} to {low + len(part) - 1}."
    if not np.isfinite(part).all():
        remedy = "Download it again, or ask its authors: such a weight cannot be quantized."
        raise CheckpointError(rows.format("NaN or Inf"), remedy)
    if 0 < (largest := float(np.abs(part).max(initial=0))) < _SMALLEST:
        message = rows.format(f"no number above {largest:.1g}, too small for scales in float16,")
        raise CheckpointError(message, "Build with `weight_block` 32: its scales are float32.")


@dataclass(frozen=True, slots=True, eq=False)
class ScaleGrid:
    """Scales and minimums of all blocks of a weight [out, in], and the factors of their bytes."""

    form: BlockForm
    columns: int
    scales: NDArray[Any]  # [out, blocks], bytes
    scale_factors: NDArray[np.float16]  # [out, super-blocks]
    minimums: NDArray[np.uint8]
    minimum_factors: NDArray[np.float16]

    @classmethod
    def empty(cls, form: BlockForm, rows: int, columns: int) -> ScaleGrid:
        """A grid that has yet to be fitted."""
        blocks = -(-columns // form.block)
        factors = -(-blocks // form.super_block)
        return cls(
            form,
            columns,
            np.zeros((rows, blocks), np.uint8 if form.has_minimums else np.int8),
            np.zeros((rows, factors), np.float16),
            np.zeros((rows, blocks), np.uint8),
            np.zeros((rows, factors), np.float16),
        )

    def fit(self, weights: Floats, rows: slice, importance: Floats | None = None) -> None:
        """Fits the blocks of some rows to their weights [rows, in]; `importance` [in] weighs the
        squares of their errors."""
        form = self.form
        blocks = in_blocks(weights, form.block)
        weighing = None
        if importance is not None:
            one = in_blocks(importance[None], form.block)
            weighing = np.broadcast_to(one, blocks.shape).reshape(-1, form.block)
        scales, minimums = fitted(blocks.reshape(-1, form.block), form, weighing)
        largest = _LARGEST_BYTE if form.has_minimums else _LARGEST_BYTE // 2
        shape = blocks.shape[:2]
        self.scales[rows], self.scale_factors[rows] = as_bytes(
            scales.reshape(shape), form.super_block, largest
        )
        if form.has_minimums:
            self.minimums[rows], self.minimum_factors[rows] = as_bytes(
                minimums.reshape(shape), form.super_block, largest
            )

    def of_blocks(self, rows: slice = slice(None)) -> tuple[Floats, Floats]:
        """Scales and minimums [rows, blocks] in float32."""
        count, times = self.scales.shape[1], self.form.super_block

        def whole(parts: NDArray[Any], factors: NDArray[np.float16]) -> Floats:
            each = np.repeat(factors[rows].astype(np.float32), times, axis=1)[:, :count]
            return parts[rows].astype(np.float32) * each

        return whole(self.scales, self.scale_factors), whole(self.minimums, self.minimum_factors)

    def values(self, weights: Floats, rows: slice = slice(None)) -> Floats:
        """The nearest values [rows, in] of weights [rows, in]."""
        scales, minimums = self.of_blocks(rows)
        blocks = in_blocks(weights, self.form.block)
        units = blocks + minimums[..., None]
        units /= np.where(scales == 0, np.float32(1), scales)[..., None]
        nearest = np.clip(np.rint(units), self.form.lowest, self.form.highest)
        whole: Floats = nearest.reshape(len(weights), -1)[:, : self.columns]
        return whole

    def weight(self, values: NDArray[Any], name: str) -> QuantizedWeight:
        """The weight with values [out, in] on this grid."""
        form = self.form
        stored = values.astype(np.uint8 if form.has_minimums else np.int8, copy=False)
        if form.bits == 4:
            stored = stored.astype(ml_dtypes.uint4)
        return QuantizedWeight(
            name,
            form.scheme,
            stored,
            self.scales,
            (1, form.block),
            minimums=self.minimums if form.has_minimums else None,
            super_block=form.super_block,
            super_scales=self.scale_factors,
            super_minimums=self.minimum_factors if form.has_minimums else None,
        )


def in_blocks(rows: Floats, block: int) -> Floats:
    """Weights [rows, in] as [rows, blocks, block]; the last block is filled up with zeros."""
    count, columns = rows.shape
    if columns % block:
        whole = np.zeros((count, -(-columns // block) * block), np.float32)
        whole[:, :columns] = rows
        rows = whole
    return rows.reshape(count, -1, block)


def fitted(
    blocks: Floats, form: BlockForm, importance: Floats | None = None
) -> tuple[Floats, Floats]:
    """Scales and minimums [n] of blocks [n, block], of the least squared error that was found.

    From each of _WIDTHS values are rounded, scale and minimum fitted to these by least squares, and
    so again.
    """
    high, low = blocks.max(1), blocks.min(1)
    if form.has_minimums:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        reach = np.maximum(high - low, np.finfo(np.float32).tiny) / form.highest
        start = -low
    else:
        reach = np.maximum(high, -low) / form.highest
        reach, start = np.maximum(reach, np.finfo(np.float32).tiny), np.zeros_like(low)
    best_scale, best_minimum = reach, start
    least = np.full(len(blocks), np.inf, np.float32)
    for width in _WIDTHS:
        scale, minimum = reach * np.float32(width), start * np.float32(width)
        for _ in range(_FITS + 1):
            values = (blocks + minimum[:, None]) / np.where(scale == 0, 1, scale)[:, None]
            np.clip(np.rint(values, out=values), form.lowest, form.highest, out=values)
            scale, minimum = least_squares(blocks, values, importance, form.has_minimums)
            errors = values * scale[:, None] - minimum[:, None] - blocks
            errors *= errors if importance is None else errors * importance
            error = errors.sum(1)
            better = error < least
            least = np.where(better, error, least)
            best_scale = np.where(better, scale, best_scale)
            best_minimum = np.where(better, minimum, best_minimum)
    return best_scale, best_minimum


def least_squares(
    blocks: Floats, values: Floats, importance: Floats | None, has_minimums: bool
) -> tuple[Floats, Floats]:
    """The scale and the minimum, not below zero, with which values come nearest to blocks."""
    weighed = values if importance is None else values * importance
    squares = np.einsum("ni,ni->n", weighed, values)
    products = np.einsum("ni,ni->n", weighed, blocks)
    alone = products / np.maximum(squares, np.finfo(np.float32).tiny)
    if not has_minimums:
        return alone, np.zeros_like(alone)
    sums = weighed.sum(1)
    total = blocks.sum(1) if importance is None else np.einsum("ni,ni->n", blocks, importance)
    count = np.float32(blocks.shape[1]) if importance is None else importance.sum(1)
    determinant = squares * count - sums * sums
    free = determinant > 1e-6 * squares * count
    scale = np.where(free, (products * count - total * sums), alone)
    scale = np.where(free, scale / np.where(free, determinant, 1), alone)
    minimum = (scale * sums - total) / count
    below = (minimum < 0) | ~free
    # Where all values are zeros, the minimum is all there is
    rest = np.where(squares == 0, np.maximum(-total / count, np.float32(0)), np.float32(0))
    return np.where(below, alone, scale), np.where(below, rest, minimum)


def as_bytes(
    numbers: Floats, super_block: int, largest: int
) -> tuple[NDArray[Any], NDArray[np.float16]]:
    """Numbers [rows, blocks] as bytes and the factors [rows, super-blocks] that multiply them.

    The largest of a super-block has the largest byte. Factors that float16 cannot hold are cut.
    """
    rows, count = numbers.shape
    padded = np.zeros((rows, -(-count // super_block) * super_block), np.float32)
    padded[:, :count] = numbers
    grouped = padded.reshape(rows, -1, super_block)
    factors = np.abs(grouped).max(2) / np.float32(largest)
    stored = np.minimum(factors, np.finfo(np.float16).max).astype(np.float16)
    each = stored.astype(np.float32)[..., None]
    units = np.rint(grouped / np.where(each == 0, np.float32(1), each))
    parts = np.clip(units, -largest if largest < _LARGEST_BYTE else 0, largest)
    kind = np.int8 if largest < _LARGEST_BYTE else np.uint8
    return parts.reshape(rows, -1)[:, :count].astype(kind), stored
