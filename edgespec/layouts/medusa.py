"""The layout of Medusa's authors (FasterDecoding): heads in a file of their own."""

from __future__ import annotations

from edgespec.layouts.draft import Draft, Layout, Written
from edgespec.methods import medusa
from edgespec.methods.medusa import MedusaConfig

NAME = "medusa"


def of_medusa(draft: Draft) -> Written:
    """medusa_lm_head.safetensors; heads that share the base's lm_head are version 2."""
    config = draft.config
    assert isinstance(config, MedusaConfig)
    keys = {
        "base_model_name_or_path": draft.base_name,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_blocks,
        "torch_dtype": draft.dtype,
    }
    if not config.own_head:
        keys["version"] = "2"
    names = {
        own: stored.removeprefix("model.").removeprefix(config.prefix)
        for own, stored in draft.names.items()
    }
    return Written(keys, names, file="medusa_lm_head.safetensors")


LAYOUT = Layout(readers="Medusa, vLLM, TensorRT-LLM", methods={medusa.NAME: of_medusa})
