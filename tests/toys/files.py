"""What all toys share: how a configuration spells its RoPE and its version, random tensors, and the
files they are written to.

Knows no kind of checkpoint. Knows nothing of edgespec.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

RopeSpelling = Literal["old", "new"]
Dtype = Literal["float32", "bfloat16", "float16"]


def rope_keys(
    rope: Mapping[str, Any] | None, spelling: RopeSpelling, default_theta: float | None
) -> dict[str, Any]:
    scaling = dict(rope or {})
    theta = scaling.pop("rope_theta", default_theta)
    if spelling == "new":
        if theta is not None:
            scaling["rope_theta"] = theta
        return {"rope_parameters": {"rope_type": "default"} | scaling}
    keys: dict[str, Any] = {} if theta is None else {"rope_theta": theta}
    plain = (
        scaling.get("rope_type", scaling.get("type", "default")) == "default" and len(scaling) <= 1
    )
    return keys | {"rope_scaling": None if plain else scaling}


def version_keys(spelling: RopeSpelling, dtype: Dtype) -> dict[str, Any]:
    if spelling == "new":
        return {"dtype": dtype, "transformers_version": "5.14.1"}
    return {"torch_dtype": dtype, "transformers_version": "4.51.0"}


def read_base_config(base_path: Path) -> dict[str, Any]:
    """The base's config.json, with `name` and `eos_ids` (config and generation config together)
    added.

    Where the text part is nested, its keys are raised to the top.
    """
    config: dict[str, Any] = json.loads((base_path / "config.json").read_text(encoding="utf-8"))
    config |= config.get("text_config", {})
    generation = json.loads((base_path / "generation_config.json").read_text(encoding="utf-8"))
    eos_ids: set[int] = set()
    for eos in (config["eos_token_id"], generation["eos_token_id"]):
        eos_ids.update(eos if isinstance(eos, list) else [eos])
    return config | {"name": base_path.name, "eos_ids": sorted(eos_ids)}


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: Dtype
) -> dict[str, torch.Tensor]:
    """Weights with enough spread to tell one reading of a checkpoint from another: no norm is 1, no
    bias is 0.

    Layers add at least as much to the residual stream as they find there (0.3 from the embedding, 1
    from fc): with weaker ones a draft repeats one token, whatever its positions and its recycled
    state are.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1 and name.endswith("weight"):
            value = 1 + 0.3 * noise
        elif name.endswith("bias"):
            value = 0.1 * noise
        elif "embed_tokens" in name or "lm_head" in name:
            value = 0.3 * noise
        else:
            gain = 0.4 if name == "fc.weight" else 1.2
            value = gain * shape[-1] ** -0.5 * noise
        tensors[name] = value.to(getattr(torch, dtype))
    return tensors


def save(path: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    write_json(
        path / "model.safetensors.index.json",
        {"metadata": {"total_size": size_bytes}, "weight_map": weight_map},
    )


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_pickle(path: str | Path) -> Path:
    """Turn a checkpoint's safetensors (sharded or not) into one `pytorch_model.bin`."""
    path = Path(path)
    files = sorted(path.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    torch.save(tensors, path / "pytorch_model.bin")
    for file in [*files, *path.glob("*.safetensors.index.json")]:
        file.unlink()
    return path
