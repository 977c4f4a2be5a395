"""A quantized weight of a canonical graph, read from its file a few outputs at a time.

Knows the axes of values and of what belongs to their blocks, and 4-bit values that share a byte.
Knows no product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.quantization.quantized_weight import decoded
from edgespec.quantization.weight_nodes import Factors, weight_nodes

Floats = NDArray[np.float32]
Read = Callable[[slice, slice], Floats]  # of rows and columns
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
class StoredFactors:
    """Numbers of blocks, scales or minimums: stored, times `factor`, or times `shared`, which
    `group` rows of them have in common."""

    numbers: StoredMatrix
    factor: np.float32
    shared: StoredMatrix | None
    group: int

    @classmethod
    def of(cls, factors: Factors, directory: Path) -> StoredFactors | np.float32:
        """Those that a graph says; a number where it is one for all."""
        if not isinstance(factors.stored, ir.ExternalTensor):
            return np.float32(factors.stored.numpy())
        factor, shared = np.float32(1), None
        if isinstance(factors.shared, ir.ExternalTensor):
            shared = StoredMatrix.of(factors.shared, directory)
        elif factors.shared is not None:
            factor = np.float32(factors.shared.numpy())
        numbers = StoredMatrix.of(factors.stored, directory)
        return cls(numbers, factor, shared, factors.group)

    def read(self, rows: slice, columns: slice) -> Floats:
        """Rows and columns in float32."""
        numbers = self.numbers.read(rows, columns)
        if self.shared is None:
            return numbers * self.factor
        first = rows.start // self.group
        shared = self.shared.read(slice(first, -(-rows.stop // self.group)), columns)
        repeated = np.repeat(shared, self.group, axis=0)[rows.start - first * self.group :]
        return numbers * repeated[: len(numbers)]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantized weight: `values` [in, out], or if `rows_are_outputs` [out, in], less zero points,
    times scales, less minimums.

    Of these `axis` is the one along which `block` values share one; without a block, there is one
    for each place on the axis, or one for all.
    """

    values: StoredMatrix
    scales: StoredFactors | np.float32
    zero_points: StoredMatrix | None
    minimums: StoredFactors | None
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
        """Makes weights of rows and columns of the values."""
        if isinstance(self.scales, np.float32):
            part *= self.scales
            return
        blocks, of_blocks = self.blocks(part, rows, columns)
        if self.zero_points is not None:
            blocks -= of_blocks(self.zero_points.read)
        blocks *= of_blocks(self.scales.read)
        if self.minimums is not None:
            blocks -= of_blocks(self.minimums.read)

    def blocks(
        self, part: Floats, rows: slice, columns: slice
    ) -> tuple[Floats, Callable[[Read], Floats]]:
        """Rows and columns of the values as blocks, and what reads their numbers, one a block."""
        if not self.block:  # one for each place on the axis
            along = columns if self.axis else rows
            turned = (lambda numbers: numbers) if self.axis else np.transpose
            return part, lambda read: turned(read(slice(0, 1), along))
        if self.axis:
            along = slice(columns.start // self.block, columns.stop // self.block)
            shape = len(part), -1, self.block
            return part.reshape(shape), lambda read: read(rows, along)[:, :, None]
        along = slice(rows.start // self.block, rows.stop // self.block)
        shape = -1, self.block, part.shape[1]
        return part.reshape(shape), lambda read: read(along, columns)[:, None, :]


def quantized_weight(value: ir.Value, directory: Path) -> StoredWeight | None:
    """The quantized weight [in, out] that a value is computed of; None where it is none."""
    nodes = weight_nodes(value)
    if nodes is None or not isinstance(nodes.values, ir.ExternalTensor):
        return None
    minimums = None if nodes.minimums is None else StoredFactors.of(nodes.minimums, directory)
    assert not isinstance(minimums, np.float32)
    points = nodes.zero_points
    return StoredWeight(
        StoredMatrix.of(nodes.values, directory),
        StoredFactors.of(nodes.scales, directory),
        StoredMatrix.of(points, directory) if isinstance(points, ir.ExternalTensor) else None,
        minimums,
        nodes.axis,
        nodes.block,
        nodes.transposed,
    )
