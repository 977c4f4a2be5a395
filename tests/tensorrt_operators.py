"""TensorRT's own operators in numpy, by what its operator reference says of them, for onnx's
reference evaluator: `evaluated` runs a graph that is lowered for TensorRT as it stands.

Knows no rewrite.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

Array = NDArray[Any]
FP8, FP4 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
OUTPUT: dict[int, Any] = {1: np.float32, 10: np.float16, 16: ml_dtypes.bfloat16}
BIAS = 127  # of an exponent that is stored in a byte


class FP4DynamicQuantize(OpRun):
    """Values in FP4 and a scale in FP8 for each block: both times the given scale."""

    op_domain = "trt"

    def _run(
        self, x: Array, scale: Array, axis: int, block_size: int, scale_type: int
    ) -> tuple[Array, Array]:
        assert (axis, block_size, scale_type) == (-1, 16, int(onnx.TensorProto.FLOAT8E4M3FN))
        assert scale.dtype == np.float32
        assert scale.size == 1
        blocks = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, block_size)
        exact = np.abs(blocks).max(-1) / np.float32(6 * scale)
        scales = np.clip(exact, 2.0**-9, 448).astype(FP8)
        units = blocks / (scales.astype(np.float32) * scale)[..., None]
        return np.clip(units, -6, 6).astype(FP4).reshape(x.shape), scales


class MXFP8DynamicQuantize(OpRun):
    """Values in FP8 and the exponent of a power of two for each block."""

    op_domain = "trt"

    def _run(self, x: Array, axis: int, block_size: int, output_dtype: int) -> tuple[Array, Array]:
        assert (axis, block_size, output_dtype) == (-1, 32, int(onnx.TensorProto.FLOAT8E4M3FN))
        blocks = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, block_size)
        with np.errstate(divide="ignore"):  # of a block of zeros
            exponents = np.ceil(np.log2(np.abs(blocks).max(-1) / 448))
        exponents = np.clip(exponents, -BIAS, BIAS)
        values = (blocks * np.exp2(-exponents)[..., None]).astype(np.float32).astype(FP8)
        return values.reshape(x.shape), (exponents + BIAS).astype(np.uint8)


class MXFP8DequantizeLinear(OpRun):
    """Values times the powers of two of their blocks along an axis."""

    op_domain = "trt"

    def _run(
        self, values: Array, exponents: Array, axis: int, block_size: int, output_dtype: int
    ) -> tuple[Array]:
        assert exponents.dtype == np.uint8
        assert exponents.shape[axis] * block_size == values.shape[axis]
        scales = np.exp2(np.repeat(exponents, block_size, axis).astype(np.float32) - BIAS)
        return ((values.astype(np.float32) * scales).astype(OUTPUT[output_dtype]),)


# The evaluator finds them by their classes' names
OPERATORS = [
    type(f"TRT_{operator.__name__}", (operator,), {})
    for operator in (FP4DynamicQuantize, MXFP8DynamicQuantize, MXFP8DequantizeLinear)
]


def evaluated(model: ir.Model, directory: Path, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of a graph whose weights stand in `directory`, by name."""
    path = directory / "evaluated.onnx"
    ir.save(model, path)
    evaluator = ReferenceEvaluator(onnx.load(path), new_ops=OPERATORS)
    path.unlink()
    return dict(zip(evaluator.output_names, evaluator.run(None, dict(feeds)), strict=True))
