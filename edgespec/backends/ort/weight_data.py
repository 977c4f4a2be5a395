"""The bytes of an engine's data file, weight by weight.

Knows the form in which each kind of weight is read. `data_file` knows where a weight stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.backends.ort import int8_gemm, low_bit_matmul, matmul_nbits
from edgespec.backends.ort.calibration import CalibratedWeights
from edgespec.backends.ort.data_file import (
    AnyWeight,
    DequantizedWeight,
    ExpertWeight,
    ExternalWeight,
    Int8GemmWeight,
    KeptTensor,
    LowBitWeight,
    PackedWeight,
)
from edgespec.backends.ort.native.layout import FACTORS
from edgespec.backends.ort.quantized_values import QuantizedValues, read_tensor
from edgespec.quantization.block_forms import FORMS, FOUR_BITS
from edgespec.quantization.quantized_weight import QuantizedWeight, dequantize_stored, quantize_rtn
from edgespec.quantization.super_blocks import quantize_super_blocks

Pieces = Iterator[tuple[int, NDArray[Any]]]


def pieces(
    weight: AnyWeight, directory: Path, calibrated: CalibratedWeights | None = None
) -> Pieces:
    """Yields offsets and arrays of the data file; one tensor of `directory` is held at a time. What
    is rounded here is so without data, or has been by `calibrated`."""
    match weight:
        case ExternalWeight():
            yield weight.offset, read_fp32(weight, directory)
        case KeptTensor():
            yield weight.offset, read_tensor(weight.source, directory).reshape(-1).view(np.uint8)
        case DequantizedWeight():
            values = dequantize_stored(weight.source.read(directory)).T
            yield weight.offset, np.ascontiguousarray(values)
        case Int8GemmWeight():
            stored = quantized(weight.source, directory, 8, None)
            integers, channels = int8_gemm.pack(weight.kernel, stored)
            yield weight.offset, integers
            yield weight.scales_offset, channels
        case PackedWeight(source=source, layout=layout, rounding=rounding):
            block = None if rounding.by_row else layout.block
            if isinstance(source, QuantizedValues) or layout.scales not in FACTORS:
                stored = quantized(source, directory, layout.bits, block)
            elif calibrated is not None and layout.bits == FOUR_BITS.bits:
                stored = calibrated.read(str(source.name))
            else:
                array, name = read_tensor(source, directory), str(source.name)
                stored = quantize_super_blocks(array, FORMS[layout.bits], name)
            panels = low_bit_matmul.pack(layout, stored, rounding)
            if isinstance(weight, ExpertWeight):
                for i, panel in enumerate(panels):
                    yield weight.offset + i * weight.panel_distance, panel
            else:
                yield weight.offset, panels
        case LowBitWeight():
            stored = quantized(weight.source, directory, weight.kernel.bits, weight.kernel.block)
            offsets = weight.offset, weight.scales_offset, weight.zeros_offset
            yield from zip(offsets, matmul_nbits.pack(weight.kernel, stored), strict=False)


def quantized(
    source: ir.ExternalTensor | QuantizedValues,
    directory: Path,
    bits: int,
    block: int | None,
) -> QuantizedWeight:
    """The weight with the export's quantized values, or rounded to nearest: in blocks, or one scale
    per channel where `block` is None."""
    if isinstance(source, QuantizedValues):
        return source.read(directory)
    few: Literal[4, 8] = 4 if bits == 4 else 8
    return quantize_rtn(read_tensor(source, directory), few, block, str(source.name))


def read_fp32(weight: ExternalWeight, directory: Path) -> NDArray[np.float32]:
    """The weight's float32 form, read from the canonical directory."""
    array = read_tensor(weight.source, directory)
    return np.ascontiguousarray(
        (array.T if weight.transposed else array).astype(np.float32, order="C")
    )
