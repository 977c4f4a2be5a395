"""Toy Medusa heads in the layouts that are found on disk: FasterDecoding's file of their own, as
pickle or as safetensors, heads without matrices of logits (version 2), and merged checkpoints of
base and heads, FasterDecoding's and ModelOpt's.

Knows how each layout spells its configuration and names its tensors.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file

from tests.toys.files import Dtype, random_tensors, read_base_config, write_json

MedusaLayout = Literal["pickle", "safetensors", "shared-head", "merged", "modelopt"]
PREFIXES = {"merged": "medusa_head.", "modelopt": "medusa_heads."}


def make_medusa(
    path: str | Path,
    base_path: str | Path,
    layout: MedusaLayout = "safetensors",
    *,
    heads: int = 3,
    blocks: int = 1,
    declared: int | None = None,
    near_base: bool = True,
    dtype: Dtype = "float32",
    seed: int = 1,
) -> Path:
    """Write random Medusa heads for the base at `base_path` and return their directory.

    With `near_base` the matrices of logits are the base's lm_head and some noise, as training
    begins: so some drafts are accepted. `declared` is what config.json says of the number of heads.
    """
    path, base_path = Path(path), Path(base_path)
    path.mkdir(parents=True, exist_ok=True)
    base = read_base_config(base_path)
    width, vocab = base["hidden_size"], base["vocab_size"]
    count = heads if declared is None else declared
    prefix = PREFIXES.get(layout, "")
    tensors = random_tensors(head_shapes(heads, blocks, width, vocab, prefix), seed, dtype)
    if layout == "shared-head":
        tensors = {name: tensors[name] for name in tensors if ".linear." in name}
    elif near_base:
        lm_head = weights_of(base_path)["lm_head.weight"].float()
        for i in range(heads):
            name = f"{prefix}{i}.{blocks}.weight"
            noise = tensors[name].float() * (0.2 + 0.3 * i)
            tensors[name] = (lm_head + noise).to(tensors[name].dtype)
    if prefix:
        return merged(path, base_path, layout, tensors, count, blocks)
    config = {
        "base_model_name_or_path": "a-base",
        "medusa_num_heads": count,
        "medusa_num_layers": blocks,
        "transformers_version": "4.31.0",
    }
    if layout == "shared-head":
        config["version"] = "2"
    write_json(path / "config.json", config)
    if layout == "pickle":
        torch.save(tensors, path / "medusa_lm_head.pt")
    else:
        save_file(tensors, path / "medusa_lm_head.safetensors")
    return path


def head_shapes(
    heads: int, blocks: int, width: int, vocab: int, prefix: str = ""
) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of all heads."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        for j in range(blocks):
            shapes[f"{prefix}{i}.{j}.linear.weight"] = (width, width)
            shapes[f"{prefix}{i}.{j}.linear.bias"] = (width,)
        shapes[f"{prefix}{i}.{blocks}.weight"] = (vocab, width)
    return shapes


def merged(
    path: Path,
    base_path: Path,
    layout: str,
    heads: dict[str, torch.Tensor],
    count: int,
    blocks: int,
) -> Path:
    """A checkpoint of a base with heads beside its own tensors."""
    for file in base_path.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copyfile(file, path / file.name)
    config = json.loads((base_path / "config.json").read_text())
    if layout == "modelopt":
        config["medusa"] = {"num_medusa_heads": count, "num_medusa_layers": blocks}
    else:
        config |= {"medusa_num_heads": count, "medusa_num_layers": blocks}
    write_json(path / "config.json", config)
    save_file(weights_of(base_path) | heads, path / "model.safetensors", {"format": "pt"})
    return path


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's safetensors files."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found
