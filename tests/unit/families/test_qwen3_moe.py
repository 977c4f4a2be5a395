"""Claims about Qwen3-MoE's configurations, held against the models that transformers builds from
them, and about both layouts of experts on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.checkpoint.names import expected_tensors
from edgespec.config import ExpertsSpec, MlpSpec
from edgespec.errors import CheckpointError
from edgespec.families import parse_model_config
from edgespec.graphs.completeness import check_complete
from tests import toys


def raw_of(path: Path, **changes: Any) -> dict[str, Any]:
    return open_checkpoint(path).config | changes


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return toys.make_qwen3_moe(tmp_path / "toy", layers=2, tokenizer=False)


@pytest.mark.parametrize("fused", [False, True])
def test_expected_tensors_are_those_on_disk_in_either_layout(tmp_path: Path, fused: bool) -> None:
    path = toys.make_qwen3_moe(tmp_path, layers=2, dense_layers=(1,), fused=fused, tokenizer=False)
    checkpoint = open_checkpoint(path)
    config = detect(checkpoint)
    check_complete(checkpoint, config)
    found = {name: info.shape for name, info in checkpoint.tensors.items()}
    assert expected_tensors(parse_model_config(checkpoint.config)) == found


def test_both_layouts_have_the_same_weights_and_one_identity(tmp_path: Path, toy: Path) -> None:
    fused = toys.make_qwen3_moe(tmp_path / "fused", layers=2, fused=True, tokenizer=False)
    single, together = open_checkpoint(toy), open_checkpoint(fused)
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensor = f"model.layers.1.mlp.experts.5.{name}.weight"
        np.testing.assert_array_equal(single.read(tensor), together.read(tensor))
    assert single.identity() == together.identity()


def test_which_layers_have_experts_is_said_by_step_and_by_name(toy: Path) -> None:
    raw = raw_of(toy, num_hidden_layers=6)
    experts = MlpSpec(48, experts=ExpertsSpec(6, 2, normalized=True))

    def sparse(**changes: Any) -> list[int]:
        layers = parse_model_config(raw | changes).decoder.layers
        assert all(layer.mlp in (experts, MlpSpec(96)) for layer in layers)
        return [i for i, layer in enumerate(layers) if layer.mlp == experts]

    assert sparse() == [0, 1, 2, 3, 4, 5]
    assert sparse(decoder_sparse_step=2) == [1, 3, 5]
    assert sparse(mlp_only_layers=[0, 4], decoder_sparse_step=1) == [1, 2, 3, 5]
    del raw["num_experts"]
    assert sparse(num_local_experts=6) == [0, 1, 2, 3, 4, 5]  # as transformers 5 writes it


def test_windows_need_the_switch_and_then_all_layers_have_them(toy: Path) -> None:
    raw = raw_of(toy, sliding_window=7)
    assert parse_model_config(raw).decoder.windows == (None,)
    assert parse_model_config(raw | {"use_sliding_window": True}).decoder.windows == (7,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_experts 6"),
        ({"num_experts": 0}, "'num_experts' is 0"),
        ({"num_experts": 10**6}, "'num_experts' is 1000000"),
        ({"num_experts": None}, "'num_experts' is missing"),
        ({"mlp_only_layers": ["x"]}, "'mlp_only_layers' is"),
        ({"moe_intermediate_size": -1}, "'moe_intermediate_size' is -1"),
    ],
)
def test_impossible_values_are_refused(toy: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        parse_model_config(raw_of(toy, **changes))


def test_a_missing_expert_is_named(toy: Path) -> None:
    checkpoint = open_checkpoint(toy)
    config = parse_model_config(checkpoint.config | {"num_experts": 7})
    with pytest.raises(CheckpointError, match=r"missing .*experts\.6\.gate_proj"):
        check_complete(checkpoint, config)
