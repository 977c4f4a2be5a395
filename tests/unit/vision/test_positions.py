"""Positions of prompts with images, against transformers' get_rope_index of both families."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from edgespec.runtime.text.prompt_value import ImageSlots, PromptValue
from edgespec.vision.positions import prompt_positions
from edgespec.vision.rows import ImageRows

IMAGE, MERGE = 99, 2
MODELS = {"qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}
# Numbers are counts of text tokens, pairs an image's patches: height and width
PROMPTS: dict[str, list[Any]] = {
    "text": [5],
    "first": [(4, 6), 3],
    "last": [4, (6, 4)],
    "alone": [(4, 4)],
    "one row of patches": [2, (2, 12), 3],
    "one column": [2, (12, 2), 3],
    "between turns": [7, (4, 6), 9, (10, 2), 1, (2, 2), 12],
    "the same twice": [3, (4, 6), 2, (4, 6), 2],
    "odd grids": [1, (6, 10), 1, (14, 6), 1],
}


def slots_of(parts: list[Any]) -> tuple[list[int], list[tuple[int, tuple[int, int, int]]]]:
    tokens: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            tokens += range(1, 1 + part)
        else:
            images.append((len(tokens), (1, *part)))
            tokens += [IMAGE] * (part[0] * part[1] // MERGE**2)
    return tokens, images


@pytest.mark.parametrize("parts", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("model_type", MODELS)
def test_positions_and_offset_are_those_of_transformers(model_type: str, parts: list[Any]) -> None:
    tokens, images = slots_of(parts)
    ids = torch.tensor([tokens])

    class Model:
        config = AutoConfig.for_model(model_type)
        get_vision_position_ids = MODELS[model_type].get_vision_position_ids

    grids = torch.tensor([grid for _, grid in images]) if images else None
    wanted, delta = MODELS[model_type].get_rope_index(
        Model(), ids, (ids == IMAGE).int(), image_grid_thw=grids
    )
    found = prompt_positions(len(tokens), images, MERGE)
    np.testing.assert_array_equal(found, wanted[:, 0].T.numpy())
    rows = [ImageRows(np.zeros((h * w // 4, 2)), {}, (t, h, w), "") for _, (t, h, w) in images]
    slots = [ImageSlots(start, own) for (start, _), own in zip(images, rows, strict=True)]
    assert PromptValue.with_images(tokens, slots, MERGE).position_offset == delta.item()
