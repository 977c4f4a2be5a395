"""Qwen3.5's mixtures of experts: its layers and MTP head, with experts in place of each MLP and one
more that all rows take."""

from __future__ import annotations

from dataclasses import replace

from edgespec.config.fields import Fields
from edgespec.config.layers import experts_of
from edgespec.config.values import DecoderConfig, MlpSpec
from edgespec.families import qwen3_5, qwen3_vision
from edgespec.families.base import Family


def decoder(fields: Fields) -> DecoderConfig:
    """Returns Qwen3.5's decoder with experts in all layers; the weights of a row's experts are
    divided by their sum."""
    inner = fields.size("moe_intermediate_size")
    shared = fields.size("shared_expert_intermediate_size")
    experts = experts_of(fields, normalized=True, shared_size=shared)
    raw = {**fields.raw, "intermediate_size": inner, "num_experts": None}
    dense = qwen3_5.decoder(replace(fields, raw=raw))
    mlp = MlpSpec(inner, experts=experts)
    return replace(dense, layers=tuple(replace(layer, mlp=mlp) for layer in dense.layers))


GGUF = replace(
    qwen3_5.GGUF,
    architecture="qwen35moe",
    keys={
        **qwen3_5.GGUF.keys,
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
)
_DEFAULTS = {
    "moe_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "shared_expert_intermediate_size": 512,
}
FAMILIES = {
    "Qwen3_5MoeForCausalLM": Family(
        "Qwen3.5-MoE",
        "qwen3_5_moe_text",
        decoder,
        defaults=_DEFAULTS,
        beside=qwen3_5.BESIDE,
        mtp_layers=qwen3_5.num_mtp_layers,
        gguf=GGUF,
    ),
    "Qwen3_5MoeForConditionalGeneration": Family(
        "Qwen3.5-MoE",
        "qwen3_5_moe",
        decoder,
        defaults=_DEFAULTS,
        text_key="text_config",
        stacks=("model.language_model", "model"),
        beside=qwen3_5.BESIDE,
        mtp_layers=qwen3_5.num_mtp_layers,
        vision=qwen3_vision.without_inner_layers,
        image_tokens=qwen3_5.IMAGE_TOKENS,
    ),
}
