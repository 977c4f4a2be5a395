"""z-lab's layout of DFlash drafts; SGLang and SpecForge read it too. No code goes with it."""

from __future__ import annotations

from edgespec.layouts.draft import Draft, Layout, Written
from edgespec.layouts.speculators import window_keys
from edgespec.methods import dflash
from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.methods.draft_layers import base_keys

NAME = "z-lab"


def of_dflash(draft: Draft) -> Written:
    """DFlashDraftModel."""
    config = draft.config
    assert isinstance(config, BlockDraftConfig)
    vocabulary = config.draft_vocab_size < config.vocab_size
    by_rule = tuple(window is not None for window in config.windows)
    mixed = config.causal != by_rule and len({*config.causal}) > 1
    draft.refuse(NAME, a_vocabulary_of_its_own=vocabulary, causal_layers_beside_others=mixed)
    keys = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **draft.layer_keys(),
        **window_keys(config),
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": draft.outputs,
        },
        "num_target_layers": draft.base.decoder.num_layers,
        "torch_dtype": draft.dtype,
        **base_keys({}, draft.base_name),
    }
    if config.causal != by_rule:
        keys["is_causal"] = config.causal[0]
    return Written(keys, {name: name for name in draft.names})


LAYOUT = Layout(readers="z-lab's dflash, SGLang, vLLM", methods={dflash.NAME: of_dflash})
