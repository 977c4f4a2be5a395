"""The portable dialect: basic operators alone, for TensorRT 10.13 (JetPack 7.0 and 7.1).

Its parser looks for a plugin where it reads RMSNormalization, RotaryEmbedding, TensorScatter or
Attention. Each stands in a file of its own, as what it is made of. Knows their order. The mask is
`masks`' and types are `precision`'s.
"""

from __future__ import annotations

import onnx_ir as ir

from edgespec.backends.tensorrt.lowering import basic_norms, basic_ropes, two_block_attention
from edgespec.backends.tensorrt.target import Target

# Attention is found by its rotations, and its heads by their norms: those go last
PARTS = (two_block_attention, basic_ropes, basic_norms)


def apply(model: ir.Model, target: Target) -> None:
    """Replace what TensorRT 10.13 does not read. ContractError for a graph of another form than
    export writes."""
    for part in PARTS:
        part.apply(model, target)
