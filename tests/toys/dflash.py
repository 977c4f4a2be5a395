"""Toy DFlash drafts in the three layouts that are found on disk.

Knows how each layout spells its configuration and names its tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

from tests.toys.draft import draft_vocabulary
from tests.toys.files import (
    Dtype,
    random_tensors,
    read_base_config,
    save,
    version_keys,
    write_json,
)

Layout = Literal["z-lab", "modelopt", "speculators"]


def make_dflash(
    path: str | Path,
    base_path: str | Path,
    layout: Layout = "z-lab",
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 96,
    block_size: int = 4,
    block_in: Literal["top", "inner", "both"] = "top",
    mask_token: int | None = None,
    aux_layers: Iterable[int] | None = None,
    layer_types: list[str] | None = None,
    window: int | None = None,
    use_swa: bool = False,
    causal: bool | None = None,
    is_causal: bool | None = None,
    draft_vocab: int | None = None,
    own_embedding: bool = False,
    fused: bool = False,
    renamed: bool = False,
    attention_bias: bool = False,
    rope_theta: float | None = None,
    dtype: Dtype = "float32",
    shards: int = 1,
    seed: int = 2,
) -> Path:
    """Write a random DFlash draft for the base at `base_path` and return its directory.

    `aux_layers` are hidden_states indices, written in the layout's own convention; None leaves them
    out, which means z-lab's rule, and that many as the draft has layers (speculators has no such
    rule and names them). The mask is the last id of the vocabulary where none is given. `fused`
    stores q, k, v in one; `renamed` is the spelling with context_proj.
    """
    path, base = Path(path), read_base_config(Path(base_path))
    path.mkdir(parents=True, exist_ok=True)
    width, vocab, depth = base["hidden_size"], base["vocab_size"], base["num_hidden_layers"]
    span = max(1, depth - 3) - 1
    ruled = (
        [depth // 2] if layers == 1 else [round(1 + i * span / (layers - 1)) for i in range(layers)]
    )
    aux_layer_ids = [i + 1 for i in ruled] if aux_layers is None else list(aux_layers)
    mask = vocab - 1 if mask_token is None else mask_token
    base_rope = base.get("rope_parameters") or {}
    layer_keys: dict[str, Any] = {
        "attention_bias": attention_bias,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": intermediate,
        "max_position_embeddings": base["max_position_embeddings"],
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": rope_theta or base.get("rope_theta") or base_rope["rope_theta"],
        "tie_word_embeddings": False,
        "vocab_size": vocab,
    }
    if layer_types is not None or layout == "modelopt":
        layer_keys["layer_types"] = layer_types or ["full_attention"] * layers
    if window is not None:
        layer_keys |= {"sliding_window": window, "use_sliding_window": layer_types is not None}
    inner: dict[str, Any] = {"mask_token_id": mask}
    if aux_layers is not None or layout == "modelopt":
        inner["target_layer_ids"] = [i - 1 for i in aux_layer_ids]
    if use_swa:
        inner |= {"use_swa": True, "swa_window_size": window}
    if causal is not None or layout == "modelopt":
        inner["causal"] = bool(causal)
    if block_in != "top":
        inner["block_size"] = block_size
    top = {} if block_in == "inner" else {"block_size": block_size}
    top |= {} if is_causal is None else {"is_causal": is_causal}
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": inner,
        "num_target_layers": depth,
        **layer_keys,
        **top,
    }
    if layout == "z-lab":
        config |= {
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            **version_keys("old", dtype),
        }
    elif layout == "modelopt":
        config["torch_dtype"] = dtype
    else:
        config = {
            "architectures": ["DFlashSpeculator"],
            "aux_hidden_state_layer_ids": aux_layer_ids,
            "block_size": block_size,
            "draft_vocab_size": draft_vocab or vocab,
            "mask_token_id": mask,
            "sliding_window_non_causal": causal is False,
            "speculators_config": {
                "algorithm": "dflash",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": block_size - 1}
                ],
                "verifier": {"name_or_path": base["name"], "architectures": base["architectures"]},
            },
            "speculators_model_type": "dflash",
            "speculators_version": "0.5.0",
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "transformer_layer_config": layer_keys,
            **version_keys("new", dtype),
        }
    write_json(path / "config.json", config)

    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(aux_layer_ids) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for i in range(layers):
        shapes |= _dflash_layer(
            f"layers.{i}", width, heads * head_dim, kv_heads * head_dim, intermediate, head_dim
        )
        if attention_bias:
            rows = {
                "q": heads * head_dim,
                "k": kv_heads * head_dim,
                "v": kv_heads * head_dim,
                "o": width,
            }
            shapes |= {f"layers.{i}.self_attn.{x}_proj.bias": (count,) for x, count in rows.items()}
    if draft_vocab is not None:
        shapes["lm_head.weight"] = (draft_vocab, width)
    if own_embedding:
        shapes["embed_tokens.weight"] = (vocab, width)
    tensors = random_tensors(shapes, seed, dtype)
    if draft_vocab is not None:
        used = draft_vocabulary(vocab, draft_vocab, base["eos_ids"], seed)
        tensors["d2t"] = used - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, used, True)
    save(path, _respelt(tensors, layers, fused=fused, renamed=renamed), shards)
    return path


def _dflash_layer(
    layer: str, width: int, q: int, kv: int, inner: int, dim: int
) -> dict[str, tuple[int, ...]]:
    return {
        f"{layer}.self_attn.q_proj.weight": (q, width),
        f"{layer}.self_attn.k_proj.weight": (kv, width),
        f"{layer}.self_attn.v_proj.weight": (kv, width),
        f"{layer}.self_attn.o_proj.weight": (width, q),
        f"{layer}.self_attn.q_norm.weight": (dim,),
        f"{layer}.self_attn.k_norm.weight": (dim,),
        f"{layer}.mlp.gate_proj.weight": (inner, width),
        f"{layer}.mlp.up_proj.weight": (inner, width),
        f"{layer}.mlp.down_proj.weight": (width, inner),
        f"{layer}.input_layernorm.weight": (width,),
        f"{layer}.post_attention_layernorm.weight": (width,),
    }


def _respelt(
    tensors: dict[str, torch.Tensor], layers: int, *, fused: bool, renamed: bool
) -> dict[str, torch.Tensor]:
    """The same draft under the names of other exports."""
    groups = {
        "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    }
    for layer in range(layers if fused else 0):
        for joint, parts in groups.items():
            parent = f"layers.{layer}.{joint.partition('.')[0]}"
            for kind in ("weight", "bias"):
                names = [f"{parent}.{part}.{kind}" for part in parts]
                if names[0] in tensors:
                    tensors[f"layers.{layer}.{joint}.{kind}"] = torch.cat(
                        [tensors.pop(name) for name in names]
                    )
    if renamed:
        for ours, theirs in (
            ("fc", "context_proj"),
            ("hidden_norm", "context_norm"),
            ("norm", "final_norm"),
        ):
            tensors[f"{theirs}.weight"] = tensors.pop(f"{ours}.weight")
    return tensors
