"""SafeAILab's layout (the EAGLE repository), of EAGLE-3 and of EAGLE-1, and SpecForge's, which
SGLang reads: the same with the aux layers named."""

from __future__ import annotations

from typing import Any

from edgespec.layouts.draft import Draft, Layout, Written
from edgespec.methods import eagle1, eagle3
from edgespec.methods.aux_layers import default_aux_layers
from edgespec.methods.draft_layers import base_keys
from edgespec.methods.eagle1 import Eagle1Config
from edgespec.methods.eagle3 import Eagle3Config

NAME = "eagle"


def eagle3_keys(draft: Draft, layout: str) -> dict[str, Any]:
    """config.json of an EAGLE-3 draft of one layer of Llama's form."""
    config = draft.config
    assert isinstance(config, Eagle3Config)
    draft.refuse(
        layout,
        more_than_one_layer=config.decoder.num_layers > 1,
        norms_of_queries_and_keys=config.decoder.attention.qk_norm,
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
    )
    keys = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **draft.layer_keys(),
        "draft_vocab_size": config.draft_vocab_size,
        "torch_dtype": draft.dtype,
        **base_keys({}, draft.base_name),
    }
    if config.target_hidden_size != config.decoder.hidden_size:
        keys["target_hidden_size"] = config.target_hidden_size
    return keys


def midlayer(draft: Draft) -> dict[str, str]:
    """Own name -> theirs."""
    return {name: name.replace("layers.0.", "midlayer.", 1) for name in draft.names}


def of_eagle3(draft: Draft) -> Written:
    """Without a key for aux layers: they are the usual ones."""
    usual = default_aux_layers(draft.base.decoder.num_layers)
    draft.refuse(NAME, **{f"the aux layers {[*draft.aux_layers]}": draft.aux_layers != usual})
    return Written(eagle3_keys(draft, NAME), midlayer(draft), draft.maps(used=True))


def of_eagle1(draft: Draft) -> Written:
    """One Llama layer, or more, behind fc."""
    config = draft.config
    assert isinstance(config, Eagle1Config)
    draft.refuse(
        NAME,
        a_norm_before_its_first_layer="layers.0.input_layernorm.weight" in draft.names,
        a_norm_before_its_head=config.last_norm,
        a_vocabulary_of_its_own=config.draft_vocab_size < config.vocab_size,
    )
    keys = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **draft.layer_keys(),
        "bias": config.fc_bias,
        "qkv_bias": config.decoder.attention.qkv_bias,
        "torch_dtype": draft.dtype,
        **base_keys({}, draft.base_name),
    }
    return Written(keys, {name: name for name in draft.names})


LAYOUT = Layout(
    readers="the EAGLE repository, vLLM, TensorRT-LLM",
    methods={eagle3.NAME: of_eagle3, eagle1.NAME: of_eagle1},
)
