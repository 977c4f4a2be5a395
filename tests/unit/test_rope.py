"""Rotary rows against transformers' own functions and module, for every kind that this version
knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from edgespec.config import RopeConfig
from edgespec.families import parse_model_config
from edgespec.rope import RopeTable, frequencies

LENGTH = 200  # positions that are compared
FREQUENCY_TOLERANCE = 2e-6  # relative: a few roundings in float32
ROW_TOLERANCE = 1e-4  # absolute: the same roundings, times the position

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "default-large-theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "linear-fraction": {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic-large": {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 500.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 64},
    "llama3-published": LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 500000.0},
    "llama3-factor-32": LLAMA3
    | {"factor": 32.0, "high_freq_factor": 9.5, "original_max_position_embeddings": 128},
    "yarn": YARN,
    "yarn-betas": YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    "yarn-not-truncated": YARN | {"truncate": False, "beta_fast": 5.0},
    "yarn-mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.4},
    "yarn-attention-factor": YARN | {"attention_factor": 0.7},
    "yarn-large-theta": YARN
    | {"factor": 32.0, "rope_theta": 1e6, "original_max_position_embeddings": 4096},
    "yarn-empty-ramp": YARN | {"original_max_position_embeddings": 6},  # low and high are both 0
}
MAX_POSITION = {"dynamic": 48, "dynamic-large": 48}  # where the scaling sets in


def config_of(name: str, head_dim: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "vocab_size": 256,
        "max_position_embeddings": MAX_POSITION.get(name, 512),
        "rope_parameters": {"rope_theta": 10000.0} | ROPES[name],
    }


@pytest.fixture(params=[16, 128], ids="head-dim-{}".format)
def head_dim(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=ROPES)
def raw(request: pytest.FixtureRequest, head_dim: int) -> dict[str, Any]:
    return config_of(request.param, head_dim)


@pytest.fixture
def rope(raw: dict[str, Any]) -> RopeConfig:
    return parse_model_config(raw).decoder.rope


def test_frequencies_and_attention_factor_are_those_of_transformers(
    raw: dict[str, Any], rope: RopeConfig
) -> None:
    config = LlamaConfig(**raw)
    positions = np.arange(LENGTH)
    found = np.broadcast_to(frequencies(rope, positions), (LENGTH, rope.rotary_dim // 2))
    init = ROPE_INIT_FUNCTIONS.get(rope.kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    for position in (0, 30, 47, 48, 49, LENGTH - 1):
        wanted, factor = init(config, "cpu", seq_len=position + 1)
        np.testing.assert_allclose(
            found[position], wanted.numpy(), rtol=FREQUENCY_TOLERANCE, atol=0
        )
        assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


def test_rows_are_those_of_transformers_decoding_token_by_token(
    raw: dict[str, Any], rope: RopeConfig
) -> None:
    module = LlamaRotaryEmbedding(LlamaConfig(**raw))
    cos, sin = RopeTable.of(rope, LENGTH).rows(np.arange(LENGTH)[None])
    assert cos.shape == sin.shape == (1, LENGTH, rope.rotary_dim // 2)
    assert cos.dtype == sin.dtype == np.float32
    for position in range(LENGTH):
        wanted = module(torch.zeros(1), torch.tensor([[position]]))
        for found, both_halves in zip((cos, sin), wanted, strict=True):
            first, second = both_halves[0, 0].numpy().reshape(2, -1)
            np.testing.assert_array_equal(first, second)
            np.testing.assert_allclose(found[0, position], first, rtol=0, atol=ROW_TOLERANCE)


def test_a_row_depends_on_its_own_position_alone(rope: RopeConfig) -> None:
    """Not on the length of the table, nor on the company: prefill, decoding and verification share
    their rows."""
    short, long = RopeTable.of(rope, 60), RopeTable.of(rope, LENGTH)
    np.testing.assert_array_equal(short.cos, long.cos[:60])
    np.testing.assert_array_equal(short.sin, long.sin[:60])
    positions = np.array([[57, 3, 3], [0, 59, 12]])
    for found, table in zip(long.rows(positions), (short.cos, short.sin), strict=True):
        for place, position in np.ndenumerate(positions):
            np.testing.assert_array_equal(found[place], table[position])


def test_each_kind_turns_some_position_differently_from_the_default() -> None:
    """Or the comparisons above would not tell the kinds apart."""
    plain = RopeTable.of(parse_model_config(config_of("default", 16)).decoder.rope, LENGTH)
    for name in ("linear", "dynamic", "llama3", "yarn"):
        table = RopeTable.of(parse_model_config(config_of(name, 16)).decoder.rope, LENGTH)
        assert np.abs(table.cos - plain.cos).max() > 100 * ROW_TOLERANCE, name
