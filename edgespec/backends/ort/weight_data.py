"""The bytes of an engine's data file, weight by weight.

Knows the form in which each kind of weight is read. `data_layout` knows where a weight stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.ort import int8_gemm, low_bit_matmul, matmul_nbits
from edgespec.backends.ort.data_layout import (
    AnyWeight,
    DequantizedWeight,
    ExpertWeight,
    ExternalWeight,
    Int8GemmWeight,
    KeptTensor,
    LowBitWeight,
    PackedWeight,
)
from edgespec.backends.ort.quantized_values import QuantizedValues, read_tensor
from edgespec.quantization.quantized_weight import QuantizedWeight, dequantize_stored, quantize_rtn

Pieces = Iterator[tuple[int, NDArray[Any]]]


def pieces(weight: AnyWeight, directory: Path) -> Pieces:
    """Yields offsets and arrays of the data file; one tensor of `directory` is held at a time."""
    match weight:
        case ExternalWeight():
            yield weight.offset, read_fp32(weight, directory)
        case KeptTensor():
            yield weight.offset, read_tensor(weight.source, directory).reshape(-1).view(np.uint8)
        case DequantizedWeight():
            values = dequantize_stored(weight.source.read(directory)).T
            yield weight.offset, np.ascontiguousarray(values)
        case Int8GemmWeight():
            integers, channels = int8_gemm.pack(weight.kernel, per_channel(weight, directory))
            yield weight.offset, integers
            yield weight.scales_offset, channels
        case ExpertWeight():
            packed = low_bit_matmul.pack(
                weight.layout, quantized(weight, directory), weight.rounding
            )
            for i, panel in enumerate(packed):
                yield weight.offset + i * weight.panel_distance, panel
        case PackedWeight():
            yield (
                weight.offset,
                low_bit_matmul.pack(weight.layout, quantized(weight, directory), weight.rounding),
            )
        case LowBitWeight():
            packed, scales = matmul_nbits.pack(weight.kernel, in_blocks(weight, directory))
            yield weight.offset, packed
            yield weight.scales_offset, scales


def quantized(weight: PackedWeight, directory: Path) -> QuantizedWeight:
    """The weight with the export's quantized values, or rounded to nearest: in blocks, or one scale
    per channel where rows have one each."""
    if isinstance(weight.source, QuantizedValues):
        return weight.source.read(directory)
    layout, name = weight.layout, str(weight.source.name)
    block = None if weight.rounding.by_row else layout.block
    return quantize_rtn(read_tensor(weight.source, directory), layout.bits, block, name)


def in_blocks(weight: LowBitWeight, directory: Path) -> QuantizedWeight:
    """The weight with the export's quantized values, or rounded to nearest in blocks."""
    if isinstance(weight.source, QuantizedValues):
        return weight.source.read(directory)
    kernel, name = weight.kernel, str(weight.source.name)
    return quantize_rtn(read_tensor(weight.source, directory), kernel.bits, kernel.block, name)


def per_channel(weight: Int8GemmWeight, directory: Path) -> QuantizedWeight:
    """The weight with the export's quantized values, or rounded to nearest, one scale per
    channel."""
    if isinstance(weight.source, QuantizedValues):
        return weight.source.read(directory)
    return quantize_rtn(read_tensor(weight.source, directory), 8, None, str(weight.source.name))


def read_fp32(weight: ExternalWeight, directory: Path) -> NDArray[np.float32]:
    """The weight's float32 form, read from the canonical directory."""
    array = read_tensor(weight.source, directory)
    return np.ascontiguousarray(
        (array.T if weight.transposed else array).astype(np.float32, order="C")
    )
