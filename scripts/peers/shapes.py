"""The shapes that are compared, and their random checkpoints: a base, an EAGLE-3 draft, a DFlash draft.

Knows the configs and the writer of scripts/benchmark.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmark.py
import benchmark

SIZES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144},
}
BLOCK = 16  # slots of a DFlash draft, the one that is known among them
DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "layer_types": ["full_attention"] * 5,
    "tie_word_embeddings": False,
    "block_size": BLOCK,
    "num_target_layers": benchmark.LAYERS,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 7, 13, 19, 25]},
}
Config = dict[str, Any]


def configs(shape: str) -> dict[str, Config]:
    """Returns the configs of a shape by what they are of."""
    base = benchmark.BASE_CONFIG | SIZES[shape]
    return {
        "base": base,
        "draft": benchmark.DRAFT_CONFIG | SIZES[shape],
        "dflash": base | DFLASH,
    }


def dflash_tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a DFlash draft's tensors by name; embedding and lm_head are the
    base's."""
    hidden, wide = config["hidden_size"], len(config["dflash_config"]["target_layer_ids"])
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, wide * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        tensors |= benchmark.layer(f"layers.{i}", hidden, config)
        for norm in ("q_norm", "k_norm"):
            tensors[f"layers.{i}.self_attn.{norm}.weight"] = (config["head_dim"],)
    return tensors


def write_checkpoints(models: Path, shape: str) -> None:
    """Writes what is missing of a shape's checkpoints."""
    found = configs(shape)
    if not (models / "draft" / "model.safetensors").is_file():
        benchmark.write_checkpoints(models, found["base"], found["draft"])
    if not (models / "dflash" / "model.safetensors").is_file():
        tensors = dflash_tensors(found["dflash"])
        benchmark.write_checkpoint(models / "dflash", found["dflash"], tensors)
        benchmark.write_tokenizer(models / "dflash")


def position_numbers(shape: str) -> int:
    """Returns how many numbers a position has in the cache of the base."""
    base = configs(shape)["base"]
    heads = base["num_key_value_heads"] * base["head_dim"]
    return int(2 * base["num_hidden_layers"] * heads)
