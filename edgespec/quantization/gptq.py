"""GPTQ (arXiv 2210.17323): rounds a weight column by column, and moves the columns that are still
to come so that the layer's outputs on a text change least.

Needs the Hessian of the layer's inputs, X^T X. Knows arrays, and neither models nor files.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.quantization.quantized_weight import QuantizedWeight
from edgespec.quantization.super_blocks import FOUR_BITS, BlockForm, Floats, Grid

_COLUMNS = 128  # whose errors reach the columns behind them in one product
# Added to the Hessian's diagonal, relative to its mean: what a text did not show is not free
_DAMPING = 0.01


def quantize_gptq(
    array: NDArray[Any],
    hessian: NDArray[np.float64],
    form: BlockForm = FOUR_BITS,
    name: str = "the weight",
) -> QuantizedWeight:
    """Quantizes [out, in] for inputs whose X^T X is `hessian` [in, in].

    Columns are taken by the size of their inputs, the largest first; scales and minimums are fitted
    before, each input weighed by its size. Holds the weight twice in float32.
    """
    weights = np.array(array, np.float32)
    rows, columns = weights.shape
    sizes = np.diagonal(hessian).astype(np.float64)
    order = np.argsort(-sizes, kind="stable")
    spread = inverse_root(hessian[np.ix_(order, order)])
    grid = Grid.empty(form, rows, columns)
    grid.fit(weights, slice(None), importance_of(sizes))
    scales, minimums = grid.of_blocks()
    scales = np.where(scales == 0, np.float32(1), scales)
    weights = np.ascontiguousarray(weights[:, order].T)  # [in, out]: a column is a line
    values = np.empty((columns, rows), np.float32)
    for low in range(0, columns, _COLUMNS):
        high = min(low + _COLUMNS, columns)
        errors = np.empty((high - low, rows), np.float32)
        for j in range(low, high):
            block = order[j] // form.block
            scale, minimum = scales[:, block], minimums[:, block]
            value = np.rint((weights[j] + minimum) / scale)
            np.clip(value, form.lowest, form.highest, out=value)
            values[order[j]] = value
            error = (weights[j] - (value * scale - minimum)) / spread[j, j]
            errors[j - low] = error
            weights[j + 1 : high] -= np.outer(spread[j, j + 1 : high], error)
        weights[high:] -= spread[low:high, high:].T @ errors
    return grid.weight(values.T, name)


def importance_of(sizes: NDArray[np.float64]) -> Floats | None:
    """What the squared error of each input counts, one on average; None where inputs are zeros."""
    mean = sizes.mean()
    if not mean > 0:
        return None
    importance: Floats = (sizes / mean + _DAMPING).astype(np.float32)
    return importance


def inverse_root(hessian: NDArray[np.float64]) -> Floats:
    """The upper triangular U [in, in] with U^T U = the inverse of the damped Hessian."""
    damped = hessian.astype(np.float64)
    mean = float(np.diagonal(damped).mean()) or 1.0
    damped[np.diag_indices_from(damped)] += _DAMPING * mean
    root: Floats = np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)
    return root
