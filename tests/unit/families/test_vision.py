"""Claims about image encoders' configurations, held against transformers' defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from edgespec.config import ImageTokens, VisionConfig
from edgespec.config.fields import Fields
from edgespec.errors import CheckpointError, EdgeSpecError, UnsupportedModel
from edgespec.families import parse_model_config
from edgespec.families.base import Family
from edgespec.families.table import FAMILIES
from edgespec.families.vision import image_tokens, vision_of

ROWS = {family.model_type: family for family in FAMILIES.values() if family.vision is not None}


def read(model_type: str, **changes: Any) -> VisionConfig:
    read_vision = ROWS[model_type].vision
    assert read_vision is not None
    return read_vision(Fields(changes, "config.json (vision_config)"))


@pytest.mark.parametrize("model_type", list(ROWS))
def test_a_file_that_says_nothing_means_what_transformers_takes_it_for(model_type: str) -> None:
    found, usual = read(model_type), AutoConfig.for_model(model_type).vision_config
    assert found.num_layers == usual.depth
    assert found.hidden_size == usual.hidden_size
    assert found.intermediate_size == usual.intermediate_size
    assert found.num_heads == usual.num_heads
    assert found.out_hidden_size == usual.out_hidden_size
    assert found.patch_size == usual.patch_size
    assert found.merge_size == usual.spatial_merge_size
    assert found.temporal_patch_size == usual.temporal_patch_size
    assert found.in_channels == usual.in_channels
    if model_type == "qwen2_5_vl":
        assert found.window_size == usual.window_size
        assert found.full_attention_layers == tuple(usual.fullatt_block_indexes)
        assert usual.hidden_act == "silu" == found.activation
    else:
        assert found.position_grid**2 == usual.num_position_embeddings
        assert found.deepstack_layers == tuple(getattr(usual, "deepstack_visual_indexes", ()))
        assert (usual.hidden_act, found.activation) == ("gelu_pytorch_tanh", "gelu_tanh")
        assert not found.has_windows


def test_a_window_is_whole_rows_of_the_language_model() -> None:
    assert read("qwen2_5_vl").window_side == 8
    # transformers rounds a window down to blocks of merged patches
    assert read("qwen2_5_vl", window_size=100).window_side == 6


WRONG: list[tuple[str, dict[str, Any], type[EdgeSpecError], str]] = [
    ("qwen2_5_vl", {"depth": "32"}, CheckpointError, "'depth'"),
    ("qwen2_5_vl", {"depth": 0}, CheckpointError, "'depth'"),
    ("qwen2_5_vl", {"hidden_size": 1281}, CheckpointError, "not a multiple of num_heads"),
    ("qwen2_5_vl", {"hidden_size": 96, "num_heads": 16}, CheckpointError, "heads of 6 elements"),
    ("qwen2_5_vl", {"hidden_act": "relu"}, UnsupportedModel, "'relu'"),
    ("qwen2_5_vl", {"window_size": 14}, CheckpointError, "at least 28 pixels"),
    ("qwen2_5_vl", {"window_size": 1120}, CheckpointError, "at most 896 pixels"),
    ("qwen2_5_vl", {"fullatt_block_indexes": [7, 32]}, CheckpointError, "fullatt_block_indexes"),
    ("qwen2_5_vl", {"fullatt_block_indexes": 7}, CheckpointError, "fullatt_block_indexes"),
    ("qwen2_5_vl", {"patch_size": [14, 14]}, CheckpointError, "'patch_size'"),
    ("qwen3_vl", {"num_position_embeddings": 2300}, CheckpointError, "a square number"),
    ("qwen3_vl", {"deepstack_visual_indexes": [16, 8]}, CheckpointError, "ascending"),
    ("qwen3_vl", {"deepstack_visual_indexes": [8, 8]}, CheckpointError, "ascending"),
]


@pytest.mark.parametrize(("model_type", "changes", "error", "said"), WRONG)
def test_what_no_encoder_has_is_refused_by_its_key(
    model_type: str, changes: dict[str, Any], error: type[EdgeSpecError], said: str
) -> None:
    with pytest.raises(error, match=said):
        read(model_type, **changes)


def test_rows_must_be_as_wide_as_those_of_the_language_model() -> None:
    family = ROWS["qwen3_vl"]
    top = Fields({"vision_config": {"out_hidden_size": 2048}}, "config.json")
    assert vision_of(top, family, 2048) is not None
    with pytest.raises(CheckpointError, match="out_hidden_size is 2048"):
        vision_of(top, family, 2560)


def test_a_file_without_the_section_is_that_of_a_text_model() -> None:
    for family in ROWS.values():
        assert vision_of(Fields({}, "config.json"), family, 2560) is None


def test_a_family_without_an_encoder_has_none() -> None:
    family: Family = FAMILIES["Qwen3ForCausalLM"]
    assert vision_of(Fields({"vision_config": {}}, "config.json"), family, 64) is None


@pytest.mark.parametrize("model_type", list(ROWS))
def test_token_ids_that_files_leave_out_are_those_of_the_family(model_type: str) -> None:
    usual, family = AutoConfig.for_model(model_type), ROWS[model_type]
    assert image_tokens(Fields({}, "config.json"), family) == ImageTokens(
        image=usual.image_token_id,
        video=usual.video_token_id,
        vision_start=usual.vision_start_token_id,
        vision_end=usual.vision_end_token_id,
    )
    assert image_tokens(Fields({"image_token_id": 7}, "config.json"), family).image == 7
    with pytest.raises(CheckpointError, match="image_token_id"):
        image_tokens(Fields({"image_token_id": [7, 8]}, "config.json"), family)


def test_token_ids_of_a_family_that_has_no_usual_ones_must_be_there() -> None:
    family = replace(ROWS["qwen3_vl"], image_tokens=None)
    ids = {f"{name}_token_id": 1 for name in ("image", "video", "vision_start", "vision_end")}
    assert image_tokens(Fields(ids, "config.json"), family) == ImageTokens(1, 1, 1, 1)
    with pytest.raises(CheckpointError, match="video_token_id"):
        image_tokens(Fields(ids | {"video_token_id": None}, "config.json"), family)


def test_a_model_has_its_encoder_and_its_tokens() -> None:
    raw = AutoConfig.for_model("qwen3_vl", text_config={"hidden_size": 3584}).to_dict()
    model = parse_model_config(raw | {"architectures": ["Qwen3VLForConditionalGeneration"]})
    assert model.vision == read("qwen3_vl")
    assert model.image_tokens is not None
