"""Where the tokens of a prompt with images stand for the rotary embedding: M-RoPE (arXiv
2409.12191, section 2.1).

Knows counts of tokens and grids. Qwen2.5-VL and Qwen3-VL place images alike; only videos, which
are not read, would differ. Knows no token ids and no tables of rotations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.config.ropes import AXES
from edgespec.vision.grid import Grid

Ids = NDArray[np.int64]


def merged(grid: Grid, merge_size: int) -> Grid:
    """Returns the rows of an image along each axis: `merge_size` by `merge_size` patches make
    one."""
    time, height, width = grid
    return time, height // merge_size, width // merge_size


def prompt_positions(num_tokens: int, images: Sequence[tuple[int, Grid]], merge_size: int) -> Ids:
    """Returns the positions [num_tokens, 3] of a prompt: time, height and width.

    `images` are (first slot, grid) in ascending order. Text has the same number on all axes. An
    image counts from the number that text would have had there; what follows it goes on behind
    its longer side, so that an image takes fewer numbers than slots.
    """
    out, slot, position = np.empty((num_tokens, AXES), np.int64), 0, 0
    for start, grid in images:
        assert start >= slot
        out[slot:start] = position + np.arange(start - slot)[:, None]
        rows = merged(grid, merge_size)
        position, slot = position + start - slot, start + rows[0] * rows[1] * rows[2]
        out[start:slot] = position + np.indices(rows).reshape(AXES, -1).T
        position += max(rows[1:])
    assert slot <= num_tokens
    out[slot:] = position + np.arange(num_tokens - slot)[:, None]
    return out
