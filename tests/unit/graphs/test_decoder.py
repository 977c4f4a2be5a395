"""What tensors a dense base is expected to hold, against the models that transformers builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from edgespec.checkpoint.files import open_checkpoint
from edgespec.checkpoint.names import expected_tensors
from edgespec.errors import CheckpointError
from edgespec.families import parse_model_config
from edgespec.graphs.decoder import Decoder
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
