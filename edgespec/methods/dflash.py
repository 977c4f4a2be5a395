"""DFlash block drafts (arXiv 2602.06036) as z-lab, speculators and ModelOpt write them.

A block's rows see each other in both directions, and no two of its slots know of each other's
token. Variants are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgespec.config.fields import Fields
from edgespec.config.values import Shapes
from edgespec.errors import CheckpointError
from edgespec.families.base import GgufForm
from edgespec.methods.base import AUX_LAYERS_OF_GGUF
from edgespec.methods.block_draft import (
    KEYS,
    BlockDraftConfig,
    block_values,
    layout_of,
    named_by,
    own_shapes,
    refuse_unknown,
)
from edgespec.methods.block_method import block_method
from edgespec.methods.block_variants import VARIANT_NAMES, is_read_elsewhere, refuse_variants

NAME, TITLE = "dflash", "DFlash"
SECTION = "dflash_config"  # TensorRT Edge-LLM's exports have it too


def parse_dflash_config(
    raw: Mapping[str, Any], shapes: Shapes, source: str = "config.json"
) -> BlockDraftConfig:
    """A DFlash draft of any layout from its config.json and the shapes of its tensors, under stored
    names or ours.

    A quantized Linear is in `shapes` as the weight that it stands for. Raises CheckpointError for
    contradictions, UnsupportedModel for variants of DFlash that differ in their graph.
    """
    top, shapes = Fields(raw, source), own_shapes(shapes)
    inner = top.optional_section(SECTION)
    refuse_variants(raw, shapes, source)
    refuse_unknown(inner, (*KEYS, "causal_head"))  # which is off here
    if top.get(SECTION) is not None and not inner.raw:
        raise CheckpointError(f"{inner.source} is empty.", "Download the draft again.")
    layout = layout_of(raw, SECTION)
    return BlockDraftConfig(
        **block_values(NAME, TITLE, raw, shapes, source, inner=inner, layout=layout)
    )


def matches_config(config: Mapping[str, Any]) -> bool:
    """Variants that no other method reads match as well: the parser refuses them by their names."""
    if is_read_elsewhere(config):
        return False
    if config.get("speculators_model_type") is None and config.get(SECTION) is not None:
        return True
    return named_by(config, VARIANT_NAMES)


def gguf_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """z-lab's keys, whose ids are those of layer outputs, for metadata of llama.cpp, which count
    from the embedding."""
    ids, slides = config.get(AUX_LAYERS_OF_GGUF), config.get(SLIDES, ())
    kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    section = {
        "mask_token_id": config.get("mask_token_id"),
        "target_layer_ids": ids and [i - 1 for i in ids],
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        SECTION: {key: value for key, value in section.items() if value is not None},
        **({"layer_types": kinds} if kinds else {}),
    }


SLIDES = "gguf_sliding_layers"
GGUF = GgufForm(
    "dflash",
    keys={
        "block_size": "block_size",
        "target_layers": AUX_LAYERS_OF_GGUF,
        "target_layer_ids": "target_layer_ids",  # some forks', which count as Hugging Face does
        "target_hidden_size": "target_hidden_size",
        "attention.sliding_window": "sliding_window",
        "attention.sliding_window_pattern": SLIDES,
        "attention.causal": "",  # always false
        "rope.dimension_sections": "",  # of images
    },
    lists=("target_layers", "target_layer_ids", "attention.sliding_window_pattern"),
    tensors={"fc.weight": "fc.weight", "enc.output_norm.weight": "hidden_norm.weight"},
    more=gguf_keys,
)
METHOD = replace(
    block_method(NAME, TITLE, parse_dflash_config, matches_config, GGUF),
    thinking={
        "Qwen3ForCausalLM": False,
        "Qwen3_5ForCausalLM": True,
        "Qwen3_5ForConditionalGeneration": True,
    },
)
