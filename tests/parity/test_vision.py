"""Image encoders, from checkpoint through export and build to rows, against transformers' own
encoders in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edgespec.backends.build import build
from edgespec.config import VisionConfig
from edgespec.contract import Limits
from edgespec.errors import EnvironmentProblem
from edgespec.runtime.vision.encoder import VisionEncoder
from edgespec.vision.contract import PIXELS
from edgespec.vision.grid import Grid, encoder_inputs, num_patches
from edgespec.vision.rows import ImageRows
from tests import made, shared
from tests.toys.vision import write_vlm

Floats = NDArray[np.float32]

RTOL = 1e-4  # of the largest value; about 1e-6 is usual
LIMITS = Limits(min_image_tokens=1)
# Pixels as height x width, of patches of 14: one block, one row, windows that are cut off at the
# right, at the bottom, at both, and none at all
GRIDS: list[Grid] = [(1, 2, 2), (1, 2, 22), (1, 4, 6), (1, 10, 14), (1, 14, 4), (1, 8, 8)]


@dataclass(frozen=True)
class Made:
    """The pixels of an image under a name, as an encoder takes them."""

    pixel_values: Floats
    grid: Grid
    key: str
    source: str = "image 1"


def image(config: VisionConfig, grid: Grid, seed: int = 0) -> Made:
    rng = np.random.default_rng(seed)
    pixels = rng.standard_normal((num_patches(grid), config.patch_width), np.float32)
    return Made(pixels, grid, f"{seed}:{grid}")


@cache
def both(model_type: str, **vision: Any) -> tuple[Any, Path]:
    """transformers' encoder, and the directory of our engine of the same weights."""
    from transformers import AutoModelForImageTextToText

    checkpoint = shared.made_once(
        ("vlm", model_type, vision), lambda path: write_vlm(path, model_type, **vision)
    )
    model = AutoModelForImageTextToText.from_pretrained(checkpoint).eval()
    exported = made.exported(checkpoint)
    engines = shared.made_once(
        ("visual", model_type, vision),
        lambda path: build(exported / "visual", path, LIMITS),
    )
    return model.model.visual, engines


def reference(visual: Any, *images: Made) -> tuple[Floats, Floats | None]:
    """What transformers makes of several images in one call, deepstack features side by side."""
    pixels = torch.from_numpy(np.concatenate([one.pixel_values for one in images]))
    with torch.no_grad():
        found = visual(pixels, grid_thw=torch.tensor([one.grid for one in images]))
    features = getattr(found, "deepstack_features", None)
    deepstack = torch.cat(features, dim=-1).numpy() if features else None
    return found.pooler_output.numpy(), deepstack


def assert_close(found: Floats | None, wanted: Floats | None) -> None:
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=0, atol=RTOL * float(np.abs(wanted).max()))


def opened(model_type: str, **vision: Any) -> tuple[Any, VisionEncoder, VisionConfig]:
    visual, engines = both(model_type, **vision)
    encoder = VisionEncoder.open(engines)
    return visual, encoder, encoder.config.component.vision


families = pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])


@pytest.mark.parametrize("grid", GRIDS)
@families
def test_rows_of_an_image_of_any_shape_are_transformers(model_type: str, grid: Grid) -> None:
    visual, encoder, config = opened(model_type)
    with encoder:
        one = image(config, grid)
        rows = encoder.encode(one)
        wanted, deepstack = reference(visual, one)
        assert_close(rows.embeds, wanted)
        assert_close(rows.extras.get("deepstack_embeds"), deepstack)
        assert rows.grid == grid


@families
def test_images_one_by_one_are_transformers_joint_call(model_type: str) -> None:
    visual, encoder, config = opened(model_type)
    images = [image(config, grid, seed) for seed, grid in enumerate(GRIDS)]
    with encoder:
        rows = [encoder.encode(one) for one in images]
    wanted, deepstack = reference(visual, *images)
    assert_close(np.concatenate([one.embeds for one in rows]), wanted)
    if deepstack is not None:
        parts = [one.extras["deepstack_embeds"] for one in rows]
        assert_close(np.concatenate(parts), deepstack)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2_5_vl", {"fullatt_block_indexes": []}),
    ("qwen2_5_vl", {"fullatt_block_indexes": [0, 1, 2, 3]}),
    ("qwen2_5_vl", {"window_size": 112, "num_heads": 2, "patch_size": 7}),
    ("qwen3_vl", {"deepstack_visual_indexes": []}),
    ("qwen3_vl", {"deepstack_visual_indexes": [0, 1, 3], "hidden_act": "silu"}),
    ("qwen3_vl", {"num_position_embeddings": 4, "spatial_merge_size": 1}),
]


