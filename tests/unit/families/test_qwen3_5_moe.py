"""Claims about the configurations of Qwen3.5's mixtures of experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.checkpoint.mtp import mtp_head
from edgespec.config import ExpertsSpec, MlpSpec, ModelConfig
from edgespec.errors import CheckpointError
from edgespec.families import parse_model_config
from edgespec.graphs.completeness import check_complete
from tests import toys


@pytest.mark.parametrize("images", [False, True])
def test_all_layers_have_experts_and_the_head_has_them_too(tmp_path: Path, images: bool) -> None:
    path = toys.make_qwen3_5(tmp_path, experts=6, images=images, tokenizer=False)
    checkpoint = open_checkpoint(path)
    config = detect(checkpoint)
    assert isinstance(config, ModelConfig)
    check_complete(checkpoint, config)
    experts = ExpertsSpec(6, 2, normalized=True, shared_size=32)
    assert {layer.mlp for layer in config.decoder.layers} == {MlpSpec(48, experts=experts)}
    assert config.decoder.layer_kinds.count("linear_attention") == 3
    head = mtp_head(checkpoint, config)
    assert head["mtp.layers.0.mlp.experts.5.down_proj.weight"] == (64, 48)
    assert head["mtp.layers.0.mlp.shared_expert_gate.weight"] == (1, 64)


def test_missing_sizes_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    raw = open_checkpoint(toys.make_qwen3_5(tmp_path, experts=9, tokenizer=False)).config
    for key in ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok"):
        del raw[key]
    mlp = parse_model_config(raw).decoder.layers[0].mlp
    assert mlp == MlpSpec(512, experts=ExpertsSpec(9, 8, normalized=True, shared_size=512))
    with pytest.raises(CheckpointError, match="'num_experts' is missing"):
        parse_model_config({k: v for k, v in raw.items() if k != "num_experts"})
