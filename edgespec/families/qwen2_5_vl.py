"""Qwen2.5-VL: Qwen2's layers behind an image encoder, with a section of the rotated pairs for each
axis of a position.

Defaults for missing keys are those of transformers 5.14. Published files have the text part at the
top, newer ones under `text_config`.
"""

from __future__ import annotations

from edgespec.config.fields import Fields
from edgespec.config.ropes import MRope
from edgespec.config.values import DecoderConfig, ImageTokens
from edgespec.errors import CheckpointError
from edgespec.families import qwen2_5_vision
from edgespec.families.base import (
    SECTIONS,
    Family,
    GgufForm,
    read_attention,
    read_decoder,
    read_layer,
    sections_of,
)
from edgespec.families.qwen2 import RULE

SECTIONED = MRope(interleaved=False)
_DEFAULTS = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "max_position_embeddings": 32768,
    "max_window_layers": 80,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "vocab_size": 152064,
}


def decoder(fields: Fields) -> DecoderConfig:
    """Returns Qwen2.5-VL's decoder (arXiv 2502.13923): Qwen2's, with M-RoPE in three sections.
    Raises CheckpointError for a file that does not say the sections."""
    attention = read_attention(fields, needs_kv_heads=False, qkv_bias=True, mrope=SECTIONED)
    if not attention.rope.mrope_section:
        message = f"{fields.source}: 'mrope_section' is missing in rope_scaling."
        raise CheckpointError(message, "Add it, or download the checkpoint again.")
    return read_decoder(fields, read_layer(fields, attention), RULE)


# Of the tokenizers of Qwen2.5 and Qwen3
IMAGE_TOKENS = ImageTokens(image=151655, video=151656, vision_start=151652, vision_end=151653)
GGUF = GgufForm(
    "qwen2vl",
    keys={"rope.dimension_sections": SECTIONS},
    lists=("rope.dimension_sections",),
    more=sections_of,
    encoder=qwen2_5_vision.GGUF,
)
FAMILIES = {
    "Qwen2_5_VLForConditionalGeneration": Family(
        "Qwen2.5-VL",
        "qwen2_5_vl",
        decoder,
        defaults=_DEFAULTS,
        text_key="text_config",
        text_at_top=True,
        stacks=("model.language_model", "model"),
        beside=("visual.", "model.visual."),
        window_rule=RULE,
        vision=qwen2_5_vision.vision,
        image_tokens=IMAGE_TOKENS,
        vision_names=qwen2_5_vision.NAMES,
        gguf=GGUF,
    )
}
