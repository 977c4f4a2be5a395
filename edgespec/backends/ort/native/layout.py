"""Packed weights of LowBitMatMul: their layout (matmul.h has the same in C++), and its way back.

Knows arrays. Knows no graph and no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LINE = 64  # bytes
TILE = 16  # outputs of a line
TILES = 4  # of a panel
PANEL = TILE * TILES
SCALES_BYTES = 4 * PANEL
BLOCK_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class WeightLayout:
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
    def num_panels(self) -> int:
        """The number of panels of outputs; the last one is filled up with zeros."""
        return -(-self.out_features // PANEL)

    @property
    def middle(self) -> int:
        """The unsigned value that stands for zero."""
        return 8 if self.bits == 4 else 128

    @property
    def block_bytes(self) -> int:
        """The size of a block of a panel: its values, then its scales."""
        values: int = PANEL * self.block * self.bits // 8
        return values + SCALES_BYTES

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a packed weight in bytes: [panels, blocks, bytes of a block]."""
        return self.num_panels, self.num_blocks, self.block_bytes

    @property
    def num_bytes(self) -> int:
        """The size of a packed weight in bytes."""
        return int(np.prod(self.shape))

    def pack(self, values: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Packed panels of values [out, in] and scales [out, blocks]."""
        assert values.shape == (self.out_features, self.in_features)
        assert scales.shape == (self.out_features, self.num_blocks)
        packed = np.empty(self.shape, np.uint8)
        many = max(1, 2**22 // (PANEL * self.in_features))  # panels at a time
        for first in range(0, self.num_panels, many):
            rows = slice(first * PANEL, (first + many) * PANEL)
            panels = packed[first : first + many]
            panels[..., :-SCALES_BYTES] = self.lines(values[rows])
            panels[..., -SCALES_BYTES:] = self.scales_of_panels(scales[rows])
        return packed

    def lines(self, values: NDArray[np.int8]) -> NDArray[np.uint8]:
        """The lines [panels, blocks, bytes] of values [out, in]."""
        panels, width = -(-len(values) // PANEL), 32 // self.bits  # inputs of a line
        unsigned = np.full((panels * PANEL, self.num_blocks * self.block), self.middle, np.uint8)
        unsigned[: len(values), : self.in_features] = values.astype(np.int16) + self.middle
        split = unsigned.reshape(panels, PANEL, self.num_blocks, self.block // width, -1, 4)
        four = split[..., 0, :]
        if self.bits == 4:
            four = four | (split[..., 1, :] << np.uint8(4))
        return four.transpose(0, 2, 3, 1, 4).reshape(panels, self.num_blocks, -1)

    def scales_of_panels(self, scales: NDArray[np.float32]) -> NDArray[np.uint8]:
        """The scales [panels, blocks, bytes] of scales [out, blocks]."""
        panels = -(-len(scales) // PANEL)
        padded = np.zeros((panels * PANEL, self.num_blocks), np.float32)
        padded[: len(scales)] = scales
        grouped = padded.reshape(panels, PANEL, self.num_blocks).transpose(0, 2, 1)
        return np.ascontiguousarray(grouped).view(np.uint8)

    def rows(self, packed: NDArray[np.uint8], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """The dequantized rows [..., in] of the weight at `rows` [...]; of a mapped file only what
        they need is read."""
        flat = rows.reshape(-1)
        panel, output = flat // PANEL, flat % PANEL
        lines = packed[..., :-SCALES_BYTES].reshape(*self.shape[:2], -1, PANEL, 4)
        codes = lines[panel, :, :, output]  # [rows, blocks, lines, 4]
        if self.bits == 4:
            codes = np.stack([codes & np.uint8(0xF), codes >> np.uint8(4)], axis=-2)
        values = codes.reshape(len(flat), self.num_blocks, self.block).astype(np.float32)
        scales = packed[..., -SCALES_BYTES:].view(np.float32)[panel, :, output]
        values = (values - np.float32(self.middle)) * scales[..., None]
        dequantized = values.reshape(len(flat), -1)[:, : self.in_features]
        return np.ascontiguousarray(dequantized).reshape(*rows.shape, self.in_features)
