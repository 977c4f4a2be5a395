"""Qwen2.5-VL: Qwen2's layers behind an image encoder."""

from __future__ import annotations

from edgespec.families import qwen2, qwen2_5_vision
from edgespec.families.base import Family

FAMILIES = {
    "Qwen2_5_VLForConditionalGeneration": Family(
        "Qwen2.5-VL",
        "qwen2_5_vl",
        qwen2.decoder,
        text_key="text_config",
        stacks=("model.language_model", "model"),
        beside=("model.visual.", "visual."),
        vision=qwen2_5_vision.vision,
    )
}
