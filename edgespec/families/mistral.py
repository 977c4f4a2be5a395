"""Mistral: Llama's layers without biases, and a window over all of them, or over those that
`layer_types` names."""

from __future__ import annotations

from edgespec.config.fields import Fields
from edgespec.config.layers import WindowRule
from edgespec.config.values import DecoderConfig
from edgespec.families.base import Family, read_attention, read_decoder, read_layer

RULE: WindowRule = "all"


def decoder(fields: Fields) -> DecoderConfig:
    """Returns Mistral's decoder (arXiv 2310.06825). transformers reads `layer_types` with its
    Ministral classes, vLLM here as well."""
    layer = read_layer(fields, read_attention(fields))
    return read_decoder(fields, layer, RULE)


FAMILIES = {"MistralForCausalLM": Family("Mistral", "mistral", decoder, window_rule=RULE)}
