"""Gemma-3, its text part: sliding layers with a full one after every fifth, each kind with a rotary
embedding of its own; norms around 0 before and after attention and MLP; scaled embeddings.

Defaults for missing keys are those of transformers 5.14: published files leave out what is usual.
Knows the text part only, which stands alone or under `text_config`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edgespec.config.fields import Fields
from edgespec.config.layers import activation_of, heads_of, named_layers, num_layers_of
from edgespec.config.ropes import parse_rope
from edgespec.config.values import (
    AttentionSpec,
    DecoderConfig,
    LayerSpec,
    MlpSpec,
    NormNames,
    NormSpec,
    RopeConfig,
)
from edgespec.errors import UnsupportedModel
from edgespec.families.base import Family, GgufForm

FULL, SLIDING = "full_attention", "sliding_attention"
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
NORMS = NormNames(
    before_mixer="input_layernorm",
    after_mixer="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "vocab_size": 262208,
}


def decoder(fields: Fields) -> DecoderConfig:
    """Returns Gemma-3's decoder (arXiv 2503.19786): each layer by its kind in layer_types, or by
    sliding_window_pattern. Raises UnsupportedModel for soft-caps and other kinds of layers."""
    refuse_unusual(fields)
    hidden_size, norm = fields.size("hidden_size"), NormSpec(fields.number("rms_norm_eps"), True)
    activation = activation_of(fields, "hidden_activation", "gelu_tanh")
    mlp = MlpSpec(fields.size("intermediate_size"), activation)
    mixers = {kind: attention(fields, kind) for kind in (FULL, SLIDING)}
    layers = tuple(LayerSpec(mixers[kind], mlp, norm, NORMS) for kind in layer_kinds(fields))
    return DecoderConfig(hidden_size, layers, norm, embedding_scale=math.sqrt(hidden_size))


def layer_kinds(fields: Fields) -> list[str]:
    """Returns full_attention or sliding_attention for each layer. Raises UnsupportedModel for other
    kinds."""
    num_layers, named = num_layers_of(fields), fields.get("layer_types")
    if named is None:
        pattern = fields.size("sliding_window_pattern", 6)
        return [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]
    kinds = named_layers(fields, named, num_layers)
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        raise UnsupportedModel(
            f"{fields.source}: layer_types has {', '.join(unknown)}; this version knows {FULL} and"
            f" {SLIDING}."
        )
    return kinds


def attention(fields: Fields, kind: str) -> AttentionSpec:
    """Returns the attention of one kind of layer: norms over the heads, and a scale that a key
    says."""
    num_heads, num_kv_heads, head_dim = heads_of(fields)
    bias = fields.flag("attention_bias", False)
    return AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        rope=rope_of(fields, kind, head_dim),
        scale=fields.number("query_pre_attn_scalar") ** -0.5,
        window=fields.size("sliding_window") if kind == SLIDING else None,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )


def rope_of(fields: Fields, kind: str, head_dim: int) -> RopeConfig:
    """`rope_parameters` by the kind of layer; or rope_theta with rope_scaling for full attention,
    and rope_local_base_freq for the others."""
    ropes = fields.optional_section("rope_parameters")
    if ropes.raw and not {FULL, SLIDING} & set(ropes.raw):
        raise fields.wrong("rope_parameters", f"an object with {FULL} and {SLIDING}")
    by_kind = ropes.optional_section(kind).raw
    if kind == FULL:
        theta = fields.number("rope_theta", GLOBAL_THETA)
        by_kind = {**by_kind, **fields.optional_section("rope_scaling").raw}
    else:
        theta = fields.number("rope_local_base_freq", LOCAL_THETA)
    entry: Mapping[str, Any] = {"rope_theta": theta, **by_kind}
    source = f"{fields.source} (rope of {kind})"
    return parse_rope(
        Fields(entry, source), fields, head_dim, fields.size("max_position_embeddings")
    )


def refuse_unusual(fields: Fields) -> None:
    """Raises UnsupportedModel for soft-caps, which Gemma-2 has, and for attention to later tokens,
    which embedding models have."""
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if fields.get(key) is not None:
            raise UnsupportedModel(
                f"{fields.source}: {key} is {fields.get(key)}; this version knows Gemma-3 without"
                " soft-caps."
            )
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedModel(
            f"{fields.source}: use_bidirectional_attention is true; this version knows causal"
            " attention only."
        )


LARGEST_LAYERS = 62  # of the one size whose heads are not as wide as they are scaled


def attention_scale(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`query_pre_attn_scalar`, which no metadata says: the width of a head, but for the 27B."""
    hidden, heads = config.get("hidden_size", 0), config.get("num_attention_heads") or 1
    largest = config.get("num_hidden_layers") == LARGEST_LAYERS
    return {"query_pre_attn_scalar": hidden // heads if largest else config.get("head_dim")}


GGUF = GgufForm(
    "gemma3",
    keys={
        "attention.sliding_window": "sliding_window",
        "rope.freq_base_swa": "rope_local_base_freq",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    tensors={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    norms_plus_one=True,
    more=attention_scale,
)
FAMILIES = {
    "Gemma3ForCausalLM": Family("Gemma-3", "gemma3_text", decoder, defaults=_DEFAULTS, gguf=GGUF),
    "Gemma3ForConditionalGeneration": Family(
        "Gemma-3",
        "gemma3",
        decoder,
        defaults=_DEFAULTS,
        text_key="text_config",
        stacks=("model.language_model", "language_model.model"),
        beside=(
            *("vision_tower.", "multi_modal_projector."),
            *("model.vision_tower.", "model.multi_modal_projector."),
            "language_model.lm_head.",  # a copy of the embedding that some files have
        ),
    ),
}
