"""What `edgespec inspect` says of an image encoder: of a checkpoint's and of an exported one. Knows
words."""

from __future__ import annotations

from edgespec.config import VisionConfig
from edgespec.errors import counted
from edgespec.vision.component import VisionComponentConfig

Rows = list[tuple[str, str]]


def vision_rows(config: VisionConfig) -> Rows:
    """The rows of an encoder's sizes."""
    heads = f"{config.num_heads} heads of {config.head_dim}"
    sizes = (
        f"{counted(config.num_layers, 'layer')}, hidden {config.hidden_size}, MLP"
        f" {config.intermediate_size}, {heads}"
    )
    side = config.patch_size * config.merge_size
    parts = [f"a token for {side} x {side} pixels"]
    if config.has_windows:
        full = len(config.full_attention_layers)
        parts.append(f"windows of {config.window_side} x {config.window_side} patches")
        parts.append(f"{counted(full, 'layer')} without")
    if config.position_grid:
        parts.append(f"learned positions, {config.position_grid} x {config.position_grid}")
    if config.inner_mergers:
        layers = ", ".join(map(str, config.inner_mergers))
        parts.append(f"features of layers {layers} as well")
    return [("encoder", sizes), ("images", ", ".join(parts))]


def encoder_rows(config: VisionComponentConfig) -> Rows:
    """The rows of config.json."""
    origin = f", quantized from {config.quantized_from[:12]}" if config.quantized_from else ""
    return [
        ("model", config.model),
        *vision_rows(config.vision),
        ("identity", f"{config.identity[:12]}{origin}"),
    ]
