"""Phi-3, Phi-3.5 and Phi-4-mini: fused projections, a window over all layers, longrope, and a part
of each head rotated.

Defaults for missing keys are those of transformers 5.14.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from edgespec.config.fields import Fields
from edgespec.config.layers import heads_of
from edgespec.config.ropes import one_rope
from edgespec.config.values import AttentionSpec, DecoderConfig, RopeKind
from edgespec.errors import UnsupportedModel
from edgespec.families.base import Family, GgufForm, read_decoder, read_layer

WHOLE_HEAD = 1.0
# Names that early files have for longrope
_ALIASES: dict[str, RopeKind] = {"su": "longrope", "yarn": "longrope"}
_DEFAULTS: dict[str, Any] = {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def decoder(fields: Fields) -> DecoderConfig:
    """Returns Phi-3's decoder (arXiv 2404.14219). All layers slide where there is a window; a
    missing key means none. Raises UnsupportedModel for Phi-3.5-MoE's scales."""
    refuse_other_scales(fields)
    layer = read_layer(fields, attention(fields))
    layer = replace(layer, mlp=replace(layer.mlp, fused_gate_up=True))
    return read_decoder(fields, layer, "all", default_window=None)


def attention(fields: Fields) -> AttentionSpec:
    """Returns attention with one projection for q, k and v."""
    num_heads, num_kv_heads, head_dim = heads_of(fields, needs_kv_heads=False)
    max_position = fields.size("max_position_embeddings")
    return AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        rope=one_rope(fields, head_dim, max_position, partial=WHOLE_HEAD, aliases=_ALIASES),
        scale=1 / math.sqrt(head_dim),
        fused_qkv=True,
    )


def refuse_other_scales(fields: Fields) -> None:
    """Raises UnsupportedModel for Phi-3.5-MoE, which scales cos and sin by two numbers of its
    own."""
    for place in ("rope_scaling", "rope_parameters"):
        rope = fields.optional_section(place)
        for key in ("short_mscale", "long_mscale"):
            if rope.get(key) is not None:
                raise UnsupportedModel(
                    f"{rope.source}: {key} {rope.get(key)}; this version scales by the ratio of"
                    " lengths alone."
                )


GGUF = GgufForm(
    "phi3",
    keys={"attention.sliding_window": "sliding_window"},
    tensors={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    more=lambda config: {"sliding_window": config.get("sliding_window") or None},
)
FAMILIES = {"Phi3ForCausalLM": Family("Phi-3", "phi3", decoder, defaults=_DEFAULTS, gguf=GGUF)}
