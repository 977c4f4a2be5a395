"""ModelOpt's layout, as its export_speculative_decoding writes it, but for what it gets wrong: RoPE
is what the draft was trained with, and ends are those of the base."""

from __future__ import annotations

from typing import Any

from edgespec.layouts.draft import Draft, Layout, Written
from edgespec.methods import dflash, dspark, eagle1, eagle3
from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.methods.draft_layers import base_keys
from edgespec.methods.dspark import DSparkConfig
from edgespec.methods.eagle1 import Eagle1Config
from edgespec.methods.eagle3 import POST_NORM_KEY, Eagle3Config

NAME = "modelopt"
CONVERTER_KEYS = {"mlp_bias": False, "pretraining_tp": 1}  # its convert_to_vllm_ckpt reads them


def common(draft: Draft) -> dict[str, Any]:
    """Keys of all drafts."""
    return {**draft.layer_keys(), "torch_dtype": draft.dtype, **base_keys({}, draft.base_name)}


def eagle_section(draft: Draft, *, aux: bool) -> dict[str, Any]:
    """`eagle_config`, with the values of plain drafts."""
    return {
        "eagle_aux_hidden_state_layer_ids": draft.outputs if aux else [],
        "next_layer_regular": True,
        "parallel_draft_heads_num_layers": 1,
        "parallel_draft_step": 1,
        "use_aux_hidden_state": aux,
        "use_mtp_layernorm": False,
    }


def of_eagle3(draft: Draft) -> Written:
    """LlamaForCausalLMEagle3."""
    config = draft.config
    assert isinstance(config, Eagle3Config)
    switches = {
        name: True
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm")
        if getattr(config, name)
    }
    section = eagle_section(draft, aux=True)
    section |= {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True}
    section |= {POST_NORM_KEY: True} if config.norm_output else {}
    keys: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": draft.raw.get("model_type", "llama"),
        **CONVERTER_KEYS,
        **common(draft),
        "draft_vocab_size": config.draft_vocab_size,
        **switches,
        "eagle_config": section,
    }
    if config.target_hidden_size != config.decoder.hidden_size:
        keys["target_hidden_size"] = config.target_hidden_size
    return Written(keys, {name: name for name in draft.names}, draft.maps(used=False))


def of_eagle1(draft: Draft) -> Written:
    """LlamaForCausalLMEagle."""
    config = draft.config
    assert isinstance(config, Eagle1Config)
    section = eagle_section(draft, aux=False) | {
        "use_input_layernorm_in_first_layer": "layers.0.input_layernorm.weight" in draft.names,
        "use_last_layernorm": config.last_norm,
    }
    section |= {POST_NORM_KEY: True} if config.norm_output else {}
    keys: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        **CONVERTER_KEYS,
        **common(draft),
        "bias": config.fc_bias,
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_config": section,
    }
    return Written(keys, {name: name for name in draft.names}, draft.maps(used=False))


def block_keys(draft: Draft, config: BlockDraftConfig) -> dict[str, Any]:
    """Keys of block drafts; the section's `causal` says who wrote them."""
    section: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": draft.outputs,
        "causal": all(config.causal),
    }
    windows = {*config.windows}
    draft.refuse(
        NAME,
        windows_in_some_layers_alone=len(windows) > 1,
        causal_layers_beside_others=len({*config.causal}) > 1,
    )
    if (window := config.windows[0]) is not None:
        section |= {"use_swa": True, "swa_window_size": window}
    keys = common(draft)
    keys.pop("use_sliding_window", None)  # the section says it
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_dropout": 0.0,
        **keys,
        "block_size": config.block_size,
        "dflash_config": section,
        "num_target_layers": draft.base.decoder.num_layers,
        "layer_types": ["full_attention"] * config.decoder.num_layers,
    }


def refuse_own(draft: Draft) -> None:
    """Its block drafts share the base's embedding and head."""
    config = draft.config
    draft.refuse(NAME, a_vocabulary_of_its_own=config.draft_vocab_size < config.vocab_size)


def of_dflash(draft: Draft) -> Written:
    """DFlashDraftModel."""
    assert isinstance(draft.config, BlockDraftConfig)
    refuse_own(draft)
    return Written(block_keys(draft, draft.config), {name: name for name in draft.names})


HEADS = {"markov_head.": "", "confidence_head.proj": "confidence_proj"}  # ours -> theirs


def of_dspark(draft: Draft) -> Written:
    """The same with a projector."""
    config = draft.config
    assert isinstance(config, DSparkConfig)
    refuse_own(draft)
    heads = config.heads
    draft.refuse(
        NAME,
        a_confidence_head_that_does_not_read_its_Markov_head=(
            heads.confidence and not heads.confidence_reads_markov
        ),
    )
    keys = block_keys(draft, config)
    keys["dflash_config"] |= {
        "projector_type": "dspark",
        "markov_rank": heads.markov_rank,
        "markov_head_type": heads.markov_kind,
        "shift_label": heads.first_slot == 0,
        "use_confidence_head": heads.confidence,
    }
    return Written(keys, {name: head_name(name) for name in draft.names})


def head_name(name: str) -> str:
    """The name of a tensor, of which those of heads have others."""
    for ours, theirs in HEADS.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


LAYOUT = Layout(
    readers="TensorRT-LLM, TensorRT Edge-LLM, ModelOpt's converters",
    methods={
        eagle3.NAME: of_eagle3,
        eagle1.NAME: of_eagle1,
        dflash.NAME: of_dflash,
        dspark.NAME: of_dspark,
    },
)
