"""Claims about Qwen3.5's configurations, held against the models that transformers builds from
them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from edgespec.config import DecoderConfig, ModelConfig
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.families import parse_model_config
from edgespec.rope import frequencies

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "max_position_embeddings": 256,
}
THETA = {"rope_theta": 1e6, "rope_type": "default"}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
}


def text(**changes: Any) -> dict[str, Any]:
    """A text config as published; a change to `...` leaves the key out."""
    raw = {
        **Qwen3_5TextConfig(**SIZES, rope_parameters=dict(THETA)).to_dict(),
        "architectures": ["Qwen3_5ForCausalLM"],
    }
    return {key: value for key, value in (raw | changes).items() if value is not ...}


def images(top: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    inner = {key: value for key, value in text(**changes).items() if key != "architectures"}
    raw = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "vision_config": VISION,
    }
    return {**raw, "text_config": inner, **(top or {})}


def shapes_of(decoder: DecoderConfig, kind: str) -> dict[str, tuple[int, ...]]:
    """What the parsed sizes say of a layer's projections."""
    hidden = decoder.hidden_size
    if kind == "linear_attention":
        assert decoder.linear is not None
        keys = decoder.linear.num_key_heads * decoder.linear.key_head_dim
        values = decoder.linear.num_value_heads * decoder.linear.value_head_dim
        return {
            "linear_attn.in_proj_qkv.weight": (2 * keys + values, hidden),
            "linear_attn.in_proj_z.weight": (values, hidden),
            "linear_attn.in_proj_a.weight": (decoder.linear.num_value_heads, hidden),
            "linear_attn.conv1d.weight": (2 * keys + values, 1, decoder.linear.conv_kernel),
            "linear_attn.norm.weight": (decoder.linear.value_head_dim,),
        }
    queries = decoder.num_heads * decoder.head_dim
    return {
        "self_attn.q_proj.weight": (2 * queries if decoder.attention.gated else queries, hidden),
        "self_attn.k_proj.weight": (decoder.num_kv_heads * decoder.head_dim, hidden),
        "self_attn.q_norm.weight": (decoder.head_dim,),
    }


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"full_attention_interval": 3},
        {"layer_types": ["full_attention"] + ["linear_attention"] * 7},
        {"attention_bias": True},
        {"linear_num_key_heads": 6, "linear_num_value_heads": 6},
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_text_config_describes_the_model_that_transformers_builds(
    nested: bool, extra: dict[str, Any]
) -> None:
    sizes = {**SIZES, **extra, "rope_parameters": dict(THETA)}
    with torch.device("meta"):
        model: Any
        if nested:
            whole = Qwen3_5Config(
                text_config=sizes, vision_config=dict(VISION), tie_word_embeddings=True
            )
            raw = {**whole.to_dict(), "architectures": ["Qwen3_5ForConditionalGeneration"]}
            model, stack = Qwen3_5ForConditionalGeneration(whole), "model.language_model"
        else:
            plain = Qwen3_5TextConfig(**sizes, tie_word_embeddings=True)
            raw = {**plain.to_dict(), "architectures": ["Qwen3_5ForCausalLM"]}
            model, stack = Qwen3_5ForCausalLM(plain), "model"
    found = parse_model_config(raw)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert found.decoder.norm.unit_offset
    assert found.tied_head
    assert len(found.decoder.layer_kinds) == 8
    assert {"full_attention", "linear_attention"} == set(found.decoder.layer_kinds)
    for i, kind in enumerate(found.decoder.layer_kinds):
        for name, shape in shapes_of(found.decoder, kind).items():
            assert shapes[f"{stack}.layers.{i}.{name}"] == shape
    assert (
        f"{stack}.layers.{found.decoder.layer_kinds.index('full_attention')}.self_attn.q_proj.bias"
        in shapes
    ) is (found.decoder.attention.qkv_bias)


