"""Claims about Gemma-3's configurations, held against the models that transformers builds from
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.checkpoint.names import expected_tensors
from edgespec.config import ModelConfig
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.families import parse_model_config
from edgespec.graphs.builder import GraphBuilder, WeightPlan
from edgespec.graphs.completeness import check_complete
from edgespec.graphs.decoder import Decoder
from edgespec.rope import RopeTable
from tests import toys

LINEAR = {"rope_type": "linear", "factor": 8.0}


def text(**changes: Any) -> dict[str, Any]:
    """A sparse text config as published; a change to `...` leaves the key out."""
    raw = {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 16,
        "hidden_size": 48,
        "intermediate_size": 80,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "sliding_window": 9,
        "vocab_size": 128,
    }
    return {key: value for key, value in (raw | changes).items() if value is not ...}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window_pattern": 2, "rope_scaling": LINEAR},
        {"rope_theta": 5e5, "rope_local_base_freq": 100.0},
        {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 5},
        {"attention_bias": True, "query_pre_attn_scalar": 10, "tie_word_embeddings": False},
    ],
)
def test_text_config_describes_the_model_that_transformers_builds(changes: dict[str, Any]) -> None:
    raw = text(**changes)
    theirs = Gemma3TextConfig(**{k: v for k, v in raw.items() if k != "architectures"})
    with torch.device("meta"):
        model = Gemma3ForCausalLM(theirs)
    found = parse_model_config(raw)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if theirs.tie_word_embeddings:
        del shapes["lm_head.weight"]
    assert expected_tensors(found) == shapes
    assert found.tied_head == theirs.tie_word_embeddings
    assert found.max_position == theirs.max_position_embeddings
    modules = [layer.self_attn for layer in model.model.layers]
    ours = found.decoder.attentions
    assert [a.window for a in ours] == [module.sliding_window for module in modules]
    assert [a.scale for a in ours] == [module.scaling for module in modules]


@pytest.mark.parametrize("scaling", [{}, LINEAR])
@pytest.mark.parametrize("spelling", ["old", "new"])
def test_each_kind_of_layer_turns_as_transformers_does(
    scaling: dict[str, Any], spelling: str
) -> None:
    keys: dict[str, Any] = {"rope_scaling": scaling or None, "rope_local_base_freq": 50.0}
    if spelling == "new":
        full = {"rope_type": "default", "rope_theta": 1e6} | scaling
        local = {"rope_type": "default", "rope_theta": 50.0}
        keys = {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
    config = Gemma3TextConfig(**{k: v for k, v in text(**keys).items() if k != "architectures"})
    theirs, found = Gemma3RotaryEmbedding(config), parse_model_config(text(**keys)).decoder
    assert len(found.ropes) == 2
    for rope, kind in zip(found.ropes, ("full_attention", "sliding_attention"), strict=True):
        cos, _ = theirs(torch.zeros(1), torch.arange(40)[None], kind)
        np.testing.assert_allclose(RopeTable.of(rope, 40).cos, cos[0, :, :8].numpy(), atol=1e-5)
    assert {a.rope for a in found.attentions if a.window} == {found.ropes[1]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_embeddings_are_scaled_by_the_root_in_the_checkpoints_type(
    tmp_path: Path, dtype: Any
) -> None:
    path = toys.make_gemma3(tmp_path, layers=2, hidden=80, dtype=dtype, tokenizer=False)
    checkpoint = open_checkpoint(path)
    found = detect(checkpoint)
    assert isinstance(found, ModelConfig)
    b = GraphBuilder("stem", WeightPlan("weights"))
    Decoder.open(checkpoint, found).stem(b, {"inputs_embeds": b.constant("x", np.zeros(1))})
    value = b.initializers["embedding_scale"].const_value
    assert value is not None
    model = Gemma3ForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    scale = model.model.embed_tokens.embed_scale.to(getattr(torch, dtype)).float()
    assert float(value.numpy()) == float(scale)
    assert (float(scale) == np.sqrt(80).astype(np.float32)) == (dtype == "float32")
    assert ml_dtypes.bfloat16(80**0.5) == 9.0 - 0.0625


@pytest.mark.parametrize("stack", ["text", "nested", "published"])
def test_the_text_part_is_found_wherever_it_stands(tmp_path: Path, stack: Any) -> None:
    checkpoint = open_checkpoint(toys.make_gemma3(tmp_path, stack=stack, tokenizer=False))
    found = detect(checkpoint)
    assert isinstance(found, ModelConfig)
    check_complete(checkpoint, found)
    assert (found.tied_head, found.decoder.sliding_window) == (True, 7)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "relu"}, "hidden_activation"),
        ({"layer_types": ["linear_attention"] * 7}, "linear_attention"),
    ],
)
def test_relatives_are_refused_by_name(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedModel, match=name):
        parse_model_config(text(**changes))


def test_a_rope_for_no_kind_of_layer_is_refused() -> None:
    with pytest.raises(CheckpointError, match="rope_parameters"):
        parse_model_config(text(rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
