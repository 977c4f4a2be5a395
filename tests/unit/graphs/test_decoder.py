"""What tensors a dense base is expected to hold, against the models that transformers builds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from edgespec.checkpoint.files import open_checkpoint
from edgespec.checkpoint.names import expected_tensors
from edgespec.config import (
    AttentionSpec,
    DecoderConfig,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    RopeConfig,
)
from edgespec.contract import Role
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.families import parse_model_config
from edgespec.graphs.decoder import Decoder
from edgespec.graphs.layers import check_buildable, graph_shape
from tests import toys

ROWS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"family": "mistral", "head_dim": 32},
    "qwen2": {"family": "qwen2", "tied": True},
    "qwen3": {"family": "qwen3", "head_dim": 32},
    "qwen3-biases": {"family": "qwen3", "attention_bias": True, "tied": True},
}


@pytest.mark.parametrize("name", ROWS)
def test_expected_tensors_are_those_of_the_model_in_transformers(tmp_path: Path, name: str) -> None:
    path = toys.make_base(tmp_path, layers=2, **ROWS[name])
    with safe_open(
        path / "model.safetensors", "numpy"
    ) as file:  # made from transformers' state dict
        stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert (
        expected_tensors(parse_model_config(json.loads((path / "config.json").read_text())))
        == stored
    )


def test_a_tied_head_reads_the_embedding(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(toys.make_base(tmp_path, layers=2, tied=True)))
    config = parse_model_config(json.loads((tmp_path / "config.json").read_text()))
    assert Decoder.open(checkpoint, config).table.source("lm_head.weight") == (
        checkpoint,
        "model.embed_tokens.weight",
    )


def test_a_tensor_that_no_layer_reads_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(toys.make_base(tmp_path, layers=3)))
    raw = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\."):
        Decoder.open(checkpoint, parse_model_config(raw | {"num_hidden_layers": 2}))


def llama_with(change: Callable[[LayerSpec], LayerSpec]) -> DecoderConfig:
    """Two layers of a toy, the second one changed."""
    attention = AttentionSpec(4, 2, 16, RopeConfig(1e4, 16), scale=0.25)
    layer = LayerSpec(attention, MlpSpec(96), NormSpec(1e-5))
    return DecoderConfig(64, (layer, change(layer)), layer.norm)


def with_attention(**changes: Any) -> Callable[[LayerSpec], LayerSpec]:
    def change(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mixer, AttentionSpec)
        return replace(layer, mixer=replace(layer.mixer, **changes))

    return change


NOT_BUILT: dict[str, tuple[Callable[[LayerSpec], LayerSpec], str]] = {
    "fused gates": (with_attention(gated=True, fused_qkv=True), "gates in a fused projection"),
    "other keys": (with_attention(num_kv_heads=4), "keys of 4 x 16"),
    "experts": (
        lambda layer: replace(layer, mlp=MlpSpec(96, bias=True, experts=ExpertsSpec(8, 2))),
        "8 experts with biases",
    ),
}


@pytest.mark.parametrize("name", NOT_BUILT)
def test_layers_that_no_graph_computes_are_refused_by_name(name: str) -> None:
    change, words = NOT_BUILT[name]
    with pytest.raises(UnsupportedModel, match=words):
        check_buildable(llama_with(change), "base")


def test_a_graph_has_two_masks_and_two_rotary_tables_at_most() -> None:
    two = with_attention(window=7, rope=RopeConfig(1e6, 16))
    config = llama_with(two)
    check_buildable(config, "base")
    shape = graph_shape(config, Role.LLM, vocab_size=32)
    assert (shape.sliding, shape.local_rotary_dim) == (True, 16)
    layers = (*config.layers, with_attention(window=9)(config.layers[0]))
    with pytest.raises(UnsupportedModel, match="windows of 7, 9 tokens"):
        check_buildable(replace(config, layers=layers), "base")
    layers = (*config.layers, with_attention(rope=RopeConfig(1e5, 16))(config.layers[0]))
    with pytest.raises(UnsupportedModel, match="3 rotary embeddings"):
        check_buildable(replace(config, layers=layers), "base")
