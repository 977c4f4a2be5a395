"""EAGLE-1 drafts by their published configurations and tensors: what each layout says, which wins
where they contradict each other, and relatives that are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.config import NormNames, RopeConfig
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.methods.eagle1 import Eagle1Config, has_eagle1_tensors, parse_eagle1_config
from edgespec.methods.eagle3 import METHOD as EAGLE3

Shapes = dict[str, tuple[int, ...]]


def published(hidden: int, inner: int, kv_rows: int, vocab: int, **others: Any) -> Shapes:
    """The tensors of SafeAILab's drafts; `...` leaves one out, __ stands for a dot."""
    shapes: Shapes = {
        "embed_tokens.weight": (vocab, hidden),
        "fc.weight": (hidden, 2 * hidden),
        "fc.bias": (hidden,),
        "layers.0.self_attn.q_proj.weight": (hidden, hidden),
        "layers.0.self_attn.k_proj.weight": (kv_rows, hidden),
        "layers.0.self_attn.v_proj.weight": (kv_rows, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, hidden),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        "layers.0.post_attention_layernorm.weight": (hidden,),
    }
    changed = shapes | {name.replace("__", "."): shape for name, shape in others.items()}
    return {name: shape for name, shape in changed.items() if shape is not ...}


def llama2(**others: Any) -> Shapes:
    return published(4096, 11008, 4096, 32000, **others)


