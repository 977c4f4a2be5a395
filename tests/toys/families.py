"""Toy bases whose files look other than Llama's: Phi-3 with Phi-4-mini's form, and Gemma-3's text.

Knows how published checkpoints spell their configuration; tensor names come from transformers.
Knows nothing of edgespec.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from tests import shared
from tests.toys.files import Dtype, random_tensors, save, version_keys, write_json
from tests.toys.tokenizer import ENDOFTEXT, IM_END, IM_START, write_tokenizer

Stack = Literal["text", "nested", "published"]  # of Gemma-3: alone, or beside an encoder
_VISION = {
    "hidden_size": 16,
    "image_size": 16,
    "intermediate_size": 16,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 4,
    "vision_use_head": False,
}


@shared.copied
def make_phi3(
    path: str | Path,
    *,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 96,
    vocab: int = 256,
    tied: bool = False,
    partial_rotary: float = 1.0,
    longrope: int | None = None,
    sliding_window: int | None = None,
    max_position: int = 512,
    dtype: Dtype = "float32",
    seed: int = 0,
    tokenizer: bool = True,
    eos: int | list[int] | None = None,
) -> Path:
    """Write a random Phi-3 checkpoint and return its directory. `longrope` is the original length
    of its scaling; Phi-4-mini is tied, has longrope, and rotates three quarters of a head."""
    config: dict[str, Any] = {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": IM_START,
        "embd_pdrop": 0.0,
        "eos_token_id": IM_END if eos is None else eos,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_position,
        "model_type": "phi3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "original_max_position_embeddings": longrope or max_position,
        "pad_token_id": ENDOFTEXT,
        "partial_rotary_factor": partial_rotary,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": sliding_window,
        "tie_word_embeddings": tied,
        "vocab_size": vocab,
        **version_keys("old", dtype),
    }
    if longrope is not None:
        pairs = int(hidden // heads * partial_rotary) // 2
        config["rope_scaling"] = {
            "long_factor": [1.0 + 2.5 * i / pairs for i in range(pairs)],
            "short_factor": [1.0 + 0.3 * i / pairs for i in range(pairs)],
            "type": "longrope",
        }
    return _write(Path(path), config, seed=seed, dtype=dtype, tokenizer=tokenizer)


@shared.copied
def make_gemma3(
    path: str | Path,
    *,
    stack: Stack = "text",
    layers: int = 4,
    hidden: int = 80,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 96,
    vocab: int = 256,
    tied: bool = True,
    scalar: int = 24,
    pattern: int = 3,
    sliding_window: int = 7,
    rope: Mapping[str, Any] | None = None,
    spelling: Literal["old", "new"] = "old",
    max_position: int = 512,
    dtype: Dtype = "float32",
    seed: int = 0,
    tokenizer: bool = True,
    eos: int | list[int] | None = None,
) -> Path:
    """Write a random Gemma-3 checkpoint and return its directory. Every `pattern`-th layer has full
    attention; its rotary embedding is scaled by `rope`.

    `nested` and `published` put the text beside a small encoder, under the names of transformers 5
    and under those of the published files.
    """
    text: dict[str, Any] = {
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "eos_token_id": IM_END if eos is None else eos,
        "final_logit_softcapping": None,
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_position,
        "model_type": "gemma3_text",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "query_pre_attn_scalar": scalar,
        "rms_norm_eps": 1e-6,
        "sliding_window": sliding_window,
        "vocab_size": vocab,
        **_gemma_ropes(dict(rope or {}), spelling),
        **version_keys(spelling, dtype),
    }
    if spelling == "old":
        text["sliding_window_pattern"] = pattern
    else:
        kinds = ("sliding_attention", "full_attention")
        text["layer_types"] = [kinds[(i + 1) % pattern == 0] for i in range(layers)]
    top = {"bos_token_id": IM_START, "tie_word_embeddings": tied}
    config = {"architectures": ["Gemma3ForCausalLM"], **text, **top}
    if stack != "text":
        tokens = ("boi_token_index", "eoi_token_index", "image_token_index")
        config = {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": text["eos_token_id"],
            "mm_tokens_per_image": 4,
            "model_type": "gemma3",
            "text_config": text,
            "vision_config": _VISION,
            **{name: vocab - 1 - i for i, name in enumerate(tokens)},
            **top,
            **version_keys(spelling, dtype),
        }
    return _write(Path(path), config, seed=seed, dtype=dtype, tokenizer=tokenizer, published=stack)


def _gemma_ropes(scaling: dict[str, Any], spelling: str) -> dict[str, Any]:
    """Local and global rotary embeddings, whose bases lie far apart."""
    if spelling == "old":
        keys = {"rope_local_base_freq": 100.0, "rope_theta": 1000000.0}
        return keys | {"rope_scaling": scaling or None}
    full = {"rope_type": "default", "rope_theta": 1000000.0, **scaling}
    local = {"rope_type": "default", "rope_theta": 100.0}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def _write(
    path: Path,
    config: dict[str, Any],
    *,
    seed: int,
    dtype: Dtype,
    tokenizer: bool,
    published: Stack = "text",
) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", config)
    eos = config["eos_token_id"]
    write_json(
        path / "generation_config.json",
        {"bos_token_id": IM_START, "eos_token_id": [eos, ENDOFTEXT] if eos == IM_END else eos},
    )
    text = config.get("text_config", config)
    if tokenizer:
        write_tokenizer(path, text["vocab_size"], text["max_position_embeddings"])
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    tensors = random_tensors(shapes, seed, dtype)
    if text["model_type"] == "gemma3_text":  # its norms are stored around 0
        norms = {n for n in tensors if n.endswith("norm.weight") and "vision" not in n}
        tensors |= {name: tensors[name] - 1 for name in norms}
        # Scaled, it is no stronger than what a layer adds: or each token would follow itself.
        tensors |= {name: tensors[name] / 3 for name in tensors if "embed_tokens" in name}
    if published == "published":
        tensors = {_published(name): tensor for name, tensor in tensors.items()}
    save(path, tensors, 1)
    return path


def _published(name: str) -> str:
    """Where Gemma-3's published files have what transformers 5 calls `name`."""
    stack = "model.language_model."
    if name.startswith(stack):
        return f"language_model.model.{name.removeprefix(stack)}"
    return name.removeprefix("model.")
