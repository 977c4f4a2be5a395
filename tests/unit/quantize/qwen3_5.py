"""Toy checkpoints of Qwen3.5: norms of (1 + w), layers of linear attention and of full attention,
an MTP head, an encoder.

As published: the text alone under model.layers, or a model of text and images under
model.language_model. Norm weights are spread and some channels carry outliers, because that is
where folding smoothing into norms goes wrong. Knows nothing of edgespec.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests import toys

TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
VISION = {
    "model_type": "qwen3_5_vision",
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 128,
}


def make(path: Path, *, images: bool = False) -> Path:
    """A checkpoint directory; with `images` the same text model inside a larger one."""
    toys.make_base(path, "qwen3", vocab=TEXT["vocab_size"])  # for its tokenizer
    for file in ("model.safetensors", "generation_config.json"):
        (path / file).unlink()
    tensors = {**text_tensors(), "mtp.fc.weight": torch.randn(128, 256).bfloat16()}
    tensors["mtp.layers.0.mlp.down_proj.weight"] = torch.randn(128, 256).bfloat16()
    config: dict[str, Any] = TEXT | {"architectures": ["Qwen3_5ForCausalLM"]}
    if images:
        tensors = {
            name.replace("model.", "model.language_model.", 1): tensor
            for name, tensor in tensors.items()
        }
        tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.randn(192, 64).bfloat16()
        tensors["model.visual.merger.linear_fc1.weight"] = torch.randn(64, 64)
        config = {
            "model_type": "qwen3_5",
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "tie_word_embeddings": True,
            "text_config": TEXT,
            "vision_config": VISION,
        }
    (path / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors"
    )
    return path


def text_tensors() -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**TEXT))
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        tensors[name] = (0.05 * noise).bfloat16()
        if name.endswith(("layernorm.weight", "model.norm.weight")):
            tensors[name] = (0.6 * noise).clamp(-0.9, 3).bfloat16()
        if name.endswith("A_log"):
            tensors[name] = noise.float()  # in float32, as such parameters are published
    tensors["model.embed_tokens.weight"][:, [5, 77]] *= 40
    return tensors


def copy_without(path: Path, out: Path, *names: str) -> Path:
    from safetensors.torch import load_file

    shutil.copytree(path, out)
    tensors = {
        name: tensor
        for name, tensor in load_file(path / "model.safetensors").items()
        if name not in names
    }
    save_file(tensors, out / "model.safetensors")
    return out
