"""Claims about MTP heads in checkpoints: found where they are, and told apart where they are
not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.checkpoint.mtp import mtp_head
from edgespec.checkpoint.names import beside_text, stored_name, text_stack
from edgespec.config import ModelConfig
from edgespec.errors import CheckpointError, UnsupportedModel
from tests.toys import load_base, make_base, make_qwen3_5


def model_of(checkpoint: Checkpoint) -> ModelConfig:
    found = detect(checkpoint)
    assert isinstance(found, ModelConfig)
    return found


def edit(
    path: Path, tensors: dict[str, torch.Tensor | None] | None = None, **config: Any
) -> Checkpoint:
    """A checkpoint with some keys of its config and some tensors changed; None leaves a tensor
    out."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    kept = {**load_file(path / "model.safetensors"), **(tensors or {})}
    save_file(
        {name: tensor for name, tensor in kept.items() if tensor is not None},
        path / "model.safetensors",
    )
    return open_checkpoint(path)


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"tied": True, "attention_bias": True, "shards": 3, "dtype": "bfloat16"}]
)
def test_head_and_text_are_found_where_they_stand(
    images: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    path = make_qwen3_5(tmp_path, images=images, tokenizer=False, **options)
    checkpoint = open_checkpoint(path)
    model = model_of(checkpoint)
    assert mtp_head(checkpoint, model) == {
        name: info.shape for name, info in checkpoint.tensors.items() if name.startswith("mtp.")
    }
    stack = text_stack(checkpoint)
    theirs = {
        name
        for name in load_base(path).state_dict()
        if name != "lm_head.weight" or not model.tied_head
    }
    assert {stored_name(name, stack) for name in theirs} == set(checkpoint.tensors) - set(
        beside_text(checkpoint)
    )


def test_dtype_of_a_mixed_checkpoint_is_that_of_most_bytes(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_qwen3_5(tmp_path, dtype="bfloat16", tokenizer=False))
    assert {
        checkpoint.tensors[f"model.layers.0.linear_attn.{name}"].dtype
        for name in ("A_log", "dt_bias")
    } == {
        "float32",
        "bfloat16",
    }
    assert model_of(checkpoint).dtype == "bfloat16"


def test_a_model_that_was_saved_again_has_lost_its_head(tmp_path: Path) -> None:
    load_base(make_qwen3_5(tmp_path / "original", tokenizer=False)).save_pretrained(
        tmp_path / "saved"
    )
    checkpoint = open_checkpoint(tmp_path / "saved")
    with pytest.raises(UnsupportedModel, match=r"no mtp\.\* tensors.*\n.*original download"):
        mtp_head(checkpoint, model_of(checkpoint))


def test_a_model_without_a_head_has_none(tmp_path: Path) -> None:
    for path in (
        make_qwen3_5(tmp_path / "a", mtp=False, tokenizer=False),
        make_base(tmp_path / "b", tokenizer=False),
    ):
        checkpoint = open_checkpoint(path)
        with pytest.raises(
            UnsupportedModel, match=r"has no MTP head.*\n.*a draft with a checkpoint"
        ):
            mtp_head(checkpoint, model_of(checkpoint))


def test_tensors_without_their_key_are_named(tmp_path: Path) -> None:
    checkpoint = edit(make_qwen3_5(tmp_path, tokenizer=False), mtp_num_hidden_layers=0)
    with pytest.raises(
        UnsupportedModel, match=r"15 mtp\.\* tensors, but its config\.json declares no MTP head"
    ):
        mtp_head(checkpoint, model_of(checkpoint))


WEIGHT = torch.zeros(4, 4)


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        (
            {"model.layers.4.eh_proj.weight": WEIGHT},
            {},
            "DeepSeek and GLM name it .*model.layers.4.eh_proj",
        ),
        ({}, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers.*\n.*would need graphs"),
        ({}, {"mtp_num_hidden_layers": 2}, "MTP head of 2 layers"),
        ({}, {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        ({"mtp.embed_tokens.weight": WEIGHT}, {}, "embedding of its own .mtp.embed_tokens.weight"),
        (
            {"mtp.layers.0.mlp.experts.0.up_proj.weight": WEIGHT},
            {},
            "parts that a dense one has not: .*experts.0",
        ),
        (
            {"mtp.layers.1.self_attn.q_proj.weight": WEIGHT},
            {},
            r"parts that a dense one has not: mtp\.layers\.1",
        ),
    ],
)
def test_heads_of_other_forms_are_refused_by_name(
    tensors: dict[str, torch.Tensor | None], config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    checkpoint = edit(make_qwen3_5(tmp_path, tokenizer=False), tensors, **config)
    with pytest.raises(UnsupportedModel, match=said):
        mtp_head(checkpoint, model_of(checkpoint))


def test_dedicated_embeddings_are_seen_in_the_text_part_too(tmp_path: Path) -> None:
    path = make_qwen3_5(tmp_path, images=True, tokenizer=False)
    text = json.loads((path / "config.json").read_text())["text_config"]
    checkpoint = edit(path, text_config=text | {"mtp_use_dedicated_embeddings": True})
    with pytest.raises(UnsupportedModel, match="mtp_use_dedicated_embeddings"):
        mtp_head(checkpoint, model_of(checkpoint))


def test_a_head_that_lacks_a_part_is_refused_with_its_name(tmp_path: Path) -> None:
    lost = ("mtp.pre_fc_norm_hidden.weight", "mtp.layers.0.mlp.up_proj.weight")
    checkpoint = edit(make_qwen3_5(tmp_path, tokenizer=False), dict.fromkeys(lost))
    with pytest.raises(
        CheckpointError,
        match=r"lacks mtp\.layers\.0\.mlp\.up_proj\.weight, mtp\.pre_fc_norm_hidden",
    ):
        mtp_head(checkpoint, model_of(checkpoint))
