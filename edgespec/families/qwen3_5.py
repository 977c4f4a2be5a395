"""The Qwen3.5 line: gated full attention among gated delta nets, norms around 0, an MTP head.

Defaults for missing keys are those of transformers 5.14. The text part stands alone or under
`text_config`, beside an image encoder that is Qwen3-VL's but for its inner features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from edgespec.config.fields import Fields, is_int, shortened
from edgespec.config.layers import heads_of, num_layers_of
from edgespec.config.ropes import MRope, one_rope
from edgespec.config.values import (
    AttentionSpec,
    DecoderConfig,
    ImageTokens,
    LayerKind,
    LinearAttentionConfig,
)
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.families import qwen3_vision
from edgespec.families.base import Family, GgufForm, read_layer

HEAD_DIM = 256
PARTIAL_ROTARY = 0.25
INTERLEAVED = MRope(interleaved=True)
_FULL_ATTENTION_INTERVAL = 4
# Older transformers wrote other names.
_KINDS: dict[str, LayerKind] = {
    "full_attention": "full_attention",
    "linear_attention": "linear_attention",
    "attention": "full_attention",
    "mamba": "linear_attention",
}


def decoder(fields: Fields) -> DecoderConfig:
    """Returns Qwen3.5's decoder: full attention in every fourth layer, or in those that layer_types
    names; gated delta nets (arXiv 2412.06464) in the others."""
    refuse_other_gates(fields)
    full = read_layer(fields, attention(fields))
    full = replace(full, norm=replace(full.norm, unit_offset=True))
    kinds = layer_kinds(fields, num_layers_of(fields))
    layers = [full] * len(kinds)
    if "linear_attention" in kinds:
        linear = replace(full, mixer=linear_attention(fields))
        layers = [linear if kind == "linear_attention" else full for kind in kinds]
    return DecoderConfig(fields.size("hidden_size"), tuple(layers), full.norm)


def attention(fields: Fields) -> AttentionSpec:
    """Returns full attention with a gate at its output; a quarter of a head is rotated."""
    num_heads, num_kv_heads, head_dim = heads_of(fields, HEAD_DIM)
    bias = fields.flag("attention_bias", False)
    max_position = fields.size("max_position_embeddings")
    return AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        rope=one_rope(fields, head_dim, max_position, mrope=INTERLEAVED, partial=PARTIAL_ROTARY),
        scale=1 / math.sqrt(head_dim),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        gated=True,
    )


def layer_kinds(fields: Fields, num_layers: int) -> tuple[LayerKind, ...]:
    """Returns the kind of each layer: `layer_types`, or full attention in every
    `full_attention_interval`-th layer. Raises UnsupportedModel for other kinds."""
    named = fields.get("layer_types")
    if named is None:
        interval = fields.size("full_attention_interval", _FULL_ATTENTION_INTERVAL)
        named = [
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(num_layers)
        ]
    if (
        not isinstance(named, list)
        or len(named) != num_layers
        or not all(isinstance(kind, str) for kind in named)
    ):
        raise fields.wrong("layer_types", f"a list of {num_layers} names")
    unknown = next((kind for kind in named if kind not in _KINDS), None)
    if unknown is not None:
        raise UnsupportedModel(
            f"{fields.source}: layer_types has {shortened(unknown)}; this version knows"
            " full_attention and linear_attention."
        )
    kinds = tuple(_KINDS[kind] for kind in named)
    if "full_attention" not in kinds:
        raise UnsupportedModel(
            f"{fields.source}: no layer has full attention; this version needs at least one."
        )
    return kinds


def linear_attention(fields: Fields) -> LinearAttentionConfig:
    """Returns the sizes of the gated delta nets, in elements. Raises CheckpointError where heads do
    not divide, UnsupportedModel for a convolution of one token."""
    linear = LinearAttentionConfig(
        num_key_heads=fields.size("linear_num_key_heads", 16),
        num_value_heads=fields.size("linear_num_value_heads", 32),
        key_head_dim=fields.size("linear_key_head_dim", 128),
        value_head_dim=fields.size("linear_value_head_dim", 128),
        conv_kernel=fields.size("linear_conv_kernel_dim", 4),
    )
    if linear.num_value_heads % linear.num_key_heads:
        raise CheckpointError(
            f"{fields.source}: linear_num_value_heads {linear.num_value_heads} is not a multiple of"
            f" linear_num_key_heads {linear.num_key_heads}."
        )
    if linear.conv_kernel < 2:
        raise UnsupportedModel(
            f"{fields.source}: linear_conv_kernel_dim is 1; this version needs at least 2."
        )
    return linear


def num_mtp_layers(fields: Fields) -> int:
    """Returns `mtp_num_hidden_layers`; 0 and a missing key mean that there is no head. Raises
    CheckpointError."""
    value = fields.get("mtp_num_hidden_layers") or 0
    if not is_int(value) or not 0 <= value < 2**31:
        raise fields.wrong("mtp_num_hidden_layers", "a number of layers")
    return cast(int, value)


def refuse_other_gates(fields: Fields) -> None:
    """Raises UnsupportedModel unless full attention has a sigmoid gate and the delta net a SiLU
    gate, and for experts."""
    if not fields.flag("attn_output_gate", True):
        raise UnsupportedModel(
            f"{fields.source}: attn_output_gate is false; this version knows gated attention only."
        )
    gate = fields.text("output_gate_type")
    if gate not in (None, "silu", "swish"):
        raise UnsupportedModel(
            f"{fields.source}: output_gate_type is {gate!r}; this version knows silu only."
        )
    if fields.get("num_experts"):
        raise UnsupportedModel(
            f"{fields.source}: num_experts is {fields.get('num_experts')}; this architecture has no"
            " experts."
        )


def value_heads(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The width of a value head; metadata have that of all of them together."""
    heads = config.get("linear_num_value_heads") or 1
    return {"linear_value_head_dim": config.get(VALUES, 0) // heads}


VALUES = "linear_value_dim"  # of a config.json that is made of metadata alone
IMAGE_TOKENS = ImageTokens(image=248056, video=248057, vision_start=248053, vision_end=248054)
BESIDE = ("model.visual.", "visual.", "mtp.")
GGUF = GgufForm(
    "qwen35",
    keys={
        "full_attention_interval": "full_attention_interval",
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
        "ssm.inner_size": VALUES,
        "rope.dimension_sections": "",  # of images
        "nextn_predict_layers": "mtp_num_hidden_layers",
    },
    behind="mtp",
    tensors={
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_out": "linear_attn.out_proj",
        "nextn.eh_proj": "fc",
        "nextn.enorm": "pre_fc_norm_embedding",
        "nextn.hnorm": "pre_fc_norm_hidden",
        "nextn.shared_head_norm": "norm",
        "nextn.embed_tokens": "embed_tokens",
        "nextn.shared_head_head": "lm_head",
    },
    norms_plus_one=True,
    tiled_heads=True,
    more=value_heads,
)
FAMILIES = {
    "Qwen3_5ForCausalLM": Family(
        "Qwen3.5", "qwen3_5_text", decoder, beside=BESIDE, mtp_layers=num_mtp_layers, gguf=GGUF
    ),
    "Qwen3_5ForConditionalGeneration": Family(
        "Qwen3.5",
        "qwen3_5",
        decoder,
        text_key="text_config",
        stacks=("model.language_model", "model"),
        beside=BESIDE,
        mtp_layers=num_mtp_layers,
        vision=qwen3_vision.without_inner_layers,
        image_tokens=IMAGE_TOKENS,
    ),
}
