"""DeepStack (arXiv 2406.04334): rows of images that join the stream behind a base's first layers.

Knows the input that has them and the nodes that add them. Knows no family.
"""

from __future__ import annotations

import onnx_ir as ir

from edgespec.config import ModelConfig
from edgespec.graphs.builder import GraphBuilder


def num_layers(config: ModelConfig) -> int:
    """The first layers, behind each of which rows join the stream."""
    return len(config.vision.deepstack_layers) if config.vision else 0


def behind_layer(
    b: GraphBuilder, config: ModelConfig, index: int, x: ir.Value, rows: ir.Value
) -> ir.Value:
    """The stream [B, S, H] with the rows for layer `index`, of those for all such layers
    [B, S, k*H]."""
    if index >= num_layers(config):
        return x
    name, width = f"layers.{index}/deepstack", config.decoder.hidden_size
    start, end = b.shape(index * width), b.shape((index + 1) * width)
    own = b.op("Slice", rows, start, end, b.shape(2), name=f"{name}/rows")
    return b.op("Add", x, own, name=name)
