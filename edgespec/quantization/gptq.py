"""GPTQ (arXiv 2210.17323): rounds a weight column by column, and moves the columns that are still
to come so that the layer's outputs on a text change least.

Needs the Hessian of the layer's inputs, X^T X. Knows arrays, and neither models nor files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import CheckpointError
from edgespec.quantization.block_forms import FOUR_BITS, BlockForm
from edgespec.quantization.quantized_weight import QuantizedWeight
from edgespec.quantization.super_blocks import Floats, ScaleGrid, refuse_odd

# Columns to which the errors of all columns before go in one product, and of these again
_MANY, _FEW = 128, 16
_ROWS = 1 << 14  # outputs at a time, each by itself: an lm_head has many
# Added to the Hessian's diagonal, relative to its mean: what a text did not show is not free
_DAMPING = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class InputStatistics:
    """What rounding needs of a layer's inputs: the columns by their size, the largest first; how
    far each is moved by the errors of those before it, [in, in]; and what an error counts, [in]."""

    order: NDArray[np.intp]
    feedback: Floats
    importance: Floats | None

    @classmethod
    def of(cls, hessian: NDArray[Any], name: str = "a layer") -> InputStatistics:
        """Those of inputs whose X^T X is `hessian` [in, in]. Raises CheckpointError for NaN and
        Inf in it; `name` is the layer's in the message."""
        sizes = np.diagonal(hessian).astype(np.float64)
        if not np.isfinite(hessian).all():
            message = f"{name} is given NaN or Inf on the calibration text."
            raise CheckpointError(message, "Build without `calib_data`, or give another text.")
        order = np.argsort(-sizes, kind="stable")
        return cls(order, feedback_of(hessian, order), importance_of(sizes))


def quantize_gptq(
    array: NDArray[Any],
    inputs: InputStatistics,
    form: BlockForm = FOUR_BITS,
    name: str = "the weight",
) -> QuantizedWeight:
    """Quantizes [out, in] for the inputs of a text.

    Columns are taken by the size of their inputs, the largest first; scales and minimums are fitted
    before, each input weighed by its size. A column is moved by the errors of those before it, as
    the factors of the Hessian say (QuIP, arXiv 2307.13304, shows that this is GPTQ). Holds
    some rows three times in float32. Raises CheckpointError for weights that are no numbers.
    """
    rows, columns = array.shape
    grid = ScaleGrid.empty(form, rows, columns)
    values = np.empty((rows, columns), np.uint8 if form.has_minimums else np.int8)
    for low in range(0, rows, _ROWS):
        some = slice(low, low + _ROWS)
        weights = np.array(array[some], np.float32)
        refuse_odd(weights, name, low)
        grid.fit(weights, some, inputs.importance)
        values[some] = moved_values(weights, grid, some, inputs)
    return grid.weight(values, name)


def moved_values(weights: Floats, grid: ScaleGrid, rows: slice, inputs: InputStatistics) -> Floats:
    """The values of some rows of a weight [rows, in] on their grid."""
    form, order, feedback = grid.form, inputs.order, inputs.feedback
    scales, minimums = (np.ascontiguousarray(part.T) for part in grid.of_blocks(rows))
    weights = np.ascontiguousarray(weights[:, order].T)  # [in, rows]: a column is a line
    values, errors = np.empty_like(weights), np.empty_like(weights)
    columns = len(weights)
    for many in range(0, columns, _MANY):
        behind = min(many + _MANY, columns)
        wanted = weights[many:behind] + feedback[:many, many:behind].T @ errors[:many]
        for few in range(many, behind, _FEW):
            end = min(few + _FEW, behind)
            part = wanted[few - many : end - many]
            part += feedback[many:few, few:end].T @ errors[many:few]
            for j in range(few, end):
                block = order[j] // form.block
                scale, minimum = scales[block], minimums[block]
                value = part[j - few] + feedback[few:j, j] @ errors[few:j]
                value += minimum
                value /= np.where(scale == 0, np.float32(1), scale)
                np.clip(np.rint(value, out=value), form.lowest, form.highest, out=value)
                values[order[j]] = value
                errors[j] = weights[j] - (value * scale - minimum)
    return values.T


def importance_of(sizes: NDArray[np.float64]) -> Floats | None:
    """What the squared error of each input counts, one on average; None where inputs are zeros."""
    mean = sizes.mean()
    if not mean > 0:
        return None
    importance: Floats = (sizes / mean + _DAMPING).astype(np.float32)
    return importance


def feedback_of(hessian: NDArray[Any], order: NDArray[np.intp]) -> Floats:
    """U [in, in] of the columns in an order, upper triangular, whose column k says how much of each
    error before it column k takes over: the damped Hessian is (U + I) D (U + I)^T."""
    backwards = order[::-1]
    damped = hessian[np.ix_(backwards, backwards)].astype(np.float64)
    mean = float(np.diagonal(damped).mean()) or 1.0
    damped[np.diag_indices_from(damped)] += _DAMPING * mean
    root = np.linalg.cholesky(damped)
    del damped
    root /= np.diagonal(root).copy()
    feedback: Floats = root[::-1, ::-1].astype(np.float32)
    return feedback
