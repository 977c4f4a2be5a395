"""The tensors of one quantized Linear, each checked when it is read, and packed integers.

Knows what layouts have in common. Knows no layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.finite import is_finite
from edgespec.checkpoint.quantization import Quantization, SchemeRule
from edgespec.checkpoint.source import TensorInfo
from edgespec.errors import CheckpointError
from edgespec.quantization.quantized_weight import QuantizedWeight

FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of one Linear. Each is checked when it is read."""

    checkpoint: Checkpoint
    quantization: Quantization
    module: str

    def has(self, part: str) -> bool:
        """Returns whether the Linear has the tensor `part`, such as weight_scale."""
        return f"{self.module}.{part}" in self.checkpoint.tensors

    def info(self, part: str, dtypes: tuple[str, ...]) -> TensorInfo:
        """Returns the header of a tensor. Raises CheckpointError for another dtype or none."""
        name = f"{self.module}.{part}"
        if name not in self.checkpoint.tensors:
            raise CheckpointError(
                f"{self.checkpoint.place} has no tensor {name!r}, which {self.quantization.source}"
                f" requires ({self.quantization.layout}).",
                "Download the settings and the weights again: they do not belong together, or a"
                " part is missing.",
            )
        info = self.checkpoint.tensors[name]
        if info.dtype not in dtypes:
            refuse(info, f"is {info.dtype}; expected {' or '.join(dtypes)}")
        return info

    def matrix(self, part: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
        """Returns the shape of a matrix. Raises CheckpointError for other tensors."""
        info = self.info(part, dtypes)
        if len(info.shape) != 2 or 0 in info.shape:
            refuse(info, f"has the shape {list(info.shape)}; expected a matrix")
        return info.shape[0], info.shape[1]

    def read(self, part: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> NDArray[Any]:
        """Reads a tensor of one of `shapes` and reshapes it to the first of them."""
        info = self.info(part, dtypes)
        if info.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            refuse(info, f"has the shape {list(info.shape)}; expected {wanted}")
        return self.checkpoint.read(info.name).reshape(shapes[0])

    def scales(self, part: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> NDArray[Any]:
        """Returns scales as `read` does. Raises CheckpointError if one is negative, NaN or Inf."""
        return checked_scales(f"{self.module}.{part}", self.read(part, dtypes, *shapes))

    def float8(self, part: str, shape: tuple[int, int]) -> NDArray[Any]:
        """Reads FP8 values. E4M3 has no Inf, and one encoding of NaN apart from its sign."""
        values = self.read(part, ("float8_e4m3fn",), shape)
        if not is_finite(values.reshape(-1).view(np.uint8).data, "float8_e4m3fn"):
            refuse(self.info(part, ("float8_e4m3fn",)), "has NaN values")
        return values

    def scalar(self, part: str) -> float:
        """Returns the positive number of a scalar tensor. Raises CheckpointError for any other."""
        return read_scalar(self.checkpoint, self.info(part, FLOATS).name)

    def columns(self, part: str, dtypes: tuple[str, ...], rows: int) -> int:
        """Returns the number of scales per row."""
        shape = self.matrix(part, dtypes)
        if shape[0] != rows:
            refuse(self.info(part, dtypes), f"has the shape {list(shape)}; expected {rows} rows")
        return shape[1]

    def width(self, part: str, rule: SchemeRule, in_features: int, count: int) -> int:
        """Returns the weights per scale. Raises CheckpointError if it is not the declared group
        size."""
        declared = rule.group_size
        width = in_features // count
        matches = declared is None or width == min(declared, in_features)
        if width * count != in_features or not matches:
            expected = f"groups of {declared}" if declared else "equal groups"
            raise CheckpointError(
                f"{self.module}.{part} has {count} scales per row for {in_features} inputs; "
                f"{self.quantization.source} declares {expected}.",
                "Download the settings and the weights again: they do not belong together.",
            )
        return width


def refuse(info: TensorInfo, fault: str) -> NoReturn:
    """Raises CheckpointError with the tensor's name and what is wrong with it."""
    raise CheckpointError(
        f"tensor {info.name!r} {fault}.",
        "Download the checkpoint again, or quantize the original again.",
    )


def checked_scales(name: str, scales: NDArray[Any]) -> NDArray[Any]:
    """Returns the scales. Raises CheckpointError for NaN, Inf and negative ones. Zero is a block of
    zeros."""
    values = scales.astype(np.float32)
    bad = ~np.isfinite(values) | (values < 0)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise CheckpointError(
            f"tensor {name!r} has {values[at]} at {list(at)} ({int(bad.sum())} such values); "
            "scales are finite and not negative.",
            "Download the checkpoint again, or quantize the original again.",
        )
    return scales


def read_scalar(checkpoint: Checkpoint, name: str) -> float:
    """Returns the one positive scale of a tensor. Raises CheckpointError for any other tensor."""
    info = checkpoint.tensors.get(name)
    if info is None:
        raise CheckpointError(
            f"{checkpoint.place} has no tensor {name!r}, but it has its counterpart."
        )
    if info.dtype not in FLOATS or info.shape not in ((), (1,)):
        refuse(info, f"is {info.dtype} {list(info.shape)}; expected one floating-point number")
    value = float(checkpoint.read(name).astype(np.float32).reshape(()))
    if not 0 < value < float("inf"):
        refuse(info, f"is {value}; a scale is a positive number")
    return value


# Packed integers


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the nibbles [..., 2n] of bytes [..., n], the low nibble first."""
    byte = np.arange(256)
    both = ((byte & 0xF) | (byte >> 4 << 8)).astype("<u2")  # looked up: shifts take thrice as long
    return np.take(both, packed, mode="wrap").view(np.uint8)


def unpack_words(packed: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """Returns the values [rows, n * 32 / bits] of words [rows, n], the lowest bits first.

    `bits` is 4 or 8.
    """
    stored = np.ascontiguousarray(packed).view(np.uint8)
    return unpack_nibbles(stored) if bits == 4 else stored


def integer_weight(
    parts: Parts,
    rule: SchemeRule,
    values: NDArray[np.uint8],  # [out, in]
    scales: NDArray[Any],  # [out, groups]
    zeros: NDArray[np.uint8],  # [out, groups]
    width: int,
    order: NDArray[np.intp] | None = None,
) -> QuantizedWeight:
    """Returns unsigned values with zero points, or signed ones if all of them are the middle."""
    four, middle = rule.scheme.bits == 4, 2 ** (rule.scheme.bits - 1)
    values = np.ascontiguousarray(values if order is None else values[:, order])
    points: NDArray[Any] | None = None
    if (zeros == middle).all():
        values = values ^ np.uint8(middle)  # value - middle, in two's complement
        dtype = ml_dtypes.int4 if four else np.int8
    else:
        dtype = ml_dtypes.uint4 if four else np.uint8
        points = np.ascontiguousarray(zeros).view(dtype)
    return QuantizedWeight(
        parts.module,
        rule.scheme,
        values.view(dtype),
        np.ascontiguousarray(scales),
        (1, width),
        zero_points=points,
        input_order=order,
    )


def input_order(parts: Parts, part: str, in_features: int, width: int) -> NDArray[np.intp] | None:
    """Sorts the inputs of a weight with desc_act by group, so that groups are blocks again."""
    if not parts.has(part):
        return None
    groups = parts.read(part, ("int32", "int64"), (in_features,))
    if np.array_equal(groups, np.arange(in_features) // width):
        return None
    inside = groups.min() >= 0 and groups.max() < in_features // width
    if not inside or (np.bincount(groups) != width).any():
        refuse(
            parts.info(part, ("int32", "int64")),
            f"does not have {width} inputs in each group",
        )
    return np.argsort(groups, kind="stable")
