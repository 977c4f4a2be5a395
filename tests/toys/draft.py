"""Toy EAGLE-3 drafts in the four layouts that are found on disk.

Knows how each layout spells its configuration and names its tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from tests.toys.files import (
    Dtype,
    RopeSpelling,
    random_tensors,
    read_base_config,
    rope_keys,
    save,
    version_keys,
    write_json,
    write_pickle,
)

DraftLayout = Literal["eagle", "specforge", "modelopt", "speculators"]


def make_draft(
    path: str | Path,
    base_path: str | Path,
    layout: DraftLayout,
    *,
    draft_vocab: int | None = 96,
    hidden: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate: int | None = None,
    layers: int = 1,
    seed: int = 1,
    d2t: Literal["offset", "absolute"] | None = "offset",
    t2d: bool = True,
    own_embedding: bool = False,
    own_head: bool = True,
    target_hidden_size: bool = False,
    norm_before_residual: bool | None = None,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_output: bool | None = None,
    aux_layers: Iterable[int] | None = None,
    qk_norm: bool = False,
    rope_theta: float | None = None,
    rope: Mapping[str, Any] | None = None,
    rope_spelling: RopeSpelling = "old",
    speculators_version: str = "0.3.0",
    dtype: Dtype = "float32",
    pickle: bool = False,
) -> Path:
    """Write a random EAGLE-3 draft for the base at `base_path` and return its directory.

    Sizes default to the base's. `aux_layers` are hidden_states indices, written in the layout's own
    convention; the EAGLE repository has no key for them. `draft_vocab=None` leaves out
    `draft_vocab_size` and means the base's vocabulary, for which there is no d2t; `d2t=None` with a
    smaller one is a broken checkpoint. None for a norm_x: no such key. `rope` is what a draft of a
    vision-language base says of its positions' axes.
    """
    path, base = Path(path), read_base_config(Path(base_path))
    path.mkdir(parents=True, exist_ok=True)
    vocab, width = base["vocab_size"], hidden or base["hidden_size"]
    num_draft = vocab if draft_vocab is None else draft_vocab
    target_hidden_size = target_hidden_size or width != base["hidden_size"]
    _check_draft(
        layout,
        borrows_head=not own_head,
        whole_vocab=num_draft == vocab,
        borrows_embedding=not own_embedding,
        own_width=width != base["hidden_size"],
        names_taps=aux_layers is not None,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=norm_output,
    )
    heads = heads or base["num_attention_heads"]
    default_head_dim = base.get("head_dim") or width // heads
    decoder = {
        "hidden_size": width,
        "intermediate_size": intermediate or base["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or base["num_key_value_heads"],
        "head_dim": head_dim or (default_head_dim if hidden is None else width // heads),
        "num_hidden_layers": layers,
    }
    base_layers = base["num_hidden_layers"]
    aux_layer_ids = (
        tuple(aux_layers) if aux_layers is not None else (2, base_layers // 2, base_layers - 3)
    )
    norms = {
        "norm_before_residual": norm_before_residual,
        "norm_before_fc": norm_before_fc or None,
        "fc_norm": fc_norm or None,
        "norm_output": norm_output,
    }
    head_keys = {name: value for name, value in norms.items() if value is not None}
    if draft_vocab is not None:
        head_keys["draft_vocab_size"] = draft_vocab
    if target_hidden_size:
        head_keys["target_hidden_size"] = base["hidden_size"]
    own_rope = rope_keys(rope, rope_spelling, rope_theta) if rope or rope_theta else {}
    layer_keys = {
        "attention_bias": False,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 2048,
        "model_type": "qwen3" if qk_norm else "llama",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
        **decoder,
        **own_rope,
    }
    config = _draft_config(
        layout,
        layer_keys,
        head_keys,
        base=base,
        aux_layer_ids=aux_layer_ids,
        taps_named=aux_layers is not None,
        dtype=dtype,
        rope_spelling=rope_spelling,
        speculators_version=speculators_version,
    )
    write_json(path / "config.json", config)

    shapes = _draft_shapes(
        decoder,
        first_layer="midlayer" if layout in ("eagle", "specforge") else "layers.0",
        tap_width=base["hidden_size"],
        num_aux_layers=len(aux_layer_ids),
        qk_norm=qk_norm,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
    )
    if own_head:
        shapes["lm_head.weight"] = (num_draft, width)
    if own_embedding:
        shapes["embed_tokens.weight"] = (vocab, width)
    tensors = random_tensors(shapes, seed, dtype)
    if num_draft < vocab:
        used = draft_vocabulary(vocab, num_draft, base["eos_ids"], seed)
        if d2t is not None:
            tensors["d2t"] = used if d2t == "absolute" else used - torch.arange(num_draft)
        if t2d and layout != "modelopt":
            tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, used, True)
    save(path, tensors, shards=1)
    return write_pickle(path) if pickle else path


def _check_draft(
    layout: DraftLayout,
    *,
    borrows_head: bool,
    whole_vocab: bool,
    borrows_embedding: bool,
    own_width: bool,
    names_taps: bool,
    norm_before_fc: bool,
    fc_norm: bool,
    norm_output: bool | None,
) -> None:
    if borrows_head and (not whole_vocab or own_width):
        raise ValueError(
            "a draft that borrows the base's head needs draft_vocab=None and the base's width"
        )
    if borrows_embedding and own_width:
        raise ValueError("a draft with a width of its own needs own_embedding=True")
    if names_taps and layout == "eagle":
        raise ValueError(
            "the EAGLE repository's config has no key for taps; use specforge, modelopt or"
            " speculators"
        )
    if norm_before_fc and fc_norm:
        raise ValueError("norm_before_fc and fc_norm exclude each other")
    if norm_output is False and layout == "specforge":
        raise ValueError(
            "SpecForge's norm_output=false means a head without norm, which no toy has"
        )


def _draft_config(
    layout: DraftLayout,
    layer_keys: dict[str, Any],
    head_keys: dict[str, Any],
    *,
    base: dict[str, Any],
    aux_layer_ids: tuple[int, ...],
    taps_named: bool,
    dtype: Dtype,
    rope_spelling: RopeSpelling,
    speculators_version: str,
) -> dict[str, Any]:
    version = version_keys(rope_spelling, dtype)
    if layout == "speculators":
        return {
            "architectures": ["Eagle3Speculator"],
            **head_keys,
            "eagle_aux_hidden_state_layer_ids": list(aux_layer_ids),
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": 3,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {"name_or_path": base["name"], "architectures": base["architectures"]},
            },
            "speculators_model_type": "eagle3",
            "speculators_version": speculators_version,
            "tie_word_embeddings": False,
            "transformer_layer_config": layer_keys,
            **version,
        }
    tokens = {
        "bos_token_id": base["bos_token_id"],
        "eos_token_id": base["eos_token_id"],
        "pad_token_id": 0,
    }
    config = {**tokens, **layer_keys, **head_keys, **version}
    output_ids = [i - 1 for i in aux_layer_ids]  # "output of layer i" is hs[i + 1]
    if layout == "eagle":
        config["architectures"] = ["LlamaForCausalLM"]
        if config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]:
            del config["head_dim"]
        return config
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    if layout == "specforge" and taps_named:
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": output_ids,
            "use_aux_hidden_state": True,
        }
    if layout == "modelopt":
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": output_ids,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        }
    return config


def _draft_shapes(
    decoder: Mapping[str, int],
    *,
    first_layer: str,
    tap_width: int,
    num_aux_layers: int,
    qk_norm: bool,
    norm_before_fc: bool,
    fc_norm: bool,
) -> dict[str, tuple[int, ...]]:
    width, inner, dim = decoder["hidden_size"], decoder["intermediate_size"], decoder["head_dim"]
    q, kv = decoder["num_attention_heads"] * dim, decoder["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, num_aux_layers * tap_width),
        "norm.weight": (width,),
    }
    if norm_before_fc:
        shapes["input_norm.weight"] = (num_aux_layers * tap_width,)
    if fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (tap_width,) for i in range(num_aux_layers)}
    for i in range(decoder["num_hidden_layers"]):
        layer = first_layer if i == 0 else f"layers.{i}"
        attention_width = 2 * width if i == 0 else width
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (q, attention_width),
            f"{layer}.self_attn.k_proj.weight": (kv, attention_width),
            f"{layer}.self_attn.v_proj.weight": (kv, attention_width),
            f"{layer}.self_attn.o_proj.weight": (width, q),
            f"{layer}.mlp.gate_proj.weight": (inner, width),
            f"{layer}.mlp.up_proj.weight": (inner, width),
            f"{layer}.mlp.down_proj.weight": (width, inner),
            f"{layer}.input_layernorm.weight": (width,),
            f"{layer}.post_attention_layernorm.weight": (width,),
        }
        if i == 0:
            shapes[f"{layer}.hidden_norm.weight"] = (width,)
        if qk_norm:
            shapes |= {f"{layer}.self_attn.{x}_norm.weight": (dim,) for x in "qk"}
    return shapes


def draft_vocabulary(vocab: int, num_draft: int, eos_ids: list[int], seed: int) -> torch.Tensor:
    """A sorted random choice of `num_draft` base ids that holds the eos ids: int64 [Vd]."""
    shuffled = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = eos_ids + [token for token in shuffled if token not in eos_ids]
    return torch.tensor(sorted(chosen[:num_draft]))
