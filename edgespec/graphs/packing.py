"""A quantized weight as the canonical graph holds it: which tensors, in which order of axes, in
which types.

Knows the layouts that TensorRT documents for DequantizeLinear. Knows no nodes (those are in
`linear`) and no files of checkpoints: weights come from checkpoint/layouts in one form, whoever
wrote them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.files import ByteSink, Checkpoint, TensorInfo
from edgespec.checkpoint.layouts import read_weight
from edgespec.checkpoint.quantization import Quantization
from edgespec.errors import UnsupportedModel
from edgespec.quantized import QuantizedWeight

Sharing = Literal["tensor", "channel", "block"]  # what has one scale
Part = Literal["weight", "weight_scale", "pre_quant_scale", "input_order"]
_FOUR_BITS = ("int4", "float4_e2m1fn")
_SMALL_SCALES = ("float8_e4m3fn", "float8_e8m0fnu")  # of nvfp4 and mxfp8; all others become float32


@dataclass(frozen=True, slots=True)
class Packing:
    """The tensors of one Linear, made when they are asked for.

    Codes stand as [in, out], FP4 as [out, in] (TensorRT's form of it). Scales are above zero, as
    TensorRT demands: a block whose scale is zero gets the scale 1 and codes that are zero. Raises
    UnsupportedModel, naming the layer, for what the canonical graph has no form for.
    """

    weight: QuantizedWeight

    def __post_init__(self) -> None:
        weight, in_features = self.weight, self.weight.shape[1]
        if not weight.symmetric:
            raise UnsupportedModel(
                f"{weight.name} is quantized with zero points; this version exports symmetric"
                " weights alone.",
                "Give a symmetric checkpoint (GPTQ with sym, or one made by ModelOpt), or the"
                " original weights.",
            )
        if self.sharing == "block" and in_features % weight.block[1]:
            raise UnsupportedModel(
                f"{weight.name} has {in_features} inputs, which is no multiple of its blocks of"
                f" {weight.block[1]}.",
                "Give a checkpoint that leaves this layer unquantized, or one of another scheme.",
            )

    @property
    def rows_are_outputs(self) -> bool:
        return self.weight.codes.dtype.name == "float4_e2m1fn"

    @property
    def sharing(self) -> Sharing:
        """A block that spans the whole row is still a block."""
        (rows, columns), (out_features, in_features) = self.weight.block, self.weight.shape
        if columns < in_features or self.weight.scheme.scaling == "block":
            return "block"
        return "tensor" if rows >= out_features else "channel"

    @property
    def axis(self) -> int:
        """The codes' axis that blocks lie along, or that channels count."""
        return int((self.sharing == "block") == self.rows_are_outputs)

    @property
    def block_size(self) -> int:
        """0: not in blocks."""
        return self.weight.block[1] if self.sharing == "block" else 0

    def info(self, part: Part) -> TensorInfo:
        """Type, shape and bytes of a part, before any of it is made."""
        out_features, in_features = self.weight.shape
        codes, scales = self.weight.codes.dtype.name, self.weight.scales.dtype.name
        kinds: dict[Part, tuple[str, tuple[int, ...]]] = {
            "weight": (codes, self._turned(out_features, in_features)),
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
        """A part in the shape and type of its `info`; four-bit codes one to a byte."""
        match part:
            case "weight":
                return np.ascontiguousarray(
                    self._codes() if self.rows_are_outputs else self._codes().T
                )
            case "weight_scale":
                return self._scales()
            case "pre_quant_scale":
                assert self.weight.pre_quant_scale is not None
                return self.weight.pre_quant_scale
            case "input_order":
                assert self.weight.input_order is not None
                return self.weight.input_order.astype(np.int64)

    def _turned(self, out_features: int, in_side: int) -> tuple[int, int]:
        return (out_features, in_side) if self.rows_are_outputs else (in_side, out_features)

    def _scale_shape(self) -> tuple[int, ...]:
        out_features, in_features = self.weight.shape
        match self.sharing:
            case "tensor":
                return ()
            case "channel":
                return (out_features,)
            case "block":
                return self._turned(out_features, in_features // self.block_size)

    def _codes(self) -> NDArray[Any]:
        """[out, in]"""
        codes, silent = self.weight.codes, self._scale_rows().astype(np.float32) == 0
        if not silent.any():
            return codes
        in_features = codes.shape[1]
        over = np.repeat(silent, self.weight.block[1], axis=1)[:, :in_features]
        return np.where(over, np.zeros((), codes.dtype), codes)

    def _scales(self) -> NDArray[Any]:
        scales = self._scale_rows()
        if scales.dtype.name not in _SMALL_SCALES:
            scales = scales.astype(np.float32)
        scales = np.where(scales.astype(np.float32) == 0, np.ones((), scales.dtype), scales)
        if self.sharing != "block":
            return scales.reshape(-1)[: math.prod(self._scale_shape())].reshape(self._scale_shape())
        return np.ascontiguousarray(scales if self.rows_are_outputs else scales.T)

    def _scale_rows(self) -> NDArray[Any]:
        """[out, blocks]: what several rows share is repeated, since DequantizeLinear knows blocks
        of one axis."""
        return np.repeat(self.weight.scales, self.weight.block[0], axis=0)[: self.weight.shape[0]]


class PackingSource:
    """Writes the parts of a checkpoint's quantized weights. Holds the one weight that was read
    last."""

    def __init__(self, checkpoint: Checkpoint, quantization: Quantization | None) -> None:
        self.checkpoint, self.quantization = checkpoint, quantization
        self.last: tuple[str, Packing] | None = None

    def packing(self, module: str) -> Packing | None:
        """The Linear `module` by its stored name; None where it is not quantized."""
        if self.quantization is None:
            return None
        if self.last is None or self.last[0] != module:
            weight = read_weight(self.checkpoint, self.quantization, module)
            if weight is None:
                return None
            self.last = (module, Packing(weight))
        return self.last[1]

    def write_to(self, name: str, fh: ByteSink) -> None:
        """The bytes of a part by the name that its info has."""
        module, _, part = name.rpartition(".")
        packing = self.packing(module)
        assert packing is not None
        fh.write(memoryview(stored_bytes(packing.array(part))))  # type: ignore[arg-type]


def stored_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Little-endian bytes as ONNX stores them: of two four-bit values the first is in the low
    half."""
    flat = array.reshape(-1).view(np.uint8)
    if array.dtype.name not in _FOUR_BITS:
        return flat
    flat = np.append(flat, np.uint8(0)) if flat.size % 2 else flat
    packed: NDArray[np.uint8] = (flat[0::2] & np.uint8(0xF)) | (flat[1::2] << np.uint8(4))
    return packed
