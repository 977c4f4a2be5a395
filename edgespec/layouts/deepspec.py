"""DeepSpec's layout of DSpark drafts (deepseek-ai): all keys at the top level."""

from __future__ import annotations

from edgespec.layouts.draft import Draft, Layout, Written
from edgespec.layouts.speculators import window_keys
from edgespec.methods import dspark
from edgespec.methods.draft_layers import base_keys
from edgespec.methods.dspark import DSparkConfig

NAME = "deepspec"


def of_dspark(draft: Draft) -> Written:
    """Qwen3DSparkModel."""
    config = draft.config
    assert isinstance(config, DSparkConfig)
    heads = config.heads
    by_rule = tuple(window is not None for window in config.windows)
    draft.refuse(
        NAME,
        a_vocabulary_of_its_own=config.draft_vocab_size < config.vocab_size,
        causal_layers=config.causal != by_rule,
        slots_that_begin_behind_the_anchor=heads.first_slot != 0,
    )
    keys = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        **draft.layer_keys(),
        **window_keys(config),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": draft.outputs,
        "num_target_layers": draft.base.decoder.num_layers,
        "markov_rank": heads.markov_rank,
        "markov_head_type": heads.markov_kind,
        "enable_confidence_head": heads.confidence,
        "confidence_head_with_markov": heads.confidence_reads_markov,
        "torch_dtype": draft.dtype,
        **base_keys({}, draft.base_name),
    }
    return Written(keys, {name: name for name in draft.names})


LAYOUT = Layout(readers="DeepSpec, vLLM", methods={dspark.NAME: of_dspark})
