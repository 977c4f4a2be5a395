"""Qwen3-VL: Qwen3's layers behind an image encoder."""

from __future__ import annotations

from edgespec.families import qwen3, qwen3_vision
from edgespec.families.base import Family

FAMILIES = {
    "Qwen3VLForConditionalGeneration": Family(
        "Qwen3-VL",
        "qwen3_vl",
        qwen3.decoder,
        text_key="text_config",
        stacks=("model.language_model", "model"),
        beside=("model.visual.", "visual."),
        vision=qwen3_vision.vision,
    )
}
