"""Qwen2.5-VL's image encoder: windows in most layers, RMSNorms and gated MLPs (arXiv 2502.13923).

Defaults for missing keys are those of transformers 5.14.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.config.bounds import MAX_SIZES, MAX_WINDOW_SIDE
from edgespec.config.fields import Fields, is_int
from edgespec.config.values import VisionConfig
from edgespec.families.base import GgufEncoder
from edgespec.families.vision import NORM_EPS, layer_indices, vision_activation, vision_heads

_FULL_ATTENTION = (7, 15, 23, 31)
# Modules on disk -> their names in Qwen3-VL's files
NAMES = {
    "merger.ln_q": "merger.norm",
    "merger.mlp.0": "merger.linear_fc1",
    "merger.mlp.2": "merger.linear_fc2",
}
PATTERN = "gguf_window_pattern"  # of a vision_config that is made of metadata alone


def full_attention(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The layers without windows: each last one of so many."""
    pattern: Any = config.get(PATTERN)
    depth: Any = config.get("depth")
    known = is_int(pattern) and is_int(depth) and 0 < pattern <= depth <= MAX_SIZES["depth"]
    return {"fullatt_block_indexes": list(range(pattern - 1, depth, pattern)) if known else pattern}


GGUF = GgufEncoder(
    "qwen2.5vl_merger",
    "Qwen2VLImageProcessor",
    (56 * 56, 28 * 28 * 16384),
    keys={"n_wa_pattern": PATTERN},
    tensors={"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
    more=full_attention,
)


def vision(fields: Fields) -> VisionConfig:
    """Returns the encoder of the fields of `vision_config`. Raises CheckpointError,
    UnsupportedModel for an activation that is not known."""
    num_layers = fields.size("depth", 32)
    hidden_size = fields.size("hidden_size", 3584)
    config = VisionConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size", 3420),
        num_heads=vision_heads(fields, hidden_size),
        out_hidden_size=fields.size("out_hidden_size", 3584),
        patch_size=fields.size("patch_size", 14),
        activation=vision_activation(fields, "silu"),
        norm="rms",
        norm_eps=NORM_EPS,
        gated_mlp=True,
        full_attention_layers=layer_indices(
            fields, "fullatt_block_indexes", _FULL_ATTENTION, num_layers
        ),
        temporal_patch_size=fields.size("temporal_patch_size", 2),
        in_channels=fields.size("in_channels", 3),
        merge_size=fields.size("spatial_merge_size", 2),
        window_size=fields.size("window_size", 112),
    )
    if not config.window_side:
        pixels = config.merge_size * config.patch_size
        raise fields.wrong("window_size", f"at least {pixels} pixels, a row of the language model")
    if config.window_side > MAX_WINDOW_SIDE:
        most = MAX_WINDOW_SIDE * config.patch_size
        raise fields.wrong("window_size", f"at most {most} pixels, {MAX_WINDOW_SIDE} patches")
    return config
