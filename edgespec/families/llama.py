"""Llama: pre-norm layers, SwiGLU, full attention; biases where the file says so."""

from __future__ import annotations

from edgespec.config.fields import Fields
from edgespec.config.values import DecoderConfig
from edgespec.families.base import Family, GgufForm, read_attention, read_decoder, read_layer


def decoder(fields: Fields) -> DecoderConfig:
    """Returns Llama's decoder (arXiv 2302.13971). Its first configurations have no
    num_key_value_heads: they are older than grouped heads."""
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, needs_kv_heads=False, qkv_bias=bias, o_bias=bias)
    mlp_bias = fields.flag("mlp_bias", False)
    return read_decoder(fields, read_layer(fields, attention, mlp_bias=mlp_bias))


GGUF = GgufForm("llama", permuted=True)  # Mistral's models as well
FAMILIES = {"LlamaForCausalLM": Family("Llama", "llama", decoder, gguf=GGUF)}
