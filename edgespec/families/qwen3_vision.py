"""Qwen3-VL's image encoder: full attention, learned positions that are interpolated, LayerNorms,
and features of inner layers for the language model (DeepStack, arXiv 2406.04334).

Defaults for missing keys are those of transformers 5.14. Qwen3.5's is the same without the features
of inner layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.config.fields import Fields
from edgespec.config.values import VisionConfig
from edgespec.families.base import GgufEncoder
from edgespec.families.vision import (
    NORM_EPS,
    layer_indices,
    square_side,
    vision_activation,
    vision_heads,
)

_DEEPSTACK = (8, 16, 24)
FLAGS = "gguf_deepstack_flags"  # of a vision_config that is made of metadata alone


def flagged_layers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The inner layers whose states the language model has, of which metadata have a flag each."""
    flags = config.get(FLAGS)
    layers = [i for i, flag in enumerate(flags) if flag] if isinstance(flags, list) else flags
    return {"deepstack_visual_indexes": layers}


GGUF_TEXT_KEYS = {"n_deepstack_layers": ""}  # follows from the encoder's
GGUF = GgufEncoder(
    "qwen3vl_merger",
    "Qwen2VLImageProcessor",
    (256 * 256, 4096 * 4096),
    keys={"is_deepstack_layers": FLAGS},
    tensors={"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
    more=flagged_layers,
    inner_mergers="v.deepstack",
)


def vision(fields: Fields) -> VisionConfig:
    """Returns the encoder of the fields of `vision_config`. Raises CheckpointError,
    UnsupportedModel for an activation that is not known."""
    return read_vision(fields, _DEEPSTACK)


def without_inner_layers(fields: Fields) -> VisionConfig:
    """The same for Qwen3.5, whose files name no inner layers."""
    return read_vision(fields, ())


def read_vision(fields: Fields, deepstack: tuple[int, ...]) -> VisionConfig:
    """The same; `deepstack` are the layers of files that do not say them."""
    num_layers = fields.size("depth", 27)
    hidden_size = fields.size("hidden_size", 1152)
    return VisionConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size", 4304),
        num_heads=vision_heads(fields, hidden_size),
        out_hidden_size=fields.size("out_hidden_size", 3584),
        patch_size=fields.size("patch_size", 16),
        activation=vision_activation(fields, "gelu_pytorch_tanh"),
        norm="layer",
        norm_eps=NORM_EPS,
        gated_mlp=False,
        full_attention_layers=tuple(range(num_layers)),
        temporal_patch_size=fields.size("temporal_patch_size", 2),
        in_channels=fields.size("in_channels", 3),
        merge_size=fields.size("spatial_merge_size", 2),
        position_grid=square_side(fields, "num_position_embeddings", 2304),
        deepstack_layers=layer_indices(fields, "deepstack_visual_indexes", deepstack, num_layers),
        patch_bias=True,
    )
