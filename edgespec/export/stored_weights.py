"""A quantized weight of a canonical graph, read from its file a few outputs at a time.

Knows the DequantizeLinear in front of a weight, its axes and scales, and 4-bit values that share a
byte. Knows no product.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.quantization.quantized_weight import decoded

Floats = NDArray[np.float32]
PART_ELEMENTS = 1 << 16  # that are dequantized at a time: they stay in a cache of the CPU


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """The bytes of a matrix in a file, which are mapped. Two values of 4 bits share a byte, or, of
    rows with an odd number of them, each has its own."""

    codes: NDArray[Any]  # [rows, columns], or [rows, columns / 2] if packed
    dtype: str
    packed: bool

    @classmethod
    def of(cls, tensor: ir.ExternalTensor, directory: Path) -> StoredMatrix:
        """A tensor of a file in `directory`; one row if it has one axis."""
        shape = tensor.shape.numpy()
        rows, columns = (1, *shape)[-2:]
        dtype, four_bits = tensor.dtype.numpy().name, tensor.dtype.bitwidth == 4
        num_bytes = -(-rows * columns // 2) if four_bits else rows * columns * tensor.dtype.itemsize
        mapped = np.memmap(
            directory / tensor.location, np.uint8, "r", tensor.offset or 0, (int(num_bytes),)
        )
        if not four_bits:
            codes = mapped if tensor.dtype.itemsize == 1 else mapped.view(tensor.dtype.numpy())
            return cls(codes.reshape(rows, columns), dtype, packed=False)
        if columns % 2 == 0:
            return cls(mapped.reshape(rows, columns // 2), dtype, packed=True)
        both = np.stack([mapped & 0xF, mapped >> 4], -1).reshape(-1)
        return cls(both[: rows * columns].reshape(rows, columns), dtype, packed=False)

    @property
    def num_columns(self) -> int:
        """Values of a row."""
        return int(self.codes.shape[1]) * (2 if self.packed else 1)

    def read(self, rows: slice, columns: slice, out: Floats | None = None) -> Floats:
        """Rows and columns in float32, in `out` where it is given. Slices of packed columns begin
        and end at even ones."""
        if self.packed:
            assert not columns.start % 2
            assert not columns.stop % 2
            columns = slice(columns.start // 2, columns.stop // 2)
        codes = np.ascontiguousarray(self.codes[rows, columns])
        if codes.dtype == np.uint8 and self.dtype != "int8":
            return decoded(codes, self.dtype, packed=self.packed, out=out)
        numbers = codes.view(self.dtype)
        if out is None:
            return numbers.astype(np.float32)
        out[...] = numbers
        return out


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantized weight: `values` [in, out], or if `rows_are_outputs` [out, in], times scales.

    Of the scales `axis` is the one along which `block` values share one; without a block, there is
    one for each place on that axis, or one for all, which `factor` is alone.
    """

    values: StoredMatrix
    scales: StoredMatrix | None
    factor: np.float32
    axis: int
    block: int
    rows_are_outputs: bool

    @property
    def shape(self) -> tuple[int, int]:
        """[in, out]."""
        rows, columns = len(self.values.codes), self.values.num_columns
        return (columns, rows) if self.rows_are_outputs else (rows, columns)

    def outputs(self, low: int, high: int) -> Floats:
        """The weights of outputs `low` to `high`, in float32: [in, high - low], or if
        `rows_are_outputs` [high - low, in]."""
        inputs, _ = self.shape
        if self.rows_are_outputs:
            first, rows, columns = low, high - low, slice(0, inputs)
        else:
            first, rows, columns = 0, inputs, slice(low, high)
        weights = np.empty((rows, columns.stop - columns.start), np.float32)
        unit = self.block if self.block and self.axis == 0 else 1
        step = max(1, PART_ELEMENTS // weights.shape[1] // unit) * unit
        for start in range(0, rows, step):
            some = slice(first + start, first + min(start + step, rows))
            part = self.values.read(some, columns, weights[start : start + step])
            self.scale(part, some, columns)
        return weights

    def scale(self, part: Floats, rows: slice, columns: slice) -> None:
        """Multiplies rows and columns of the values by their scales."""
        if self.scales is None:
            part *= self.factor
            return
        if not self.block:  # one for each place on the axis
            along = columns if self.axis else rows
            scales = self.scales.read(slice(0, 1), along)
            part *= (scales if self.axis else scales.T) * self.factor
        elif self.axis:
            along = slice(columns.start // self.block, columns.stop // self.block)
            scales = self.scales.read(rows, along) * self.factor
            part.reshape(len(part), -1, self.block)[...] *= scales[:, :, None]
        else:
            along = slice(rows.start // self.block, rows.stop // self.block)
            scales = self.scales.read(along, columns) * self.factor
            part.reshape(-1, self.block, part.shape[1])[...] *= scales[:, None, :]


def quantized_weight(value: ir.Value, directory: Path) -> StoredWeight | None:
    """The quantized weight [in, out] that a value is computed of; None where it is none."""
    node = value.producer()
    transposed = node is not None and node.op_type == "Transpose"
    if node is not None and transposed:
        node = source(node)
    if node is None or node.op_type != "DequantizeLinear":
        return None
    values, scale = node.inputs[0], node.inputs[1]
    if values is None or scale is None or not isinstance(values.const_value, ir.ExternalTensor):
        return None
    factor, stored = np.float32(1), scale.const_value
    if (inner := scale.producer()) is not None:  # the scales are quantized as well
        outer, by = inner.inputs
        assert outer is not None
        assert by is not None
        assert by.const_value is not None
        factor, stored = np.float32(by.const_value.numpy()), outer.const_value
    if not isinstance(stored, ir.ExternalTensor):
        assert stored is not None
        factor, stored = np.float32(stored.numpy()), None
    axis, block = node.attributes.get("axis"), node.attributes.get("block_size")
    return StoredWeight(
        StoredMatrix.of(values.const_value, directory),
        None if stored is None else StoredMatrix.of(stored, directory),
        factor,
        axis.as_int() if axis is not None else 1,
        block.as_int() if block is not None else 0,
        transposed,
    )


def source(node: ir.Node) -> ir.Node | None:
    """The node that computes the first input of another."""
    value = node.inputs[0]
    return None if value is None else value.producer()
