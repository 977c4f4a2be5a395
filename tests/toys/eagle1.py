"""Toy EAGLE-1 drafts in the two layouts that are found on disk: SafeAILab's and ModelOpt's.

Knows how each layout spells its configuration and names its tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from tests.toys.draft import draft_vocabulary
from tests.toys.files import (
    Dtype,
    random_tensors,
    read_base_config,
    rope_keys,
    save,
    version_keys,
    write_json,
    write_pickle,
)

Eagle1Layout = Literal["eagle", "modelopt"]


def make_eagle1(
    path: str | Path,
    base_path: str | Path,
    layout: Eagle1Layout = "eagle",
    *,
    layers: int = 1,
    fc_bias: bool | None = None,
    names_bias: bool = False,
    embedding: Literal["base", "own"] | None = None,
    first_norm: bool = False,
    last_norm: bool = False,
    norm_output: bool = False,
    draft_vocab: int | None = None,
    own_head: bool = False,
    qkv_bias: bool = False,
    head_dim: int | None = None,
    rope_theta: float | None = None,
    dtype: Dtype = "float32",
    seed: int = 1,
    pickle: bool = False,
) -> Path:
    """Write a random EAGLE-1 draft for the base at `base_path` and return its directory.

    As published, SafeAILab's have a bias at fc, which their config need not name, and a copy of the
    base's embedding; ModelOpt's have neither. A `draft_vocab` needs an lm_head of the draft's own.
    """
    path, base = Path(path), read_base_config(Path(base_path))
    path.mkdir(parents=True, exist_ok=True)
    bias = fc_bias if fc_bias is not None else layout == "eagle"
    embedding = "base" if embedding is None and layout == "eagle" else embedding
    width, heads = base["hidden_size"], base["num_attention_heads"]
    dim = head_dim or base.get("head_dim") or width // heads
    kv_heads, inner = base["num_key_value_heads"], base["intermediate_size"]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM" if layout == "eagle" else "LlamaForCausalLMEagle"],
        "bos_token_id": base["bos_token_id"],
        "eos_token_id": base["eos_token_id"],
        "hidden_act": "silu",
        "hidden_size": width,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": base["vocab_size"],
        **({} if rope_theta is None else rope_keys(None, "old", rope_theta)),
        **version_keys("old", dtype),
    }
    if names_bias:
        config["bias"] = bias
    if qkv_bias:
        config["qkv_bias"] = True
    if dim * heads != width:
        config["head_dim"] = dim
    if draft_vocab is not None:
        config["draft_vocab_size"] = draft_vocab
    if layout == "modelopt":
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": [],
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "use_aux_hidden_state": False,
            "use_input_layernorm_in_first_layer": first_norm,
            "use_last_layernorm": last_norm,
            "use_mtp_layernorm": False,
            **({"return_hidden_post_norm": True} if norm_output else {}),
        }
    write_json(path / "config.json", config)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, 2 * width)}
    if bias:
        shapes["fc.bias"] = (width,)
    for i in range(layers):
        rows = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
        for name, count in rows.items():
            shapes[f"layers.{i}.self_attn.{name}_proj.weight"] = (count, width)
            if qkv_bias:
                shapes[f"layers.{i}.self_attn.{name}_proj.bias"] = (count,)
        shapes |= {
            f"layers.{i}.self_attn.o_proj.weight": (width, heads * dim),
            f"layers.{i}.mlp.gate_proj.weight": (inner, width),
            f"layers.{i}.mlp.up_proj.weight": (inner, width),
            f"layers.{i}.mlp.down_proj.weight": (width, inner),
            f"layers.{i}.post_attention_layernorm.weight": (width,),
        }
        if i or first_norm:
            shapes[f"layers.{i}.input_layernorm.weight"] = (width,)
    if last_norm:
        shapes["norm.weight"] = (width,)
    if own_head:
        shapes["lm_head.weight"] = (draft_vocab or base["vocab_size"], width)
    if embedding == "own":
        shapes["embed_tokens.weight"] = (base["vocab_size"], width)
    tensors = random_tensors(shapes, seed, dtype)
    if embedding == "base":
        tensors["embed_tokens.weight"] = base_embedding(Path(base_path)).to(getattr(torch, dtype))
    if draft_vocab is not None:
        used = draft_vocabulary(base["vocab_size"], draft_vocab, base["eos_ids"], seed)
        tensors["d2t"] = used - torch.arange(draft_vocab)
    save(path, tensors, shards=1)
    return write_pickle(path) if pickle else path


def base_embedding(path: Path) -> torch.Tensor:
    """The embedding of a base, [V, H]."""
    for file in sorted(path.glob("*.safetensors")):
        tensors = load_file(file)
        if "model.embed_tokens.weight" in tensors:
            return tensors["model.embed_tokens.weight"]
    raise ValueError(f"{path} has no embedding")
