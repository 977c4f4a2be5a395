"""Toy JetSpec and DSpark drafts in the layouts that are found on disk.

Knows how each layout spells its configuration and names its tensors: what is common with DFlash
stands in `dflash`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from tests.toys.dflash import make_dflash
from tests.toys.files import Dtype, random_tensors, read_base_config, save, write_json

DSparkLayout = Literal["deepspec", "specforge", "modelopt", "speculators"]
MarkovKind = Literal["vanilla", "gated", "rnn"]


def make_jetspec(
    path: str | Path,
    base_path: str | Path,
    *,
    section: Literal["dflash_config", "jetspec_config"] = "dflash_config",
    **keys: Any,
) -> Path:
    """Write a random JetSpec draft: class and tensors of z-lab's DFlash, and `causal_head`."""
    path = make_dflash(path, base_path, "z-lab", **keys)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config[section] = config.pop("dflash_config") | {"causal_head": True}
    write_json(path / "config.json", config)
    return path


def make_dspark(
    path: str | Path,
    base_path: str | Path,
    layout: DSparkLayout = "deepspec",
    *,
    kind: MarkovKind = "vanilla",
    rank: int = 8,
    confidence: bool = True,
    with_markov: bool = True,
    from_anchor: bool = True,
    contained: bool = False,
    block_size: int = 5,
    draft_vocab: int | None = None,
    dtype: Dtype = "float32",
    seed: int = 3,
    **keys: Any,
) -> Path:
    """Write a random DSpark draft for the base at `base_path` and return its directory.

    `rank` 0 leaves the Markov head out; `with_markov`: the confidence head reads its embedding of
    the token before (ModelOpt's always does). `contained` puts the heads below `logit_head`, as
    SpecForge did at first. `from_anchor` False is speculators' other order.
    """
    aux = keys.pop("aux_layers", (2, 6))
    known = {"speculators": "speculators", "modelopt": "modelopt"}.get(layout, "z-lab")
    path = make_dflash(
        path,
        base_path,
        known,  # type: ignore[arg-type]
        block_size=block_size,
        draft_vocab=draft_vocab,
        aux_layers=aux,
        dtype=dtype,
        seed=seed,
        **keys,
    )
    base = read_base_config(Path(base_path))
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    width, vocab = base["hidden_size"], base["vocab_size"]
    reads = confidence and with_markov and bool(rank)
    heads: dict[str, Any] = {"markov_rank": rank, "markov_head_type": kind}
    if layout == "modelopt":
        config["dflash_config"] |= heads | {
            "projector_type": "dspark",
            "shift_label": from_anchor,
            "use_confidence_head": confidence,
        }
    elif layout == "specforge":
        config["dflash_config"] |= heads | {
            "projector_type": "dspark",
            "attention_mode": "gqa",
            "confidence_head_alpha": float(confidence),
            "enable_confidence_head": confidence,
            "confidence_head_with_markov": reads,
        }
        config |= {"architectures": ["DSparkDraftModel"], "layer_types": None}
    elif layout == "deepspec":
        inner = config.pop("dflash_config")
        config |= {**inner, **heads, "architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
        config |= {"enable_confidence_head": confidence, "confidence_head_with_markov": reads}
        del config["auto_map"]
    else:
        config |= heads | {
            "architectures": ["DSparkSpeculator"],
            "speculators_model_type": "dspark",
            "sample_from_anchor": from_anchor,
            "enable_confidence_head": confidence,
            "confidence_head_with_markov": reads,
        }
    write_json(path / "config.json", config)
    shapes: dict[str, tuple[int, ...]] = {}
    markov, proj = "markov_head.", "confidence_head.proj"
    if layout == "modelopt":
        markov, proj = "", "confidence_proj"
    if contained:
        markov, proj = f"logit_head.{markov}", f"logit_head.{proj}"
    if rank:
        shapes[f"{markov}markov_w1.weight"] = (vocab, rank)
        shapes[f"{markov}markov_w2.weight"] = (draft_vocab or vocab, rank)
    if rank and kind == "gated":
        shapes |= {f"{markov}gate_proj.weight": (rank, width + rank)}
        shapes |= {f"{markov}gate_proj.bias": (rank,)}
    if rank and kind == "rnn":
        shapes |= {f"{markov}joint_proj.weight": (3 * rank, 2 * rank + width)}
        shapes |= {f"{markov}joint_proj.bias": (3 * rank,)}
    if confidence:
        shapes |= {f"{proj}.weight": (1, width + (rank if reads else 0)), f"{proj}.bias": (1,)}
    if layout == "deepspec":  # copies of the base's own, frozen in training
        shapes |= {"embed_tokens.weight": (vocab, width), "lm_head.weight": (vocab, width)}
    tensors = load_file(path / "model.safetensors") | random_tensors(shapes, seed + 1, dtype)
    for name, tensor in tensors.items():
        if "markov_w" in name:  # as large as logits, or the walk is the slots' own best tokens
            tensors[name] = (tensor.float() * 3).to(getattr(torch, dtype))
    save(path, tensors, 1)
    return path
