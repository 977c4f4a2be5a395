"""Toy vision-language bases: Qwen2.5-VL in the published form and in that of newer files, and
Qwen3-VL.

Knows how published checkpoints spell their configuration; tensor names come from transformers.
Knows nothing of edgespec.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from tests import shared
from tests.toys.files import Dtype, random_tensors, save, version_keys, write_json
from tests.toys.tokenizer import ENDOFTEXT, IM_END, IM_START, write_tokenizer

VlForm = Literal["published", "nested"]  # of Qwen2.5-VL: the text part at the top, or by itself
IMAGE, VIDEO, VISION_START, VISION_END = range(252, 256)  # ids, of a vocabulary of 256
PATCH, MERGE = 4, 2  # pixels of a patch's side; patches of a row's side


@shared.copied
def make_qwen2_5_vl(
    path: str | Path,
    *,
    form: VlForm = "published",
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 96,
    sections: tuple[int, int, int] = (2, 3, 3),
    tied: bool = False,
    sliding_window: int | None = None,
    max_window_layers: int = 0,
    max_position: int = 512,
    dtype: Dtype = "float32",
    seed: int = 0,
    tokenizer: bool = True,
    eos: int | list[int] | None = None,
) -> Path:
    """Write a random Qwen2.5-VL checkpoint with a small encoder and return its directory.
    `published` has the names and the flat config.json of the first files."""
    text: dict[str, Any] = {
        "attention_dropout": 0.0,
        "bos_token_id": IM_START,
        "eos_token_id": IM_END if eos is None else eos,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_position,
        "max_window_layers": max_window_layers,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "sliding_window": sliding_window or 32,
        "use_cache": True,
        "use_sliding_window": sliding_window is not None,
        "vocab_size": 256,
    }
    rope = {"mrope_section": list(sections), "type": "mrope"}
    top = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "image_token_id": IMAGE,
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": tied,
        "video_token_id": VIDEO,
        "vision_config": {
            "depth": 2,
            "fullatt_block_indexes": [1],
            "hidden_act": "silu",
            "hidden_size": 32,
            "in_chans": 3,
            "intermediate_size": 40,
            "model_type": "qwen2_5_vl",
            "num_heads": 2,
            "out_hidden_size": hidden,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 4 * PATCH,
        },
        "vision_end_token_id": VISION_END,
        "vision_start_token_id": VISION_START,
    }
    if form == "published":
        config = {**text, "rope_scaling": rope, "rope_theta": 1000000.0}
    else:
        default = {**rope, "rope_theta": 1000000.0, "rope_type": "default", "type": "default"}
        config = {"text_config": {**text, "model_type": "qwen2_5_vl_text", "rope_scaling": default}}
    config |= top | version_keys("old" if form == "published" else "new", dtype)
    return _write(Path(path), config, text, form=form, seed=seed, dtype=dtype, tokenizer=tokenizer)


@shared.copied
def make_qwen3_vl(
    path: str | Path,
    *,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 96,
    sections: tuple[int, int, int] = (6, 5, 5),
    deepstack: tuple[int, ...] = (0, 1),
    tied: bool = False,
    max_position: int = 512,
    dtype: Dtype = "float32",
    seed: int = 0,
    tokenizer: bool = True,
    eos: int | list[int] | None = None,
) -> Path:
    """Write a random Qwen3-VL checkpoint with a small encoder and return its directory. Rows from
    behind the encoder's layers `deepstack` join the first layers of the text."""
    text: dict[str, Any] = {
        "attention_bias": False,
        "bos_token_id": IM_START,
        "dtype": dtype,
        "eos_token_id": IM_END if eos is None else eos,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_position,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": list(sections),
            "rope_type": "default",
        },
        "rope_theta": 5000000,
        "use_cache": True,
        "vocab_size": 256,
    }
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": IMAGE,
        "model_type": "qwen3_vl",
        "text_config": text,
        "tie_word_embeddings": tied,
        "transformers_version": "4.57.0",
        "video_token_id": VIDEO,
        "vision_config": {
            "deepstack_visual_indexes": list(deepstack),
            "depth": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 32,
            "in_channels": 3,
            "intermediate_size": 40,
            "model_type": "qwen3_vl",
            "num_heads": 2,
            "num_position_embeddings": 16,
            "out_hidden_size": hidden,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": VISION_END,
        "vision_start_token_id": VISION_START,
    }
    return _write(
        Path(path), config, text, form="nested", seed=seed, dtype=dtype, tokenizer=tokenizer
    )


def _write(
    path: Path,
    config: dict[str, Any],
    text: dict[str, Any],
    *,
    form: VlForm,
    seed: int,
    dtype: Dtype,
    tokenizer: bool,
) -> Path:
    import transformers

    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", config)
    eos = text["eos_token_id"]
    write_json(
        path / "generation_config.json",
        {"bos_token_id": IM_START, "eos_token_id": [eos, ENDOFTEXT] if eos == IM_END else eos},
    )
    if tokenizer:
        write_tokenizer(path, text["vocab_size"], text["max_position_embeddings"])
    with torch.device("meta"):
        made = transformers.AutoConfig.from_pretrained(path)
        model: Any = getattr(transformers, config["architectures"][0])(made)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    tensors = random_tensors(shapes, seed, dtype)
    # Rows of images are as strong as those of tokens, which layers add to
    for name in tensors:
        if "merger" in name and name.endswith(("mlp.2.weight", "linear_fc2.weight")):
            tensors[name] = 0.5 * tensors[name]
    if form == "published":
        tensors = {_published(name): tensor for name, tensor in tensors.items()}
    save(path, tensors, 1)
    return path


def _published(name: str) -> str:
    """Where the first files have what transformers 5 calls `name`."""
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def load_vl(path: str | Path) -> Any:
    """The checkpoint as a transformers model: float32, eager attention, evaluation mode."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    return transformers.AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
