"""Toy bases with experts, in both layouts on disk: matrix by matrix, and all of a layer in one
tensor.

Knows how published checkpoints spell their configuration; tensor names come from transformers.
Knows nothing of edgespec.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests import shared
from tests.toys.files import Dtype, random_tensors, save, version_keys, write_json
from tests.toys.tokenizer import ENDOFTEXT, IM_END, IM_START, write_tokenizer


@shared.copied
def make_qwen3_moe(
    path: str | Path,
    *,
    fused: bool = False,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 96,
    experts: int = 6,
    per_token: int = 2,
    expert_size: int = 48,
    normalized: bool = True,
    sparse_step: int = 1,
    dense_layers: tuple[int, ...] = (),
    sliding_window: int | None = None,
    vocab: int = 256,
    tied: bool = False,
    max_position: int = 512,
    dtype: Dtype = "float32",
    shards: int = 1,
    seed: int = 0,
    tokenizer: bool = True,
    eos: int | list[int] | None = None,
) -> Path:
    """Write a random Qwen3-MoE checkpoint and return its directory. `fused` writes the experts of
    a layer as two tensors, as transformers 5 holds them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "bos_token_id": IM_START,
        "decoder_sparse_step": sparse_step,
        "eos_token_id": IM_END if eos is None else eos,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_position,
        "mlp_only_layers": list(dense_layers),
        "model_type": "qwen3_moe",
        "moe_intermediate_size": expert_size,
        "norm_topk_prob": normalized,
        "num_attention_heads": heads,
        "num_experts_per_tok": per_token,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_local_experts" if fused else "num_experts": experts,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": sliding_window,
        "tie_word_embeddings": tied,
        "use_sliding_window": sliding_window is not None,
        "vocab_size": vocab,
        **version_keys("old", dtype),
    }
    write_json(path / "config.json", config)
    ends = [IM_END, ENDOFTEXT] if eos is None else eos
    write_json(path / "generation_config.json", {"bos_token_id": IM_START, "eos_token_id": ends})
    if tokenizer:
        write_tokenizer(path, vocab, max_position)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        del shapes["lm_head.weight"]
    tensors = random_tensors(shapes, seed, dtype)
    save(path, tensors if fused else single_experts(tensors), shards)
    return path


def single_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with experts matrix by matrix."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, part = name.rpartition(".")
        if not prefix.endswith(".experts"):
            found[name] = tensor
            continue
        for e, matrix in enumerate(tensor):
            halves = matrix.chunk(2) if part == "gate_up_proj" else (matrix,)
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for own, half in zip(names, halves, strict=True):
                found[f"{prefix}.{e}.{own}.weight"] = half.clone()
    return found
