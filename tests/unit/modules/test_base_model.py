"""What drafts read of a base, against transformers' own forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec.modules.base_model import hidden_states, load_base
from edgespec.vision.positions import prompt_positions
from tests import toys


@pytest.mark.parametrize(
    ("make", "how"),
    [(toys.make_qwen2_5_vl, {}), (toys.make_qwen3_vl, {}), (toys.make_qwen3_5, {"images": True})],
)
@torch.no_grad()
def test_states_behind_an_image_are_those_of_transformers(
    make: Callable[..., Path], how: dict[str, Any], tmp_path: Path
) -> None:
    base = load_base(make(tmp_path / "base", **how), "cpu", torch.float32, images=True)
    image, grid = base.config.image_token_id, (1, 4, 6)
    ids = torch.tensor([[3, 4, *[image] * 6, 7, 8]])
    patch = 3 * 2 * base.config.vision_config.patch_size**2
    given = {"pixel_values": torch.randn(24, patch), "image_grid_thw": torch.tensor([grid])}
    positions = torch.from_numpy(prompt_positions(ids.shape[1], [(2, grid)], 2))
    at = positions.T[:, None]
    aux, final = hidden_states(base, (2,), ids, position_ids=at, **given)
    kinds = (ids == image).int()
    out = base(input_ids=ids, mm_token_type_ids=kinds, output_hidden_states=True, **given)
    torch.testing.assert_close(aux, out.hidden_states[2])
    torch.testing.assert_close(final, out.hidden_states[-1])
