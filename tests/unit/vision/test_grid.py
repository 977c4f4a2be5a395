"""What a grid of patches means to an encoder, against transformers' own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.vision_utils import (
    get_vision_bilinear_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from edgespec.config import VisionConfig
from edgespec.vision.grid import Grid, encoder_inputs, learned_positions, places, windows

CONFIG = VisionConfig(
    num_layers=2,
    hidden_size=64,
    intermediate_size=90,
    num_heads=4,
    out_hidden_size=32,
    patch_size=14,
    activation="silu",
    norm="rms",
    norm_eps=1e-6,
    gated_mlp=True,
    full_attention_layers=(1,),
    window_size=112,
    position_grid=6,
)
GRIDS: list[Grid] = [(1, 2, 2), (1, 2, 26), (1, 4, 6), (1, 8, 8), (1, 10, 14), (1, 18, 16)]
some_grids = pytest.mark.parametrize("grid", GRIDS)


@some_grids
def test_patches_stand_block_by_block(grid: Grid) -> None:
    wanted = get_vision_position_ids(torch.tensor([grid]), CONFIG.merge_size)
    rows, columns = places(CONFIG, grid)
    assert np.stack([rows, columns], axis=1).tolist() == wanted.tolist()


@some_grids
def test_windows_hold_the_patches_that_transformers_puts_together(grid: Grid) -> None:
    index, ends = get_vision_window_index(
        torch.tensor([grid]), CONFIG.merge_size, CONFIG.window_size, CONFIG.patch_size
    )
    block = CONFIG.merge_size**2
    patches = (index[:, None] * block + torch.arange(block)).ravel().numpy()
    wanted = {frozenset(part.tolist()) for part in np.split(patches, ends[1:-1].tolist())}
    found = windows(CONFIG, grid, *places(CONFIG, grid))
    own = [
        frozenset(row[used].tolist())
        for row, used in zip(found["window_index"], found["window_mask"], strict=True)
    ]
    assert set(own) == wanted
    assert len(own) == len(wanted)


@some_grids
def test_each_patch_is_found_again_at_its_place(grid: Grid) -> None:
    found = windows(CONFIG, grid, *places(CONFIG, grid))
    place = found["window_place"]
    assert found["window_index"].ravel()[place].tolist() == list(range(len(place)))
    assert found["window_mask"].ravel()[place].all()
    assert np.count_nonzero(found["window_mask"]) == len(place)


@some_grids
def test_learned_positions_are_interpolated_as_transformers_does(grid: Grid) -> None:
    side = CONFIG.position_grid
    index, weight = get_vision_bilinear_indices_and_weights(
        torch.tensor([grid]), side, CONFIG.merge_size
    )
    table = torch.randn(side**2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = (table[index] * weight[:, :, None]).sum(0).numpy()
    found = learned_positions(CONFIG, grid, *places(CONFIG, grid))
    rows = table.numpy()[found["position_index"]] * found["position_weight"][:, :, None]
    np.testing.assert_allclose(rows.sum(0), wanted, atol=1e-5)


def test_pairs_turn_by_the_row_and_then_by_the_column() -> None:
    found = encoder_inputs(CONFIG, (1, 4, 6))
    rows, columns = places(CONFIG, (1, 4, 6))
    last = int(np.flatnonzero((rows == 3) & (columns == 5))[0])
    angles = np.arctan2(found["rope_sin"][last], found["rope_cos"][last])
    # head_dim 16: four pairs an axis, whose frequencies are 10000 ** -(i / 4)
    turned = np.concatenate([3 * 10.0 ** -np.arange(4), 5 * 10.0 ** -np.arange(4)])
    np.testing.assert_allclose(angles, np.arctan2(np.sin(turned), np.cos(turned)), atol=1e-6)
