"""What a grid of patches means to an encoder: the arrays that its graph reads beside the pixels.

Patches stand in the processor's order: block by block of `merge_size` by `merge_size` patches, row
by row of blocks and inside of them. Knows sizes and numpy. Knows no image.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.config import VisionConfig

Grid = tuple[int, int, int]  # frames, rows and columns of patches
Arrays = dict[str, NDArray[Any]]
Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def encoder_inputs(config: VisionConfig, grid: Grid) -> Arrays:
    """The inputs of `vision_contract` but the pixels, by name, for one image of this grid."""
    rows, columns = places(config, grid)
    cos, sin = rope_rows(config, rows, columns)
    inputs: Arrays = {"rope_cos": cos, "rope_sin": sin}
    if config.has_windows:
        inputs |= windows(config, grid, rows, columns)
    if config.position_grid:
        inputs |= learned_positions(config, grid, rows, columns)
    return inputs


def num_patches(grid: Grid) -> int:
    """P of the contract."""
    frames, height, width = grid
    return frames * height * width


def num_tokens(config: VisionConfig, grid: Grid) -> int:
    """T of the contract: the rows that the language model reads of one image."""
    return num_patches(grid) // config.merge_size**2


def places(config: VisionConfig, grid: Grid) -> tuple[Ids, Ids]:
    """The row and the column [P] of each patch of one frame."""
    frames, height, width = grid
    side = config.merge_size
    assert frames == 1, grid
    assert not height % side, grid
    assert not width % side, grid
    index: Ids = np.arange(height * width, dtype=np.int64).reshape(
        height // side, side, width // side, side
    )
    flat = index.transpose(0, 2, 1, 3).ravel()
    return flat // width, flat % width


def rope_rows(config: VisionConfig, rows: Ids, columns: Ids) -> tuple[Floats, Floats]:
    """cos and sin [P, head_dim/2]: the first half of the pairs turns by the row of a patch, the
    second by its column (2D RoPE, arXiv 2409.12191)."""
    pairs = config.head_dim // 4  # of an axis
    frequencies = config.rope_theta ** -(np.arange(pairs) / pairs)
    angles = np.concatenate([rows[:, None] * frequencies, columns[:, None] * frequencies], axis=1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def windows(config: VisionConfig, grid: Grid, rows: Ids, columns: Ids) -> Arrays:
    """Which patch stands at each place of each window, which places have one, and where each patch
    stands. Windows at the right and at the lower edge may be cut off; their last places are
    unused."""
    side, (_, height, width) = config.window_side, grid
    across, size = -(-width // side), side**2
    count = across * -(-height // side)
    owner = rows // side * across + columns // side
    order = np.argsort(owner, kind="stable")
    starts = np.cumsum(np.bincount(owner, minlength=count)) - np.bincount(owner, minlength=count)
    place = np.empty(len(owner), np.int64)
    place[order] = owner[order] * size + np.arange(len(owner)) - starts[owner[order]]
    index, mask = np.zeros(count * size, np.int64), np.zeros(count * size, bool)
    index[place], mask[place] = np.arange(len(owner)), True
    return {
        "window_index": index.reshape(count, size),
        "window_mask": mask.reshape(count, size),
        "window_place": place,
    }


def learned_positions(config: VisionConfig, grid: Grid, rows: Ids, columns: Ids) -> Arrays:
    """The four learned positions around each patch and their weights [4, P]: the corners of the
    image lie on those of the table, and what is between is interpolated bilinearly."""
    side, (_, height, width) = config.position_grid, grid
    y, x = at_table(height, side)[rows], at_table(width, side)[columns]
    top, left = y.astype(np.int64), x.astype(np.int64)
    bottom, right = np.minimum(top + 1, side - 1), np.minimum(left + 1, side - 1)
    below, beside = y - top, x - left
    return {
        "position_index": np.stack(
            [
                top * side + left,
                top * side + right,
                bottom * side + left,
                bottom * side + right,
            ]
        ),
        "position_weight": np.stack(
            [
                (1 - below) * (1 - beside),
                (1 - below) * beside,
                below * (1 - beside),
                below * beside,
            ]
        ).astype(np.float32),
    }


def at_table(count: int, side: int) -> NDArray[np.float64]:
    """Where each of `count` patches of a row or column stands on a side of the table."""
    return np.linspace(0, side - 1, count)