LLAMA2: dict[str, Any] = {  # yuhuili/EAGLE-llama2-chat-7B
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "num_key_value_heads": 32,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA3: dict[str, Any] = LLAMA2 | {  # yuhuili/EAGLE-LLaMA3-Instruct-8B
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
SWITCHES = {
    "eagle_aux_hidden_state_layer_ids": [],
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "use_aux_hidden_state": False,
    "use_input_layernorm_in_first_layer": False,
    "use_last_layernorm": False,
    "use_mtp_layernorm": False,
}


def modelopt(**switches: Any) -> dict[str, Any]:
    named = {**SWITCHES, **switches}
    kept = {key: value for key, value in named.items() if value is not ...}
    return LLAMA2 | {"architectures": ["LlamaForCausalLMEagle"], "eagle_config": kept}


def is_eagle1(config: dict[str, Any], shapes: Shapes) -> bool:
    return has_eagle1_tensors(config, lambda: shapes)


def test_the_draft_of_llama_2_is_read_as_published() -> None:
    draft = parse_eagle1_config(LLAMA2, llama2())
    (layer,) = draft.decoder.layers
    assert isinstance(draft, Eagle1Config)
    assert (draft.method, draft.layout) == ("eagle1", "eagle")
    assert layer.norm_names == NormNames(before_mixer=None)
    assert (draft.fc_bias, draft.last_norm) == (True, False)
    assert (draft.own_embedding, draft.own_head) == (True, False)
    assert (draft.vocab_size, draft.draft_vocab_size) == (32000, 32000)
    assert (draft.target_hidden_size, draft.num_aux_layers, draft.aux_layer_ids) == (4096, 1, None)
    assert draft.decoder.rope == RopeConfig(10000.0, 128)
    assert (draft.decoder.num_heads, draft.decoder.num_kv_heads) == (32, 32)
    assert not draft.decoder.attention.qkv_bias


def test_the_draft_of_llama_3_rotates_by_its_own_config() -> None:
    draft = parse_eagle1_config(LLAMA3, published(4096, 14336, 1024, 128256))
    assert (draft.decoder.num_heads, draft.decoder.num_kv_heads) == (32, 8)
    assert draft.decoder.rope == RopeConfig(500000.0, 128)


def test_a_draft_of_vicuna_may_leave_the_kv_heads_out() -> None:
    raw = {key: value for key, value in LLAMA2.items() if key != "num_key_value_heads"}
    assert parse_eagle1_config(raw, llama2()).decoder.num_kv_heads == 32


def test_modelopt_s_draft_is_read_by_its_tensors() -> None:
    shapes = llama2(
        embed_tokens__weight=...,
        fc__bias=...,
        norm__weight=(4096,),
        layers__0__input_layernorm__weight=(4096,),
        lm_head__weight=(8000, 4096),
    )
    raw = modelopt(use_input_layernorm_in_first_layer=True, use_last_layernorm=True)
    draft = parse_eagle1_config(raw | {"draft_vocab_size": 8000}, shapes)
    (layer,) = draft.decoder.layers
    assert draft.layout == "modelopt"
    assert layer.norm_names == NormNames()
    assert (draft.fc_bias, draft.last_norm, draft.norm_output) == (False, True, False)
    assert (draft.own_embedding, draft.own_head, draft.draft_vocab_size) == (False, True, 8000)


def test_everything_may_stand_under_model() -> None:
    shapes = {f"model.{name}": shape for name, shape in llama2().items()}
    assert parse_eagle1_config(LLAMA2, shapes) == parse_eagle1_config(LLAMA2, llama2())


def test_layers_but_the_first_have_all_norms() -> None:
    more = {
        name.replace("layers.0", "layers.1"): shape
        for name, shape in llama2().items()
        if name.startswith("layers.0")
    }
    shapes = llama2() | more | {"layers.1.input_layernorm.weight": (4096,)}
    first, second = parse_eagle1_config(LLAMA2, shapes).decoder.layers
    assert first.norm_names == NormNames(before_mixer=None)
    assert second.norm_names == NormNames()


def test_qwen2_s_biases_are_seen() -> None:
    biases = {f"layers__0__self_attn__{part}_proj__bias": (4096,) for part in "qkv"}
    draft = parse_eagle1_config(LLAMA2 | {"qkv_bias": True}, llama2(**biases))
    assert draft.decoder.attention.qkv_bias


@pytest.mark.parametrize(
    ("config", "shapes", "wanted"),
    [
        (LLAMA2, llama2(), True),
        (LLAMA2, llama2(embed_tokens__weight=..., fc__bias=...), True),
        (modelopt(), llama2(), True),
        (modelopt(use_aux_hidden_state=...), llama2(), True),
        (modelopt(use_aux_hidden_state=True), llama2(), False),
        (LLAMA2, llama2(fc__weight=(4096, 3 * 4096)), False),
        (LLAMA2, llama2(layers__0__hidden_norm__weight=(4096,)), False),  # EAGLE-3 of two layers
        (LLAMA2, llama2(fc__weight=...), False),
        ({}, llama2(), False),
    ],
)
def test_a_draft_is_known_by_its_tensors_or_its_switch(
    config: dict[str, Any], shapes: Shapes, wanted: bool
) -> None:
    assert is_eagle1(config, shapes) == wanted


def test_eagle_3_is_not_taken_for_it_and_keeps_what_is_its_own() -> None:
    aux = modelopt(use_aux_hidden_state=True)
    assert EAGLE3.format is not None
    assert EAGLE3.format.matches_tensors(aux, llama2)
    assert not EAGLE3.format.matches_tensors(LLAMA2, llama2)


@pytest.mark.parametrize(
    ("changes", "shapes", "said"),
    [
        ({"bias": False}, llama2(), r"'bias' is False, but tensor 'fc\.bias' is there"),
        ({"bias": True}, llama2(fc__bias=...), r"'bias' is True, but tensor 'fc\.bias' is missing"),
        ({}, llama2(fc__weight=(4096, 4096)), r"fc\.weight has the shape \[4096, 4096\]"),
        ({"hidden_size": 2048}, llama2(), r"fc\.weight has the shape \[4096, 8192\]"),
        ({"num_attention_heads": 33}, llama2(), "33"),
        ({"num_key_value_heads": 8}, llama2(), "8 heads of 128"),
        ({"draft_vocab_size": 40000}, llama2(), "greater than vocab_size"),
        ({"draft_vocab_size": 8000}, llama2(), r"no lm_head\.weight, and the base's does not fit"),
        (
            {"draft_vocab_size": 8000},
            llama2(lm_head__weight=(9000, 4096)),
            r"declares \[8000, 4096\]",
        ),
        ({}, llama2(layers__0__self_attn__k_proj__weight=...), r"no tensor .*k_proj\.weight"),
        ({}, llama2(layers__2__mlp__up_proj__weight=(1, 1)), r"lacks a layer.*\[0, 2\]"),
        ({}, llama2(layers__0__self_attn__q_proj__weight=(4096, 512)), "takes 512 inputs"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], shapes: Shapes, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        parse_eagle1_config(LLAMA2 | changes, shapes)


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        ({"use_input_layernorm_in_first_layer": True}, "use_input_layernorm_in_first_layer"),
        ({"use_last_layernorm": True}, "use_last_layernorm"),
    ],
)
def test_norms_that_modelopt_promises_must_be_there(switches: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        parse_eagle1_config(modelopt(**switches), llama2())


def test_the_recycled_state_is_the_one_before_the_last_norm_unless_the_draft_says_otherwise() -> (
    None
):
    normed = llama2(norm__weight=(4096,))
    switches = {"use_last_layernorm": True, "return_hidden_post_norm": True}
    assert parse_eagle1_config(modelopt(**switches), normed).norm_output
    with pytest.raises(CheckpointError, match="'return_hidden_post_norm' is true, and there is no"):
        parse_eagle1_config(modelopt(return_hidden_post_norm=True), llama2())
    with pytest.raises(UnsupportedModel, match="goes on with the state before that norm or after"):
        parse_eagle1_config(LLAMA2, normed)


@pytest.mark.parametrize(
    ("config", "shapes", "said"),
    [
        (modelopt(use_mtp_layernorm=True), llama2(), "use_mtp_layernorm"),
        (modelopt(parallel_draft_step=4), llama2(), "parallel_draft_step"),
        (LLAMA2, llama2(enorm__weight=(4096,)), r"enorm\.weight"),
        (LLAMA2 | {"hidden_act": "gelu"}, llama2(), "gelu"),
        (
            modelopt(),
            llama2(layers__0__self_attn__q_proj__weight=(4096, 8192)),
            "side by side, as EAGLE-3",
        ),
    ],
)
def test_relatives_are_refused_by_name(config: dict[str, Any], shapes: Shapes, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        parse_eagle1_config(config, shapes)
