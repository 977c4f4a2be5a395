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
Part = Literal["weight", "weight_scale", "pre_quant_scale", "input_order"]
_FOUR_BITS = ("int4", "float4_e2m1fn")
_ROWS = 32  # that are transposed at a time
_SMALL_SCALES = ("float8_e4m3fn", "float8_e8m0fnu")  # of nvfp4 and mxfp8; all others become float32


@dataclass(frozen=True, slots=True)
class Packing:
    """The tensors of one Linear, computed on demand.

    Quantized values are [in, out]; FP4 is [out, in], as TensorRT requires. Scales are positive, as
    TensorRT requires: a block with scale 0 gets scale 1 and zeros. Raises UnsupportedModel that
    names a layer that the canonical graph cannot represent.
    """

    weight: QuantizedWeight

    def __post_init__(self) -> None:
        weight, in_features = self.weight, self.weight.shape[1]
        if not weight.symmetric:
            raise UnsupportedModel(
                f"{weight.name} is quantized with zero points; this version exports only symmetric"
                " weights.",
                "Give a symmetric checkpoint (GPTQ with sym, or one made by ModelOpt), or the"
                " original weights.",
            )
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

    def info(self, part: Part) -> TensorInfo:
        """Returns dtype, shape and number of bytes of a part without computing it."""
        out_features, in_features = self.weight.shape
        values, scales = self.weight.values.dtype.name, self.weight.scales.dtype.name
        kinds: dict[Part, tuple[str, tuple[int, ...]]] = {
            "weight": (values, self._transposed(out_features, in_features)),
            "weight_scale": (scales if scales in _SMALL_SCALES else "float32", self._scale_shape()),
            "pre_quant_scale": ("float32", (in_features,)),
            "input_order": ("int64", (in_features,)),
        }
        dtype, shape = kinds[part]
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
            case "weight_scale":
                return self._scales()
            case "pre_quant_scale":
                assert self.weight.pre_quant_scale is not None
                return self.weight.pre_quant_scale
            case "input_order":
                assert self.weight.input_order is not None
                return self.weight.input_order.astype(np.int64)

    def _transposed(self, out_features: int, in_side: int) -> tuple[int, int]:
        return (out_features, in_side) if self.rows_are_outputs else (in_side, out_features)

    def _scale_shape(self) -> tuple[int, ...]:
        out_features, in_features = self.weight.shape
        match self.sharing:
            case "tensor":
                return ()
            case "channel":
                return (out_features,)
            case "block":
                return self._transposed(out_features, in_features // self.block_size)

    def _values(self) -> NDArray[Any]:
        """Quantized values [out, in], zero where the scale is zero."""
        values, zero_scale = self.weight.values, self._scale_rows().astype(np.float32) == 0
        if not zero_scale.any():
            return values
        in_features = values.shape[1]
        mask = np.repeat(zero_scale, self.weight.block[1], axis=1)[:, :in_features]
        return np.where(mask, np.zeros((), values.dtype), values)

    def _scales(self) -> NDArray[Any]:
        scales = self._scale_rows()
        if scales.dtype.name not in _SMALL_SCALES:
            scales = scales.astype(np.float32)
        scales = np.where(scales.astype(np.float32) == 0, np.ones((), scales.dtype), scales)
        if self.sharing != "block":
            return scales.reshape(-1)[: math.prod(self._scale_shape())].reshape(self._scale_shape())
        return np.ascontiguousarray(scales if self.rows_are_outputs else scales.T)

    def _scale_rows(self) -> NDArray[Any]:
        """[out, blocks]: scales of several rows are repeated, since ONNX blocks have one axis."""
        return np.repeat(self.weight.scales, self.weight.block[0], axis=0)[: self.weight.shape[0]]


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
    """A weight of the same types and shapes, with zeros that take no memory for its values and,
    where there are several, its scales."""
    scales = weight.scales
    if scales.size > 1:
        scales = np.broadcast_to(np.zeros((), scales.dtype), scales.shape)
    values = np.broadcast_to(np.zeros((), weight.values.dtype), weight.shape)
    return replace(weight, values=values, scales=scales)


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
