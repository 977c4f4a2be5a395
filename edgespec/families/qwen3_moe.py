"""Qwen3-MoE: Qwen3's attention; an MLP of many experts in all layers or in some of them."""

from __future__ import annotations

from dataclasses import replace

from edgespec.config.fields import Fields, is_int
from edgespec.config.layers import WindowRule, experts_of
from edgespec.config.values import DecoderConfig, LayerSpec, MlpSpec
from edgespec.families.base import Family, GgufForm, read_attention, read_decoder, read_layer

RULE: WindowRule = "all"  # with use_sliding_window


def decoder(fields: Fields) -> DecoderConfig:
    """Returns Qwen3-MoE's decoder (arXiv 2505.09388). Every `decoder_sparse_step`-th layer has
    experts, but for those that `mlp_only_layers` names."""
    if not fields.flag("use_sliding_window", False):
        fields = replace(fields, raw={**fields.raw, "sliding_window": None})
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, qkv_bias=bias, o_bias=bias, qk_norm=True)
    dense = read_decoder(fields, read_layer(fields, attention), RULE)
    sparse = MlpSpec(
        fields.size("moe_intermediate_size"),
        experts=experts_of(fields, normalized=fields.flag("norm_topk_prob", False)),
    )
    step, only = fields.size("decoder_sparse_step", 1), dense_layers(fields)

    def with_mlp(i: int, layer: LayerSpec) -> LayerSpec:
        return layer if i in only or (i + 1) % step else replace(layer, mlp=sparse)

    layers = tuple(with_mlp(i, layer) for i, layer in enumerate(dense.layers))
    return replace(dense, layers=layers)


def dense_layers(fields: Fields) -> frozenset[int]:
    """The layers that `mlp_only_layers` names. Raises CheckpointError for other values."""
    named = fields.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(is_int(i) and i >= 0 for i in named):
        raise fields.wrong("mlp_only_layers", "a list of layers")
    return frozenset(named)


_DEFAULTS = {"moe_intermediate_size": 768, "num_experts_per_tok": 8}
GGUF = GgufForm(
    "qwen3moe",
    keys={
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    more=lambda config: {"norm_topk_prob": True},
)
FAMILIES = {
    "Qwen3MoeForCausalLM": Family("Qwen3-MoE", "qwen3_moe", decoder, defaults=_DEFAULTS, gguf=GGUF)
}
