"""The tensors of a quantized weight in the canonical graph: their axes, types and bytes.

Knows the layouts that TensorRT documents for DequantizeLinear. Knows no nodes (see `linear`) and no
layouts of checkpoints (see checkpoint/layouts).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_weight
from edgespec.checkpoint.quantization import Quantization
from edgespec.checkpoint.source import ByteSink, TensorInfo
from edgespec.errors import UnsupportedModel
from edgespec.quantization.quantized_weight import QuantizedWeight

Sharing = Literal["tensor", "channel", "block"]  # the weights that share a scale
BlockPart = Literal[  # those with a number for each block
    "weight_scale",
    "weight_zero_point",
    "weight_minimum",
    "weight_super_scale",
    "weight_super_minimum",
]
Part = Literal["weight", "pre_quant_scale", "input_order"] | BlockPart
_FOUR_BITS = ("int4", "uint4", "float4_e2m1fn")
_ROWS = 32  # that are transposed at a time
# What stands in the graph as it is stored; of floats all others become float32
_KEPT = ("float8_e4m3fn", "float8_e8m0fnu", "int8", "uint8", "uint4")


@dataclass(frozen=True, slots=True)
class Packing:
    """The tensors of one Linear, computed on demand.

    Quantized values are [in, out]; FP4 is [out, in], as TensorRT requires. Of a symmetric format
    whose scales are never negative they are positive, as TensorRT requires: a block with scale 0
    gets scale 1 and zeros. Raises UnsupportedModel that names a layer that the canonical graph
    cannot represent.
    """

    weight: QuantizedWeight

    def __post_init__(self) -> None:
        weight, in_features = self.weight, self.weight.shape[1]
        assert weight.super_scales is None or weight.global_scale is None
        if self.sharing == "block" and in_features % weight.block[1]:
            raise UnsupportedModel(
                f"{weight.name} has {in_features} inputs, which is not a multiple of its block size"
                f" {weight.block[1]}.",
                "Give a checkpoint in which this layer is not quantized, or another scheme.",
            )

    @property
    def rows_are_outputs(self) -> bool:
        """Whether the weight is stored as [out, in]."""
        return self.weight.values.dtype.name == "float4_e2m1fn"

    @property
    def sharing(self) -> Sharing:
        """The weights that share a scale. A block as long as the row is still a block."""
        (rows, columns), (out_features, in_features) = self.weight.block, self.weight.shape
        if columns < in_features or self.weight.scheme.scaling == "block":
            return "block"
        return "tensor" if rows >= out_features else "channel"

    @property
    def axis(self) -> int:
        """The attribute `axis` of DequantizeLinear: the axis of the blocks or of the channels."""
        return int((self.sharing == "block") == self.rows_are_outputs)

    @property
    def block_size(self) -> int:
        """The attribute `block_size` of DequantizeLinear; 0 without blocks."""
        return self.weight.block[1] if self.sharing == "block" else 0

    @property
    def positive(self) -> bool:
        """Whether scales are made positive, and float16 ones float32, as TensorRT requires: of
        formats that it reads."""
        return self.weight.symmetric and not self.weight.scheme.signed_scales

    def has(self, part: BlockPart) -> bool:
        """Whether the weight has the numbers of a part."""
        return self._numbers(part) is not None

    def info(self, part: Part) -> TensorInfo:
        """Returns dtype, shape and number of bytes of a part without computing it."""
        out_features, in_features = self.weight.shape
        dtype: str = "float32"
        shape: tuple[int, ...] = (in_features,)
        match part:
            case "weight":
                dtype = self.weight.values.dtype.name
                shape = self._transposed(out_features, in_features)
            case "input_order":
                dtype = "int64"
            case "pre_quant_scale":
                pass
            case _:
                dtype, shape = self._block_info(part)
        count = math.prod(shape)
        itemsize = 1 if dtype in _FOUR_BITS else np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
        num_bytes = -(-count // 2) if dtype in _FOUR_BITS else count * itemsize
        return TensorInfo(f"{self.weight.name}.{part}", dtype, shape, None, 0, num_bytes)

    def array(self, part: Part) -> NDArray[Any]:
        """Returns a part with the shape and dtype of its `info`; 4-bit values one per byte."""
        match part:
            case "weight":
                values = self._values()
                return np.ascontiguousarray(values) if self.rows_are_outputs else transposed(values)
            case "pre_quant_scale":
                assert self.weight.pre_quant_scale is not None
                return self.weight.pre_quant_scale
            case "input_order":
                assert self.weight.input_order is not None
                return self.weight.input_order.astype(np.int64)
            case _:
                return self._block_array(part)

    def _transposed(self, out_features: int, in_side: int) -> tuple[int, int]:
        return (out_features, in_side) if self.rows_are_outputs else (in_side, out_features)

    def _numbers(self, part: BlockPart) -> NDArray[Any] | None:
        """The numbers of blocks as the weight has them."""
        weight = self.weight
        match part:
            case "weight_scale":
                return weight.scales
            case "weight_zero_point":
                return weight.zero_points
            case "weight_minimum":
                return weight.minimums
            case "weight_super_scale":
                return weight.super_scales
            case "weight_super_minimum":
                return weight.super_minimums

    def _block_info(self, part: BlockPart) -> tuple[str, tuple[int, ...]]:
        """The dtype and shape of numbers of blocks."""
        numbers, out_features = self._numbers(part), self.weight.shape[0]
        assert numbers is not None
        kept = _KEPT if self.positive else (*_KEPT, "float16")
        dtype = numbers.dtype.name if numbers.dtype.name in kept else "float32"
        match self.sharing:
            case "tensor":
                return dtype, ()
            case "channel":
                return dtype, (out_features,)
            case "block":
                return dtype, self._transposed(out_features, numbers.shape[1])

    def _block_array(self, part: BlockPart) -> NDArray[Any]:
        numbers, (dtype, shape) = self._numbers(part), self._block_info(part)
        assert numbers is not None
        rows = self._rows(numbers).astype(getattr(ml_dtypes, dtype, dtype), copy=False)
        if part == "weight_scale" and self.positive:
            rows = np.where(rows.astype(np.float32) == 0, np.ones((), rows.dtype), rows)
        if self.sharing != "block":
            return rows.reshape(-1)[: math.prod(shape)].reshape(shape)
        return np.ascontiguousarray(rows if self.rows_are_outputs else rows.T)

    def _values(self) -> NDArray[Any]:
        """Quantized values [out, in], zero where a scale of zero becomes one."""
        values = self.weight.values
        zero_scale = self._rows(self.weight.scales).astype(np.float32) == 0
        if not self.positive or not zero_scale.any():
            return values
        in_features = values.shape[1]
        mask = np.repeat(zero_scale, self.weight.block[1], axis=1)[:, :in_features]
        return np.where(mask, np.zeros((), values.dtype), values)

    def _rows(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """[out, blocks]: numbers of several rows are repeated, since ONNX blocks have one axis."""
        return np.repeat(numbers, self.weight.block[0], axis=0)[: self.weight.shape[0]]


class PackingSource:
    """Writes the parts of a checkpoint's quantized weights.

    Caches the last weight, and of each weight what a graph says of it.
    """

    def __init__(self, checkpoint: Checkpoint, quantization: Quantization | None) -> None:
        self.checkpoint, self.quantization = checkpoint, quantization
        self.last: tuple[str, Packing] | None = None
        self.known: dict[str, Packing] = {}

    def packing(self, module: str) -> Packing | None:
        """Returns the packed Linear with the stored name `module`, whose values and scales may be
        zeros; None if it is not quantized."""
        if module not in self.known and self.whole(module) is None:
            return None
        return self.known[module]

    def whole(self, module: str) -> Packing | None:
        """Returns the packed Linear as it is stored; None if it is not quantized."""
        if self.quantization is None:
            return None
        if self.last is None or self.last[0] != module:
            weight = read_weight(self.checkpoint, self.quantization, module)
            if weight is None:
                return None
            self.last = (module, Packing(weight))
            self.known[module] = Packing(without_numbers(weight))
        return self.last[1]

    def write_to(self, name: str, fh: ByteSink) -> None:
        """Writes the bytes of a part by the name in its `info`."""
        module, _, part = name.rpartition(".")
        packing = self.whole(module)
        assert packing is not None
        fh.write(memoryview(stored_bytes(packing.array(part))))  # type: ignore[arg-type]


def without_numbers(weight: QuantizedWeight) -> QuantizedWeight:
    """A weight of the same types and shapes, with zeros that take no memory for its values and the
    numbers of its blocks, where there are several."""
    return replace(
        weight,
        values=_zeros(weight.values),
        scales=weight.scales if weight.scales.size == 1 else _zeros(weight.scales),
        zero_points=None if weight.zero_points is None else _zeros(weight.zero_points),
        minimums=None if weight.minimums is None else _zeros(weight.minimums),
        super_scales=None if weight.super_scales is None else _zeros(weight.super_scales),
        super_minimums=None if weight.super_minimums is None else _zeros(weight.super_minimums),
    )


def _zeros(array: NDArray[Any]) -> NDArray[Any]:
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def transposed(values: NDArray[Any]) -> NDArray[Any]:
    """Returns the transpose of a matrix as an array of its own. A few rows at a time stay in a
    cache of the CPU: the whole at once takes six times as long."""
    columns = np.empty(values.shape[::-1], values.dtype)
    for low in range(0, len(values), _ROWS):
        columns[:, low : low + _ROWS] = values[low : low + _ROWS].T
    return columns


def stored_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns the bytes that ONNX stores: little-endian, two 4-bit values per byte, low first."""
    flat = array.reshape(-1).view(np.uint8)
    if array.dtype.name not in _FOUR_BITS:
        return flat
    flat = np.append(flat, np.uint8(0)) if flat.size % 2 else flat
    packed: NDArray[np.uint8] = (flat[0::2] & np.uint8(0xF)) | (flat[1::2] << np.uint8(4))
    return packed
