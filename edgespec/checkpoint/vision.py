"""The tensors of an image encoder: which there are, and their names in a checkpoint.

Own names are those of Qwen3-VL's files without a prefix: blocks.0.norm1, merger.linear_fc1. Knows
no graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edgespec.checkpoint.detect import check_tensors
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization, rule_at
from edgespec.checkpoint.quantization import VISION_PREFIXES, Quantization
from edgespec.config import VisionConfig
from edgespec.config.tensors import Tensors
from edgespec.families import FAMILIES

PATCHES = "patch_embed.proj.weight"


def vision_prefix(checkpoint: Checkpoint) -> str | None:
    """How the names of a checkpoint's encoder begin; None where it has none."""
    names = checkpoint.tensors
    return next((p for p in VISION_PREFIXES if any(name.startswith(p) for name in names)), None)


def stored_vision_names(checkpoint: Checkpoint, config: VisionConfig) -> dict[str, str]:
    """The names on disk by own name; a packed weight, which has no tensor `weight`, is called as if
    it had one. Raises CheckpointError where the tensors are not those of the configuration."""
    expected, names = vision_tensors(config), names_on_disk(checkpoint, config)
    linears = {names[name] for name, shape in expected.items() if is_linear(name, shape)}
    prefix = vision_prefix(checkpoint) or VISION_PREFIXES[0]
    check_tensors(
        {names[name]: shape for name, shape in expected.items()},
        checkpoint,
        {name for name in checkpoint.tensors if not name.startswith(prefix)},
        vision_quantization(checkpoint, config),
        never_quantized=set(names.values()) - linears,
    )
    return names


def vision_quantization(checkpoint: Checkpoint, config: VisionConfig) -> Quantization | None:
    """How the encoder's Linears are quantized; None where none of them is."""
    quantization = read_quantization(checkpoint)
    if quantization is None or vision_prefix(checkpoint) is None:
        return None
    names = names_on_disk(checkpoint, config)
    modules = (
        names[name].removesuffix(".weight")
        for name, shape in vision_tensors(config).items()
        if is_linear(name, shape)
    )
    quantized = any(rule_at(checkpoint, quantization, module) for module in modules)
    return replace(quantization, kv_cache=None) if quantized else None


def names_on_disk(checkpoint: Checkpoint, config: VisionConfig) -> dict[str, str]:
    """The names on disk by own name, of what is there and of what should be."""
    prefix, renamed = vision_prefix(checkpoint) or VISION_PREFIXES[0], renamed_modules()
    there = [name for name in checkpoint.tensors if name.startswith(prefix)]
    stored = {own_name(name.removeprefix(prefix)): name for name in there}
    other = {own: module for module, own in renamed.items()}
    if not any(name.removeprefix(prefix).startswith(tuple(renamed)) for name in there):
        other = {}  # none of them has the other name: a missing one is not called by it
    expected = vision_tensors(config)
    return {name: stored.get(name, f"{prefix}{moved(name, other)}") for name in expected}


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a Linear."""
    return name.endswith(".weight") and len(shape) == 2 and name != "pos_embed.weight"


def own_name(name: str) -> str:
    """The own name of a tensor by its stored one without the prefix."""
    return moved(name, renamed_modules())


def renamed_modules() -> dict[str, str]:
    """Module on disk -> own name, of all families."""
    return {name: own for row in FAMILIES.values() for name, own in row.vision_names.items()}


def moved(name: str, modules: Mapping[str, str]) -> str:
    """The name of a tensor whose module is called by what `modules` says."""
    module, _, kind = name.rpartition(".")
    return f"{modules.get(module, module)}.{kind}"


def vision_tensors(config: VisionConfig) -> Tensors:
    """Name -> shape of an encoder's tensors, by own name."""
    hidden, patch = config.hidden_size, config.patch_size
    tensors: Tensors = {
        PATCHES: (hidden, config.in_channels, config.temporal_patch_size, patch, patch)
    }
    if config.patch_bias:
        tensors["patch_embed.proj.bias"] = (hidden,)
    if config.position_grid:
        tensors["pos_embed.weight"] = (config.position_grid**2, hidden)
    for i in range(config.num_layers):
        tensors |= {f"blocks.{i}.{name}": shape for name, shape in block_tensors(config).items()}
    tensors |= merger_tensors(config, "merger", hidden)
    for module in config.inner_mergers.values():
        tensors |= merger_tensors(config, module, config.merged_size)
    return tensors


def block_tensors(config: VisionConfig) -> Tensors:
    """The tensors of one layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    tensors = norm_tensors(config, "norm1", hidden) | norm_tensors(config, "norm2", hidden)
    tensors |= linear_tensors("attn.qkv", 3 * hidden, hidden)
    tensors |= linear_tensors("attn.proj", hidden, hidden)
    if not config.gated_mlp:
        tensors |= linear_tensors("mlp.linear_fc1", inner, hidden)
        return tensors | linear_tensors("mlp.linear_fc2", hidden, inner)
    for part in ("gate", "up"):
        tensors |= linear_tensors(f"mlp.{part}_proj", inner, hidden)
    return tensors | linear_tensors("mlp.down_proj", hidden, inner)


def merger_tensors(config: VisionConfig, name: str, norm_size: int) -> Tensors:
    """The tensors of a merger whose norm is over `norm_size` elements."""
    merged = config.merged_size
    tensors = norm_tensors(config, f"{name}.norm", norm_size)
    tensors |= linear_tensors(f"{name}.linear_fc1", merged, merged)
    return tensors | linear_tensors(f"{name}.linear_fc2", config.out_hidden_size, merged)


def norm_tensors(config: VisionConfig, name: str, size: int) -> Tensors:
    """The tensors of a norm; a LayerNorm has a bias."""
    kinds = ("weight", "bias") if config.norm == "layer" else ("weight",)
    return {f"{name}.{kind}": (size,) for kind in kinds}


def linear_tensors(name: str, rows: int, columns: int) -> Tensors:
    """The tensors of a Linear with a bias."""
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
