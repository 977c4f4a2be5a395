"""Claims about Phi-3's configurations, held against the models that transformers builds from
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from edgespec.checkpoint.files import open_checkpoint
from edgespec.checkpoint.names import expected_tensors
from edgespec.config import RopeConfig
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.families import parse_model_config
from edgespec.rope import RopeTable, read_rope, rope_dict
from edgespec.safe_read.fields import BundleFields
from tests import toys

ORIGINAL = 64


def raw_of(path: Path, **changes: Any) -> dict[str, Any]:
    return open_checkpoint(path).config | changes


@pytest.fixture
def phi4(tmp_path: Path) -> Path:
    return toys.make_phi3(
        tmp_path, tied=True, partial_rotary=0.75, longrope=ORIGINAL, tokenizer=False
    )


def rope_of(raw: dict[str, Any]) -> RopeConfig:
    return parse_model_config(raw).decoder.rope


@pytest.mark.parametrize("capacity", [ORIGINAL, ORIGINAL + 1])
def test_the_capacity_chooses_the_factors_that_transformers_takes_for_the_length(
    phi4: Path, capacity: int
) -> None:
    theirs = Phi3RotaryEmbedding(Phi3Config(**raw_of(phi4)))
    cos, sin = theirs(torch.zeros(1), torch.arange(capacity)[None])
    table = RopeTable.of(rope_of(raw_of(phi4)), capacity)
    pairs = table.cos.shape[1]
    assert pairs == 6  # three quarters of 16
    np.testing.assert_allclose(table.cos, cos[0, :, :pairs].numpy(), atol=1e-5)
    np.testing.assert_allclose(table.sin, sin[0, :, :pairs].numpy(), atol=1e-5)


def test_the_two_sets_of_factors_differ(phi4: Path) -> None:
    rope = rope_of(raw_of(phi4))
    short, long = (RopeTable.of(rope, ORIGINAL + extra).cos[:ORIGINAL] for extra in (0, 1))
    assert np.abs(short - long).max() > 0.1
    np.testing.assert_array_equal(RopeTable.golden(rope, ORIGINAL + 1).cos[:ORIGINAL], short)


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_longrope_has_three_names(phi4: Path, name: str) -> None:
    raw = raw_of(phi4)
    renamed = raw | {"rope_scaling": raw["rope_scaling"] | {"type": name}}
    assert rope_of(renamed) == rope_of(raw)
    assert rope_of(raw).kind == "longrope"


def test_longrope_survives_the_way_through_json(phi4: Path) -> None:
    rope = rope_of(raw_of(phi4))
    fields = BundleFields(rope_dict(rope), "config.json")
    assert read_rope(fields, head_dim=2 * rope.rotary_dim) == rope
    assert "short_factor" not in rope_dict(RopeConfig(1e4, 16))


@pytest.mark.parametrize(
    "options", [{}, {"tied": True, "longrope": ORIGINAL}, {"kv_heads": 1, "sliding_window": 5}]
)
def test_expected_tensors_are_those_of_the_model_in_transformers(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    path = toys.make_phi3(tmp_path, layers=2, tokenizer=False, **options)
    with safe_open(path / "model.safetensors", "numpy") as file:
        stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert expected_tensors(parse_model_config(raw_of(path))) == stored


def test_a_missing_window_means_none(phi4: Path) -> None:
    raw = raw_of(phi4)
    del raw["sliding_window"]
    assert parse_model_config(raw).decoder.windows == (None,)
    assert parse_model_config(raw | {"sliding_window": 9}).decoder.windows == (9,)


def test_missing_keys_have_the_defaults_of_transformers(phi4: Path) -> None:
    raw = raw_of(phi4)
    for key in ("rope_scaling", "rope_theta", "partial_rotary_factor", "num_key_value_heads"):
        del raw[key]
    found, theirs = parse_model_config(raw).decoder, Phi3Config(**raw)
    assert found.num_kv_heads == theirs.num_key_value_heads
    assert found.rope == RopeConfig(theirs.rope_parameters["rope_theta"], 16)


def test_factors_of_another_count_and_scales_of_their_own_are_refused(phi4: Path) -> None:
    raw = raw_of(phi4)
    rope = raw["rope_scaling"]
    with pytest.raises(CheckpointError, match="'long_factor' is"):
        parse_model_config(raw | {"rope_scaling": rope | {"long_factor": [1.0]}})
    with pytest.raises(CheckpointError, match="short_factor"):
        parse_model_config(raw | {"rope_scaling": rope | {"short_factor": [0] * 6}})
    with pytest.raises(UnsupportedModel, match="short_mscale"):
        parse_model_config(raw | {"rope_scaling": rope | {"short_mscale": 1.2}})
