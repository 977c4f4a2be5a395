"""Patches are those of transformers' processor, bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from edgespec.errors import RequestError
from edgespec.images import ImageProcessor
from edgespec.images.preprocess import prepare, resized
from tests.unit.images.samples import attempted, picture

QWEN2_5_VL = ImageProcessor(max_pixels=12845056)
QWEN3_VL = ImageProcessor(
    patch_size=16,
    min_pixels=65536,
    max_pixels=16777216,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
)
SIZES = [(640, 480), (33, 57), (1, 1), (28, 28), (56, 84), (199, 1), (3, 400), (1001, 777)]


def theirs(image: Image.Image, processor: ImageProcessor) -> tuple[Any, list[int]]:
    """Pixel values and grid by transformers."""
    # With max_pixels as an argument it changes the default of all processors made later
    size = {"shortest_edge": processor.min_pixels, "longest_edge": processor.max_pixels}
    names = ("patch_size", "temporal_patch_size", "merge_size", "rescale_factor", "resample")
    steps = ("do_resize", "do_rescale", "do_normalize", "image_mean", "image_std")
    given = {name: getattr(processor, name) for name in (*names, *steps)}
    found = Qwen2VLImageProcessorPil(size=size, **given)([image], return_tensors="np")
    return found["pixel_values"], found["image_grid_thw"][0].tolist()


def assert_equal(image: Image.Image, processor: ImageProcessor) -> None:
    values, grid = theirs(image, processor)
    found = prepare(image, processor, "x")
    assert list(found.grid) == grid
    assert (found.pixel_values.dtype, found.pixel_values.shape) == (np.float32, values.shape)
    assert np.array_equal(found.pixel_values, values)  # bit for bit
    assert found.num_tokens == math.prod(grid) // processor.merge_size**2


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("processor", [QWEN2_5_VL, QWEN3_VL], ids=["qwen2.5-vl", "qwen3-vl"])
def test_patches_are_those_of_transformers(
    processor: ImageProcessor, size: tuple[int, int]
) -> None:
    assert_equal(picture(*size, seed=sum(size)), processor)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_pixels": 28 * 28 * 16},
        {"min_pixels": 28 * 28 * 2000},
        {"patch_size": 8, "merge_size": 1},
        {"patch_size": 4, "merge_size": 3},
        {"temporal_patch_size": 1},
        {"temporal_patch_size": 3},
        {"resample": 0},
        {"resample": 1},
        {"resample": 2},
        {"rescale_factor": 1 / 127.5},
        {"do_rescale": False},
        {"do_normalize": False},
        {"do_rescale": False, "do_normalize": False},
        {"image_mean": (0.1, 0.2, 0.3), "image_std": (-1.5, 3.0, 1e-3)},
    ],
    ids=str,
)
def test_patches_are_those_of_transformers_with_other_values(changes: dict[str, Any]) -> None:
    assert_equal(picture(150, 100), replace(QWEN2_5_VL, **changes))


def test_every_level_of_every_channel_is_transformers_own() -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    image = Image.fromarray(np.stack([levels, levels[::-1], levels.T], axis=-1))
    for processor in (QWEN2_5_VL, QWEN3_VL):
        small = replace(processor, patch_size=4, merge_size=2, min_pixels=64, max_pixels=256)
        assert_equal(image, small)


def test_a_model_that_does_not_resize_takes_whole_patches_alone() -> None:
    processor = replace(QWEN2_5_VL, do_resize=False)
    assert_equal(picture(56, 84), processor)
    with pytest.raises(RequestError, match="57 x 84 pixels, and this model does not resize"):
        prepare(picture(57, 84), processor, "x")


SIDES = st.integers(1, 5000)


@settings(deadline=None)
@given(SIDES, SIDES, st.sampled_from([28, 32, 8]), st.integers(1, 4000), st.integers(1, 4000))
def test_sizes_are_those_of_transformers(
    width: int, height: int, factor: int, least: int, more: int
) -> None:
    processor = ImageProcessor(
        patch_size=factor // 2, min_pixels=least * 100, max_pixels=(least + more) * 100
    )
    try:
        expected = smart_resize(
            height, width, factor, min_pixels=least * 100, max_pixels=(least + more) * 100
        )
    except ValueError:
        expected = None
    found = attempted(lambda: resized(width, height, processor, "x"))
    if isinstance(found, RequestError):
        assert expected is None
        assert "is more than 200 times" in found.what
    else:
        assert expected == found[::-1]


@pytest.mark.parametrize(("width", "height"), [(201, 1), (1, 201), (4001, 20)])
def test_an_image_that_is_too_long_is_refused(width: int, height: int) -> None:
    with pytest.raises(ValueError, match="aspect ratio"):
        smart_resize(height, width)
    with pytest.raises(RequestError, match="one side is more than 200 times the other") as caught:
        resized(width, height, QWEN2_5_VL, '"a.png"')
    assert caught.value.what.startswith(f'image "a.png" has {width} x {height} pixels')
    resized(200, 1, QWEN2_5_VL, "x")


# ---- limits of an engine


@pytest.mark.parametrize("size", [(640, 480), (1280, 960), (100, 100), (1001, 777)], ids=str)
@pytest.mark.parametrize("max_tokens", [4, 16, 100, 256])
def test_an_image_is_resized_to_fit_an_engine_as_transformers_would(
    size: tuple[int, int], max_tokens: int
) -> None:
    for processor in (QWEN2_5_VL, QWEN3_VL):
        limited = processor.limited(max_tokens)
        assert limited.max_pixels == min(max_tokens * processor.factor**2, processor.max_pixels)
        assert_equal(picture(*size), limited)
        assert prepare(picture(*size), limited, "x").num_tokens <= max_tokens


def test_an_image_that_cannot_be_made_to_fit_is_refused() -> None:
    limited = QWEN2_5_VL.limited(16)
    # A long image keeps one row of tokens, and transformers goes beyond its own max_pixels
    assert math.prod(smart_resize(20, 3000, max_pixels=limited.max_pixels)) > limited.max_pixels
    with pytest.raises(RequestError) as caught:
        prepare(picture(3000, 20), limited, '"a.png"')
    said = "has 3000 x 20 pixels and takes 48 tokens, and the engine takes 16 of an image."
    assert caught.value.what == f'image "a.png" {said}'
    assert "`max_image_tokens_per_image`" in caught.value.remedy


# ---- keys


def test_equal_keys_mean_equal_rows() -> None:
    image = picture(100, 80)
    first = prepare(image, QWEN2_5_VL, "a.png")
    again = prepare(image.copy(), QWEN2_5_VL, "b.png")
    assert first.key == again.key
    assert np.array_equal(first.pixel_values, again.pixel_values)
    assert (first.source, again.source) == ("a.png", "b.png")


def test_other_pixels_sizes_or_steps_have_other_keys() -> None:
    image = picture(112, 56)
    other = image.copy()
    other.putpixel((50, 20), (1, 2, 3))
    changes: list[dict[str, Any]] = [
        {"patch_size": 7, "merge_size": 4},
        {"temporal_patch_size": 1},
        {"image_mean": (0.5, 0.5, 0.5)},
        {"image_std": (0.5, 0.5, 0.5)},
        {"rescale_factor": 1 / 256},
        {"do_normalize": False},
        {"do_rescale": False},
    ]
    keys = {
        prepare(image, QWEN2_5_VL, "x").key,
        prepare(other, QWEN2_5_VL, "x").key,
        prepare(image.rotate(90, expand=True), QWEN2_5_VL, "x").key,
        *(prepare(image, replace(QWEN2_5_VL, **change), "x").key for change in changes),
    }
    assert len(keys) == 3 + len(changes)
    blank = Image.new("RGB", (112, 56)), Image.new("RGB", (56, 112))  # the same bytes
    assert len({prepare(image, QWEN2_5_VL, "x").key for image in blank}) == 2


def test_rows_of_an_image_cannot_be_changed() -> None:
    found = prepare(picture(56, 56), QWEN2_5_VL, "x")
    with pytest.raises(ValueError, match="read-only"):
        found.pixel_values[0, 0] = 1