@pytest.mark.parametrize(("model_type", "vision"), VARIANTS)
def test_values_say_how_encoders_differ(model_type: str, vision: dict[str, Any]) -> None:
    # keys of a cache, which lists are not
    frozen = {key: tuple(v) if isinstance(v, list) else v for key, v in vision.items()}
    visual, encoder, config = opened(model_type, **frozen)
    with encoder:
        one = image(config, (1, 6, 10))
        rows = encoder.encode(one)
        wanted, deepstack = reference(visual, one)
        assert_close(rows.embeds, wanted)
        assert_close(rows.extras.get("deepstack_embeds"), deepstack)


@pytest.fixture
def in_windows_alone() -> Iterator[tuple[VisionEncoder, VisionConfig]]:
    """An encoder whose layers have windows of 4 x 4 patches, all of them."""
    _, encoder, config = opened("qwen2_5_vl", fullatt_block_indexes=())
    with encoder:
        yield encoder, config


def changed_rows(before: ImageRows, after: ImageRows) -> list[int]:
    return np.flatnonzero((before.embeds != after.embeds).any(axis=1)).tolist()


def test_a_patch_changes_the_rows_of_its_window_alone(
    in_windows_alone: tuple[VisionEncoder, VisionConfig],
) -> None:
    encoder, config = in_windows_alone
    one = image(config, (1, 6, 6))  # rows 3 x 3, in windows of 2 x 2
    before = encoder.encode(one)
    other = one.pixel_values.copy()
    other[3] += 1  # of the first block
    assert changed_rows(before, encoder.encode(Made(other, one.grid, "other"))) == [0, 1, 3, 4]
    other = one.pixel_values.copy()
    other[-1] += 1  # of the last block, alone in a window that is cut off at both edges
    assert changed_rows(before, encoder.encode(Made(other, one.grid, "other"))) == [8]


def test_a_nan_at_the_unused_places_of_windows_changes_nothing(
    in_windows_alone: tuple[VisionEncoder, VisionConfig],
) -> None:
    encoder, config = in_windows_alone
    one = image(config, (1, 6, 6))
    before = encoder.encode(one)
    other = one.pixel_values.copy()
    other[0] = np.nan  # unused places hold the number of patch 0
    after = encoder.encode(Made(other, one.grid, "other"))
    assert np.isnan(after.embeds[[0, 1, 3, 4]]).all()
    assert (after.embeds[[2, 5, 6, 7, 8]] == before.embeds[[2, 5, 6, 7, 8]]).all()


def test_the_same_image_has_the_same_bits_whatever_came_before() -> None:
    _, encoder, config = opened("qwen3_vl")
    one = image(config, (1, 4, 6))
    with encoder:
        before = encoder.encode(one)
        encoder.encode(image(config, (1, 10, 14), seed=1))
        after = encoder.encode(one)
    assert before.embeds.tobytes() == after.embeds.tobytes()
    assert before.key == after.key


def test_a_key_is_that_of_the_image_and_of_the_engine() -> None:
    _, windows, config = opened("qwen2_5_vl")
    _, others, _ = opened("qwen2_5_vl", fullatt_block_indexes=())
    with windows, others:
        one = image(config, (1, 4, 6))
        keys = {encoder.encode(one).key for encoder in (windows, others)}
        keys.add(windows.encode(image(config, (1, 4, 6), seed=1)).key)
    assert len(keys) == 3


def test_what_fails_inside_of_the_engine_is_an_error_of_ours() -> None:
    """ONNX Runtime's own errors are no RuntimeErrors."""
    _, encoder, config = opened("qwen3_vl")
    one = image(config, (1, 4, 6))
    with encoder:
        assert encoder.runner is not None
        feeds = {PIXELS: one.pixel_values, **encoder_inputs(config, one.grid)}
        feeds["position_index"] = feeds["position_index"] + 10**6  # beyond the table
        with pytest.raises(EnvironmentProblem, match="in the encoding of 24 patches") as caught:
            encoder.runner.run(feeds)
        assert not isinstance(caught.value.__cause__, RuntimeError)
        assert "\n" not in caught.value.what
        assert len(encoder.encode(one)) == 6  # the next image is not harmed
