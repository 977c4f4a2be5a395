"""Qwen3: Llama's layers with norms over each head of q and k; late layers may have a window."""

from __future__ import annotations

from edgespec.config.fields import Fields
from edgespec.config.layers import WindowRule
from edgespec.config.values import DecoderConfig
from edgespec.families.base import Family, GgufForm, read_attention, read_decoder, read_layer

HEAD_DIM = 128  # of files that do not say it

RULE: WindowRule = "late"


def decoder(fields: Fields) -> DecoderConfig:
    """Returns Qwen3's decoder (arXiv 2505.09388). With use_sliding_window, layers from
    max_window_layers on slide, or those of layer_types."""
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, HEAD_DIM, qkv_bias=bias, o_bias=bias, qk_norm=True)
    layer = read_layer(fields, attention)
    return read_decoder(fields, layer, RULE)


FAMILIES = {
    "Qwen3ForCausalLM": Family("Qwen3", "qwen3", decoder, window_rule=RULE, gguf=GgufForm("qwen3"))
}
