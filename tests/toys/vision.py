"""Tiny vision-language models with random weights in their files' own forms, by transformers'
classes: what an image encoder is compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.toys.tokenizer import write_tokenizer

VOCAB = 512
IMAGE_TOKENS = {
    "image_token_id": 500,
    "video_token_id": 501,
    "vision_start_token_id": 502,
    "vision_end_token_id": 503,
}
WINDOWS: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_heads": 4,
    "out_hidden_size": 32,
    "window_size": 56,
    "fullatt_block_indexes": [1, 3],
}
DEEPSTACK: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_heads": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}
PLAIN = {key: value for key, value in DEEPSTACK.items() if key != "deepstack_visual_indexes"}
FAMILIES = {"qwen2_5_vl": WINDOWS, "qwen3_vl": DEEPSTACK, "qwen3_5": PLAIN}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
# Of a language model, where a family's is of another form
TEXTS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "layer_types": ["full_attention"],
        "head_dim": 32,
        "rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
    }
}


def write_vlm(path: Path, model_type: str, seed: int = 0, **vision: Any) -> PreTrainedModel:
    """Writes a tiny checkpoint of a family to `path` and returns its model; `vision` are keys of
    its `vision_config` that differ."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": ROPE,
        **TEXTS.get(model_type, {}),
    }
    config = AutoConfig.for_model(
        model_type,
        text_config=text,
        vision_config=FAMILIES[model_type] | vision,
        **IMAGE_TOKENS,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases are zeros, and norms ones
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    write_tokenizer(path, VOCAB, 512)
    (path / "preprocessor_config.json").write_text(json.dumps(processor(config.vision_config)))
    return model


def processor(vision: Any) -> dict[str, Any]:
    """The preprocessor_config.json of an encoder."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
        "min_pixels": 3136,
        "max_pixels": 1003520,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
