"""The weights of a lowered graph, and where each stands in the engine's data file.

Knows offsets, sizes and kernels. `weights` decides which weight goes there, `weight_data` makes its
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import onnx_ir as ir

from edgespec.backends.ort import int8_gemm, matmul_nbits
from edgespec.backends.ort.experts import ExpertsLayout
from edgespec.backends.ort.low_bit_matmul import RowRounding
from edgespec.backends.ort.native.layout import WeightLayout
from edgespec.backends.ort.quantized_values import QuantizedValues

ALIGN_BYTES = 4096
HEAD_DATA = "lm_head.data"  # where an lm_head stands until its hash is known


@dataclass(frozen=True, slots=True)
class ExternalWeight:
    """A weight in float32: where its source stands, and where its float32 form will."""

    source: ir.ExternalTensor
    transposed: bool
    offset: int
    num_bytes: int


Kernel = TypeVar("Kernel", matmul_nbits.NBitsKernel, int8_gemm.Int8Kernel)


@dataclass(frozen=True, slots=True)
class QuantizedPlace(Generic[Kernel]):
    """A quantized weight [out, in]: its source, its kernel, and where values and scales will
    stand."""

    source: ir.ExternalTensor | QuantizedValues
    kernel: Kernel
    offset: int  # of the values
    scales_offset: int

    @property
    def num_bytes(self) -> int:
        """The bytes of all of them together."""
        return self.kernel.num_bytes


@dataclass(frozen=True, slots=True)
class LowBitWeight(QuantizedPlace[matmul_nbits.NBitsKernel]):
    """One that MatMulNBits reads; with zero points, where the kernel has them."""

    zeros_offset: int = 0


class Int8GemmWeight(QuantizedPlace[int8_gemm.Int8Kernel]):
    """One that an int8 GEMM reads."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A quantized weight [out, in] that a kernel of our own reads: its source, how it is packed,
    how rows are rounded that it multiplies, and where it will stand: `alone` in a file of its own,
    which the engines of a pair can have in common."""

    source: ir.ExternalTensor | QuantizedValues
    layout: WeightLayout
    rounding: RowRounding
    offset: int
    alone: bool = field(default=False, kw_only=True)

    @property
    def num_bytes(self) -> int:
        """The bytes of values and scales together."""
        return self.layout.num_bytes


@dataclass(frozen=True, slots=True)
class ExpertWeight(PackedWeight):
    """One weight of one expert, in a tensor of all experts of a layer: its panels stand apart."""

    panel_distance: int  # in bytes


@dataclass(frozen=True, slots=True)
class DequantizedWeight:
    """A quantized weight that no kernel here reads: dequantized, [in, out] in float32."""

    source: QuantizedValues
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that stays as it is."""

    source: ir.ExternalTensor
    offset: int
    num_bytes: int


AnyWeight = (
    ExternalWeight | LowBitWeight | Int8GemmWeight | PackedWeight | DequantizedWeight | KeptTensor
)


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """A new initializer of the lowered graph, and where its bytes stand in the data file."""

    value: ir.Value
    offset: int
    num_bytes: int


class DataFile:
    """The engine's data file as it fills up; tensors begin at multiples of a page."""

    def __init__(self, graph: ir.Graph, data_name: str) -> None:
        self.graph, self.data_name, self.end = graph, data_name, 0

    def place(
        self, name: str, dims: tuple[int, ...], dtype: ir.DataType, *, alone: bool = False
    ) -> WeightPlace:
        """A new initializer behind those that are there; or `alone`, in the file HEAD_DATA."""
        offset = 0 if alone else -(-self.end // ALIGN_BYTES) * ALIGN_BYTES
        size, shape = int(np.prod(dims)) * int(dtype.itemsize), ir.Shape(dims)
        if not alone:
            self.end = offset + size
        file = HEAD_DATA if alone else self.data_name
        tensor = ir.ExternalTensor(file, offset, size, dtype, shape=shape, name=name)
        value = ir.Value(name=name, shape=shape, type=ir.TensorType(dtype), const_value=tensor)
        self.graph.register_initializer(value)
        return WeightPlace(value, offset, size)

    def place_low_bit(self, name: str, kernel: matmul_nbits.NBitsKernel) -> list[WeightPlace]:
        """Values and scales of a weight that MatMulNBits reads, and its zero points."""
        places = [
            self.place(f"{name}/values", kernel.values_shape, ir.DataType.UINT8),
            self.place(f"{name}/scales", (kernel.num_scales,), ir.DataType.FLOAT),
        ]
        if kernel.zero_points:
            places.append(self.place(f"{name}/zeros", kernel.zeros_shape, ir.DataType.UINT8))
        return places

    def place_packed(
        self, name: str, layout: WeightLayout | ExpertsLayout, *, alone: bool = False
    ) -> WeightPlace:
        """A weight that a kernel of our own reads, or all experts of a layer."""
        return self.place(f"{name}/packed", layout.shape, ir.DataType.UINT8, alone=alone)

    def place_int8(
        self, name: str, kernel: int8_gemm.Int8Kernel
    ) -> tuple[WeightPlace, WeightPlace]:
        """Values and scales of a weight that an int8 GEMM reads."""
        values = self.place(f"{name}/values", kernel.values_shape, ir.DataType.INT8)
        return values, self.place(f"{name}/scales", (kernel.out_features,), ir.DataType.FLOAT)
