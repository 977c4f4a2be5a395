"""The layout of the library speculators, which vLLM serves by one name: the base, its verifier, is
named in it."""

from __future__ import annotations

from typing import Any

from edgespec.layouts.draft import Draft, Layout, Written
from edgespec.methods import dflash, dspark, eagle3
from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.methods.dspark import DSparkConfig
from edgespec.methods.eagle3 import Eagle3Config

NAME, VERSION = "speculators", "0.9.0"
CHAIN = 3  # tokens that vLLM drafts a step with an EAGLE-3 draft, unless it is told otherwise


def common(draft: Draft, kind: str, architecture: str, drafts: int) -> dict[str, Any]:
    """Keys of all drafts; `drafts` are the tokens of a step."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = draft.config
    own = config.target_hidden_size != config.decoder.hidden_size
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": draft.base_name,
                "architectures": [draft.base.architecture],
            },
        },
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size if own else None,
        "tie_word_embeddings": False,
        "torch_dtype": draft.dtype,
    }


def layers(draft: Draft, model_type: str) -> dict[str, Any]:
    """`transformer_layer_config`, by whose type transformers makes a layer."""
    return {"model_type": model_type, **draft.layer_keys()}


def of_eagle3(draft: Draft) -> Written:
    """Eagle3Speculator."""
    config = draft.config
    assert isinstance(config, Eagle3Config)
    attention = config.decoder.attention
    keys = {
        **common(draft, "eagle3", "Eagle3Speculator", CHAIN),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": [*draft.aux_layers],
        "transformer_layer_config": layers(draft, "qwen3" if attention.qk_norm else "llama"),
    }
    return Written(keys, {name: name for name in draft.names}, draft.maps(used=True))


def block_keys(draft: Draft, kind: str, architecture: str) -> dict[str, Any]:
    """Keys of block drafts."""
    config = draft.config
    assert isinstance(config, BlockDraftConfig)
    inner = layers(draft, "qwen3") | window_keys(config)
    by_rule = tuple(window is not None for window in config.windows)
    keys = {
        **common(draft, kind, architecture, config.num_drafts),
        "aux_hidden_state_layer_ids": [*draft.aux_layers],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": not any(config.causal),
        "transformer_layer_config": inner,
    }
    if any(config.causal) and config.causal != by_rule:
        draft.refuse(NAME, causal_layers_beside_others=not all(config.causal))
        keys["is_causal"] = True
    return keys


def window_keys(config: BlockDraftConfig) -> dict[str, Any]:
    """Which layers have a window, in Hugging Face's words."""
    kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    window = next((w for w in config.windows if w is not None), None)
    keys: dict[str, Any] = {"layer_types": kinds}
    return keys if window is None else keys | {"sliding_window": window, "use_sliding_window": True}


def of_dflash(draft: Draft) -> Written:
    """DFlashSpeculator."""
    keys = block_keys(draft, "dflash", "DFlashSpeculator")
    return Written(keys, {name: name for name in draft.names}, draft.maps(used=True))


def of_dspark(draft: Draft) -> Written:
    """DSparkSpeculator."""
    config = draft.config
    assert isinstance(config, DSparkConfig)
    heads = config.heads
    keys = block_keys(draft, "dspark", "DSparkSpeculator") | {
        "markov_rank": heads.markov_rank,
        "markov_head_type": heads.markov_kind,
        "sample_from_anchor": heads.first_slot == 0,
        "enable_confidence_head": heads.confidence,
        "confidence_head_with_markov": heads.confidence_reads_markov,
    }
    return Written(keys, {name: name for name in draft.names}, draft.maps(used=True))


LAYOUT = Layout(
    readers="vLLM, speculators",
    methods={eagle3.NAME: of_eagle3, dflash.NAME: of_dflash, dspark.NAME: of_dspark},
)
