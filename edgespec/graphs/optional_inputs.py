"""What optional inputs do in a base's graph: a row each, beside its row in `contract.INPUTS`.

Knows names and sizes. What an input does stands in its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from edgespec.config import ModelConfig
from edgespec.contract import INPUTS
from edgespec.graphs import deepstack
from edgespec.graphs.builder import GraphBuilder


@dataclass(frozen=True, slots=True)
class OptionalInput:
    """`size` is that of a model's graph, 0 where it has no such input; `behind_layer` gives the
    stream behind a layer, of the builder, the model, the layer's index, the stream and the
    input."""

    size: Callable[[ModelConfig], int]
    behind_layer: Callable[[GraphBuilder, ModelConfig, int, ir.Value, ir.Value], ir.Value]


OPTIONAL_INPUTS: dict[str, OptionalInput] = {
    "deepstack_embeds": OptionalInput(deepstack.num_layers, deepstack.behind_layer),
}


def sizes_of(config: ModelConfig) -> dict[str, int]:
    """The sizes of the optional inputs that a model's graph has, as `GraphShape.sizes` has them."""
    sizes = {INPUTS[name].size: row.size(config) for name, row in OPTIONAL_INPUTS.items()}
    return {key: size for key, size in sizes.items() if size}
