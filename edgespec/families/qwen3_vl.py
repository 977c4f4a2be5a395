"""Qwen3-VL: Qwen3's layers behind an image encoder, whose rotated pairs take turns between the axes
of a position.

Defaults for missing keys are those of transformers 5.14. The text part stands under `text_config`.
"""

from __future__ import annotations

from edgespec.config.fields import Fields
from edgespec.config.ropes import MRope
from edgespec.config.values import DecoderConfig
from edgespec.families import qwen3_vision
from edgespec.families.base import (
    SECTIONS,
    Family,
    GgufForm,
    read_attention,
    read_decoder,
    read_layer,
    sections_of,
)
from edgespec.families.qwen2_5_vl import IMAGE_TOKENS
from edgespec.families.qwen3 import HEAD_DIM

INTERLEAVED = MRope(interleaved=True, section=(24, 20, 20))
_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "max_position_embeddings": 128000,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
    "vocab_size": 151936,
}


def decoder(fields: Fields) -> DecoderConfig:
    """Returns Qwen3-VL's decoder (arXiv 2511.21631): Qwen3's without windows, with interleaved
    M-RoPE."""
    bias = fields.flag("attention_bias", False)
    attention = read_attention(
        fields,
        HEAD_DIM,
        needs_kv_heads=False,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        mrope=INTERLEAVED,
    )
    return read_decoder(fields, read_layer(fields, attention))


GGUF = GgufForm(
    "qwen3vl",
    keys={"rope.dimension_sections": SECTIONS, **qwen3_vision.GGUF_TEXT_KEYS},
    lists=("rope.dimension_sections",),
    more=sections_of,
    encoder=qwen3_vision.GGUF,
)
FAMILIES = {
    "Qwen3VLForConditionalGeneration": Family(
        "Qwen3-VL",
        "qwen3_vl",
        decoder,
        defaults=_DEFAULTS,
        text_key="text_config",
        stacks=("model.language_model", "model"),  # the latter of a GGUF file
        beside=("model.visual.",),
        vision=qwen3_vision.vision,
        image_tokens=IMAGE_TOKENS,
        gguf=GGUF,
    )
}
