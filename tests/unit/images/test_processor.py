"""preprocessor_config.json as transformers reads it, and by name what cannot be done."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from edgespec.errors import CheckpointError, EdgeSpecError, UnsupportedModel
from edgespec.images import ImageProcessor, read_processor
from edgespec.images.processor import parse_processor

# As published
QWEN2_5_VL: dict[str, Any] = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}
QWEN3_VL: dict[str, Any] = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


def parsed(**changes: object) -> ImageProcessor:
    raw = {key: value for key, value in (QWEN2_5_VL | changes).items() if value is not ...}
    return parse_processor(raw, "preprocessor_config.json")


def test_files_of_both_families_are_read() -> None:
    assert parse_processor(QWEN2_5_VL, "x") == ImageProcessor(min_pixels=3136, max_pixels=12845056)
    assert parse_processor(QWEN3_VL, "x") == ImageProcessor(
        patch_size=16,
        min_pixels=65536,
        max_pixels=16777216,
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
    )


@pytest.mark.parametrize("raw", [QWEN2_5_VL, QWEN3_VL], ids=["qwen2.5-vl", "qwen3-vl"])
def test_what_transformers_saves_is_read_as_what_it_loaded(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    limits = (raw["min_pixels"], raw["max_pixels"]) if "min_pixels" in raw else (65536, 16777216)
    given = {key: value for key, value in raw.items() if key not in ("min_pixels", "max_pixels")}
    given["size"] = dict(zip(("shortest_edge", "longest_edge"), limits, strict=True))
    Qwen2VLImageProcessorPil(**given).save_pretrained(tmp_path)
    assert read_processor(tmp_path) == parse_processor(raw, "x")


def test_missing_keys_have_transformers_defaults() -> None:
    found = parse_processor({"image_processor_type": "Qwen2VLImageProcessor"}, "x")
    theirs = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 1003520})
    assert found == ImageProcessor()
    for name in ("patch_size", "temporal_patch_size", "merge_size", "rescale_factor"):
        assert getattr(found, name) == getattr(theirs, name)
    for name in ("do_resize", "do_rescale", "do_normalize", "resample"):
        assert getattr(found, name) == getattr(theirs, name)
    assert (found.image_mean, found.image_std) == (theirs.image_mean, theirs.image_std)
    assert (found.min_pixels, found.max_pixels) == (3136, 1003520)


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ({"min_pixels": None, "max_pixels": None, "size": None}, (3136, 1003520)),
        ({"size": {"shortest_edge": 1, "longest_edge": 2}}, (3136, 12845056)),
        (
            {"min_pixels": None, "size": {"shortest_edge": 784, "longest_edge": 2}},
            (784, 12845056),
        ),
        ({"size": {"min_pixels": 3136, "max_pixels": 12845056}}, (3136, 12845056)),
        ({"min_pixels": None}, (3136, 12845056)),
    ],
)
def test_keys_of_older_files_win_over_their_size(
    changes: dict[str, object], limits: tuple[int, int]
) -> None:
    found = parsed(**changes)
    assert (found.min_pixels, found.max_pixels) == limits


def test_one_number_is_that_of_all_channels() -> None:
    assert parsed(image_mean=0.5, image_std=2).image_mean == (0.5, 0.5, 0.5)
    assert parsed(image_mean=0.5, image_std=2).image_std == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    "name", ["Qwen2VLImageProcessorPil", "Qwen2_5_VLImageProcessor", "Qwen3VLImageProcessorFast"]
)
def test_each_name_of_the_processor_is_known(name: str) -> None:
    assert parsed(image_processor_type=name) == parsed()
    assert parsed(image_processor_type=..., feature_extractor_type=name) == parsed()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"image_processor_type": "SiglipImageProcessor"}, "'SiglipImageProcessor'"),
        ({"do_center_crop": True}, "'do_center_crop' is true; this version has no such step"),
        ({"do_pad": True}, "'do_pad' is true"),
        ({"do_image_splitting": True}, "'do_image_splitting' is true"),
        ({"do_convert_rgb": False}, "'do_convert_rgb' is false"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        parsed(**changes)
    assert "preprocessor_config.json: " in caught.value.what
    assert said in caught.value.what


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"image_processor_type": ...}, "'image_processor_type' is missing"),
        ({"image_processor_type": 3}, "not a text"),
        ({"patch_size": 0}, "'patch_size' is 0, not a whole number from 1 to 256"),
        ({"patch_size": 14.0}, "'patch_size' is 14.0"),
        ({"patch_size": True}, "'patch_size' is True"),
        ({"merge_size": 9}, "'merge_size' is 9"),
        ({"temporal_patch_size": -2}, "'temporal_patch_size' is -2"),
        ({"min_pixels": 0}, "'min_pixels' is 0"),
        ({"max_pixels": 2**40}, "'max_pixels' is 1099511627776"),
        ({"min_pixels": 20_000_000}, "at least 20000000 pixels and at most 12845056"),
        ({"image_mean": [0.5, 0.5]}, "'image_mean' is [0.5, 0.5], not three numbers"),
        ({"image_mean": [0.5, 0.5, "a"]}, "not three numbers"),
        ({"image_mean": float("nan")}, "not three numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "not three numbers other than 0"),
        ({"image_std": [0.5, 1e300, 0.5]}, "not three numbers"),
        ({"rescale_factor": 0}, "'rescale_factor' is 0"),
        ({"rescale_factor": "1/255"}, "'rescale_factor' is '1/255'"),
        ({"resample": 6}, "'resample' is 6, not a filter of Pillow from 0 to 5"),
        ({"resample": "bicubic"}, "'resample' is 'bicubic'"),
        ({"do_resize": "yes"}, "'do_resize' is 'yes', not true or false"),
        ({"min_pixels": None, "size": {"longest_edge": 9}}, "'shortest_edge' is missing"),
        ({"max_pixels": None, "size": {"shortest_edge": 9}}, "'longest_edge' is missing"),
        ({"max_pixels": None, "size": {"height": 9, "width": 9}}, "'longest_edge' is missing"),
        ({"size": 448}, "'size' is 448, not an object"),
    ],
)
def test_wrong_values_are_refused_with_their_key(changes: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parsed(**changes)
    assert said in caught.value.what
    assert caught.value.remedy


def test_a_newer_directory_has_it_as_a_section(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": QWEN3_VL}))
    assert read_processor(tmp_path).patch_size == 16
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN2_5_VL))
    assert read_processor(tmp_path).patch_size == 14


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has no preprocessor_config.json"),
        ({"preprocessor_config.json": "["}, "is not JSON"),
        ({"preprocessor_config.json": "[]"}, "is not a JSON object"),
        ({"preprocessor_config.json": "[" * 10_000}, "is not JSON"),
        ({"processor_config.json": "{}"}, "'image_processor' is missing"),
        ({"preprocessor_config.json": " " * 2**21}, "cannot be read: it has more than"),
    ],
)
def test_a_missing_or_damaged_file_is_refused(
    tmp_path: Path, files: dict[str, str], said: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_processor(tmp_path)
    assert said in caught.value.what
    assert str(tmp_path) in caught.value.what


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "preprocessor_config.json")
    with pytest.raises(EdgeSpecError, match="a pipe"):
        read_processor(tmp_path)


def test_an_engines_limit_is_transformers_max_pixels() -> None:
    found = parsed().limited(256)
    assert (found.max_tokens, found.max_pixels, found.min_pixels) == (256, 256 * 28 * 28, 3136)
    larger = parsed().limited(10**6)
    assert (larger.max_pixels, larger.min_pixels) == (12845056, 3136)
    smaller = parse_processor(QWEN3_VL, "x").limited(32)
    assert (smaller.max_pixels, smaller.min_pixels) == (32 * 32 * 32, 32 * 32 * 32)
