"""Packed weights of LowBitMatMul: their layout (matmul.h has the same in C++), and its way back.

Knows arrays. Knows no graph and no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

TILE = 16  # outputs that stand side by side
LINE = 64  # bytes
SCALES_BYTES = 4 * TILE
BLOCK_SIZES = (32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Layout:
    """A weight [out, in] of signed values of 4 or 8 bits, a scale per output and `block` inputs."""

    bits: Literal[4, 8]
    block: int
    in_features: int
    out_features: int

    def __post_init__(self) -> None:
        assert self.block in BLOCK_SIZES

    @property
    def num_blocks(self) -> int:
        """The number of blocks in a row; the last one is filled up with zeros."""
        return -(-self.in_features // self.block)

    @property
    def num_tiles(self) -> int:
        """The number of tiles of outputs; the last one is filled up with zeros."""
        return -(-self.out_features // TILE)

    @property
    def middle(self) -> int:
        """The unsigned value that stands for zero."""
        return 8 if self.bits == 4 else 128

    @property
    def block_bytes(self) -> int:
        """The size of a block of a tile: its values, then its scales."""
        values: int = TILE * self.block * self.bits // 8
        return values + SCALES_BYTES

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a packed weight in bytes: [tiles, blocks, bytes of a block]."""
        return self.num_tiles, self.num_blocks, self.block_bytes

    @property
    def num_bytes(self) -> int:
        """The size of a packed weight in bytes."""
        return int(np.prod(self.shape))

    def pack(self, values: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Packed tiles of values [out, in] and scales [out, blocks]."""
        assert values.shape == (self.out_features, self.in_features)
        assert scales.shape == (self.out_features, self.num_blocks)
        packed = np.empty(self.shape, np.uint8)
        many = max(1, 2**24 // (TILE * self.in_features))  # tiles at a time
        for first in range(0, self.num_tiles, many):
            rows = slice(first * TILE, (first + many) * TILE)
            tiles = packed[first : first + many]
            tiles[..., :-SCALES_BYTES] = self.lines(values[rows])
            tiles[..., -SCALES_BYTES:] = self.scales_of_tiles(scales[rows])
        return packed

    def lines(self, values: NDArray[np.int8]) -> NDArray[np.uint8]:
        """The lines [tiles, blocks, bytes] of values [out, in]."""
        tiles, lane = -(-len(values) // TILE), 32 // self.bits  # inputs of a line
        unsigned = np.full((tiles * TILE, self.num_blocks * self.block), self.middle, np.uint8)
        unsigned[: len(values), : self.in_features] = values.astype(np.int16) + self.middle
        split = unsigned.reshape(tiles, TILE, self.num_blocks, self.block // lane, -1, 4)
        if self.bits == 4:
            split = split[..., 0:1, :] | (split[..., 1:2, :] << np.uint8(4))
        return split.transpose(0, 2, 3, 4, 1, 5).reshape(tiles, self.num_blocks, -1)

    def scales_of_tiles(self, scales: NDArray[np.float32]) -> NDArray[np.uint8]:
        """The scales [tiles, blocks, bytes] of scales [out, blocks]."""
        tiles = -(-len(scales) // TILE)
        padded = np.zeros((tiles * TILE, self.num_blocks), np.float32)
        padded[: len(scales)] = scales
        grouped = padded.reshape(tiles, TILE, self.num_blocks).transpose(0, 2, 1)
        return np.ascontiguousarray(grouped).view(np.uint8)

    def rows(self, packed: NDArray[np.uint8], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """The dequantized rows [..., in] of the weight at `rows` [...]; of a mapped file only what
        they need is read."""
        flat = rows.reshape(-1)
        tile, output = flat // TILE, flat % TILE
        lines = packed[..., :-SCALES_BYTES].reshape(self.num_tiles, self.num_blocks, -1, TILE, 4)
        found = lines[tile, :, :, output]  # [rows, blocks, lines, 4]
        if self.bits == 4:
            found = np.stack([found & np.uint8(0xF), found >> np.uint8(4)], axis=-2)
        values = found.reshape(len(flat), self.num_blocks, self.block).astype(np.float32)
        scales = packed[..., -SCALES_BYTES:].view(np.float32)[tile, :, output]
        values = (values - np.float32(self.middle)) * scales[..., None]
        dequantized = values.reshape(len(flat), -1)[:, : self.in_features]
        return np.ascontiguousarray(dequantized).reshape(*rows.shape, self.in_features)
