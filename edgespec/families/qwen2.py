"""Qwen2 and Qwen2.5: Llama's layers with biases of q, k and v; late layers may have a window."""

from __future__ import annotations

from edgespec.config.fields import Fields
from edgespec.config.layers import WindowRule
from edgespec.config.values import DecoderConfig
from edgespec.families.base import Family, GgufForm, read_attention, read_decoder, read_layer

RULE: WindowRule = "late"


def decoder(fields: Fields) -> DecoderConfig:
    """Returns Qwen2's decoder (arXiv 2407.10671). With use_sliding_window, layers from
    max_window_layers on slide, or those of layer_types."""
    layer = read_layer(fields, read_attention(fields, qkv_bias=True))
    return read_decoder(fields, layer, RULE)


FAMILIES = {
    "Qwen2ForCausalLM": Family("Qwen2", "qwen2", decoder, window_rule=RULE, gguf=GgufForm("qwen2"))
}
