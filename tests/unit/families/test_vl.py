"""Claims about the text parts of Qwen2.5-VL and Qwen3-VL, held against the models that transformers
builds from the same files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.checkpoint.names import beside_text, expected_tensors, stored_names
from edgespec.config import ModelConfig
from edgespec.errors import CheckpointError
from edgespec.families import parse_model_config
from edgespec.rope import RopeTable, read_rope, rope_dict
from edgespec.safe_read.fields import BundleFields
from tests import toys

Make = Callable[..., Path]
TOYS: dict[str, tuple[Make, dict[str, Any]]] = {
    "qwen2.5-vl-published": (toys.make_qwen2_5_vl, {}),
    "qwen2.5-vl-nested": (toys.make_qwen2_5_vl, {"form": "nested"}),
    "qwen3-vl": (toys.make_qwen3_vl, {}),
}
LENGTH = 300


@pytest.fixture(params=TOYS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make, options = TOYS[request.param]
    return make(tmp_path, tokenizer=False, **options)


def read(path: Path, **changes: Any) -> ModelConfig:
    return parse_model_config(open_checkpoint(path).config | changes)


def test_tensors_are_the_decoder_s_and_the_encoder_s(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    wanted = stored_names(expected_tensors(detect(checkpoint)), checkpoint)  # type: ignore[arg-type]
    with safe_open(path / "model.safetensors", "numpy") as file:
        stored = set(file.keys())
    encoder = {name for name in stored if "visual." in name}
    assert set(wanted.values()) == stored - encoder
    assert set(beside_text(checkpoint)) == encoder


def test_sizes_are_those_of_transformers(path: Path) -> None:
    theirs, found = AutoConfig.from_pretrained(path).get_text_config(), read(path)
    decoder = found.decoder
    assert (decoder.num_layers, decoder.hidden_size) == (4, theirs.hidden_size)
    assert (decoder.num_heads, decoder.num_kv_heads) == (4, theirs.num_key_value_heads)
    assert decoder.rope.theta == theirs.rope_parameters["rope_theta"]
    assert decoder.norm.eps == theirs.rms_norm_eps
    assert found.max_position == theirs.max_position_embeddings
    assert decoder.windows == (None,)


def three_axes(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, LENGTH, (1, count, 3))


def test_rows_of_three_axes_are_those_of_transformers(path: Path) -> None:
    theirs = AutoConfig.from_pretrained(path).get_text_config()
    rope, positions = read(path).decoder.rope, three_axes(50)
    cos, sin = RopeTable.of(rope, LENGTH).rows(positions)
    ids = torch.from_numpy(positions).permute(2, 0, 1)
    pairs = cos.shape[-1]
    if rope.mrope_interleaved:
        wanted = [rows[..., :pairs] for rows in Qwen3VLTextRotaryEmbedding(theirs)(cos_like(), ids)]
    else:
        both = Qwen2_5_VLRotaryEmbedding(theirs)(cos_like(), ids)  # type: ignore[arg-type]
        wanted = [
            torch.cat(
                [
                    part[axis]
                    for axis, part in enumerate(
                        rows[..., :pairs].split(list(rope.mrope_section), dim=-1)
                    )
                ],
                -1,
            )
            for rows in both
        ]
    np.testing.assert_allclose(cos, wanted[0].numpy(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(sin, wanted[1].numpy(), rtol=0, atol=1e-6)


def cos_like() -> torch.Tensor:
    return torch.zeros(1)


def test_text_turns_by_the_very_bits_of_one_axis(path: Path) -> None:
    table, positions = RopeTable.of(read(path).decoder.rope, LENGTH), np.arange(LENGTH)[None]
    alike = np.repeat(positions[..., None], 3, axis=2)
    for one, three in zip(table.rows(positions), table.rows(alike), strict=True):
        np.testing.assert_array_equal(one, three)


def test_the_rope_survives_the_way_through_json(path: Path) -> None:
    rope = read(path).decoder.rope
    assert rope.mrope_section
    assert read_rope(BundleFields(rope_dict(rope), "config.json"), 128) == rope


def test_qwen2_5_vl_without_sections_is_refused(tmp_path: Path) -> None:
    path = toys.make_qwen2_5_vl(tmp_path, tokenizer=False)
    with pytest.raises(CheckpointError, match="mrope_section"):
        read(path, rope_scaling=None)
    with pytest.raises(CheckpointError, match=r"mrope_section.*8 in all"):
        read(path, rope_scaling={"type": "mrope", "mrope_section": [2, 3, 2]})
    with pytest.raises(CheckpointError, match="3 numbers of pairs"):
        read(path, rope_scaling={"type": "mrope", "mrope_section": [4, 4]})


def test_missing_keys_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    path = toys.make_qwen3_vl(tmp_path, tokenizer=False)
    text = open_checkpoint(path).config["text_config"]
    kept = {
        k: v for k, v in text.items() if k not in ("rms_norm_eps", "rope_theta", "rope_scaling")
    }
    kept |= {"head_dim": 128}
    theirs = AutoConfig.for_model("qwen3_vl", text_config=dict(kept)).get_text_config()
    found = read(path, text_config=kept).decoder
    assert found.norm.eps == theirs.rms_norm_eps
    assert found.rope.theta == theirs.rope_parameters["rope_theta"]
    assert found.rope.mrope_section == (24, 20, 20)


def test_interleaved_sections_give_time_what_is_left_over(tmp_path: Path) -> None:
    """transformers takes a section that is too large as far as there are pairs."""
    path = toys.make_qwen3_vl(tmp_path, tokenizer=False)
    text = open_checkpoint(path).config["text_config"]
    scaling = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    rope = read(path, text_config=text | {"rope_scaling": scaling}).decoder.rope
    assert (rope.rotary_dim, rope.mrope_section) == (32, (6, 5, 5))


def test_windows_of_qwen2_5_vl_are_those_of_late_layers(tmp_path: Path) -> None:
    path = toys.make_qwen2_5_vl(tmp_path, sliding_window=7, max_window_layers=2, tokenizer=False)
    theirs = AutoConfig.from_pretrained(path).get_text_config()
    windows = [attention.window for attention in read(path).decoder.attentions]
    assert windows == [None, None, 7, 7]
    assert [kind == "sliding_attention" for kind in theirs.layer_types] == [
        window is not None for window in windows
    ]