@pytest.mark.parametrize(
    "rope",
    [
        THETA,
        THETA | {"partial_rotary_factor": 0.5},
        THETA
        | {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
        THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
)
def test_part_of_a_head_is_rotated_as_transformers_does(rope: dict[str, Any]) -> None:
    theirs = Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(**SIZES, rope_parameters=dict(rope)))
    ours = parse_model_config(text(rope_parameters=dict(rope))).decoder.rope
    np.testing.assert_allclose(frequencies(ours, np.arange(2)), theirs.inv_freq.numpy(), rtol=1e-6)
    assert ours.rotary_dim == 2 * len(theirs.inv_freq)
    assert ours.attention_factor == pytest.approx(theirs.attention_scaling)


def test_missing_keys_have_the_defaults_of_transformers() -> None:
    kept = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    raw = {key: SIZES[key] for key in (*kept, "num_key_value_heads", "max_position_embeddings")}
    theirs = Qwen3_5TextConfig(**raw)
    found = parse_model_config({**raw, "model_type": "qwen3_5_text", "rms_norm_eps": 1e-6}).decoder
    assert found.linear is not None
    assert (found.linear.num_key_heads, found.linear.num_value_heads) == (
        theirs.linear_num_key_heads,
        theirs.linear_num_value_heads,
    )
    assert (found.linear.key_head_dim, found.linear.value_head_dim, found.linear.conv_kernel) == (
        theirs.linear_key_head_dim,
        theirs.linear_value_head_dim,
        theirs.linear_conv_kernel_dim,
    )
    assert found.head_dim == theirs.head_dim
    assert list(found.layer_kinds) == theirs.layer_types
    assert (
        found.rope.rotary_dim == theirs.head_dim * theirs.rope_parameters["partial_rotary_factor"]
    )


def test_layers_of_full_attention_alone_need_no_delta_net() -> None:
    found = parse_model_config(text(layer_types=["full_attention"] * 8)).decoder
    assert (found.layer_kinds, found.linear) == (("full_attention",) * 8, None)


def test_what_stands_at_the_top_or_in_the_text_part_is_found() -> None:
    def read(top: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
        return parse_model_config(images(top, **changes))

    assert not read(
        {"tie_word_embeddings": False}, tie_word_embeddings=True
    ).tied_head  # transformers asks the top
    assert read(tie_word_embeddings=True).tied_head
    assert read(eos_token_id=7).eos_token_ids == (7,)
    assert read({"eos_token_id": [5, 6]}, eos_token_id=None).eos_token_ids == (5, 6)
    assert read({"dtype": "bfloat16"}, dtype=None).dtype == "bfloat16"
    assert read(dtype="float16").dtype == "float16"
    assert read(mtp_num_hidden_layers=1).mtp_layers == 1
    assert read().mtp_layers == 0


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type"),
        ({"num_experts": 8}, "num_experts"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 4}, "sliding_attention"),
        ({"layer_types": ["linear_attention"] * 8}, "no layer has full attention"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        (
            {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
            "Qwen3NextForCausalLM",
        ),
    ],
)
def test_relatives_are_refused_by_name(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedModel, match=name):
        parse_model_config(text(**changes))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"layer_types": ["full_attention"] * 7}, "layer_types"),
        ({"layer_types": ["full_attention"] * 7 + [3]}, "layer_types"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3"),
        ({"linear_key_head_dim": "8"}, "linear_key_head_dim"),
        ({"mtp_num_hidden_layers": -1}, "mtp_num_hidden_layers"),
        ({"mtp_num_hidden_layers": True}, "mtp_num_hidden_layers"),
        ({"rope_parameters": THETA | {"partial_rotary_factor": 0.2}}, "partial_rotary_factor 0.2"),
        ({"rope_parameters": THETA | {"partial_rotary_factor": 1.5}}, "partial_rotary_factor 1.5"),
        ({"model_type": "qwen3_5"}, "model_type"),
    ],
)
def test_impossible_values_are_named(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        parse_model_config(text(**changes))


def test_a_model_of_images_needs_its_text_part() -> None:
    with pytest.raises(CheckpointError, match="'text_config' is missing"):
        parse_model_config(images({"text_config": None}))
    with pytest.raises(CheckpointError, match="'hidden_size' is missing"):
        parse_model_config(images(hidden_size=...))
