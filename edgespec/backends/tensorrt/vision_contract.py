"""What an image encoder's graph that is lowered for TensorRT takes and gives.

Knows names and types. Imports no ONNX: running an engine needs none.
"""

from __future__ import annotations

from edgespec.backends.tensorrt.target import Target
from edgespec.contract import Contract, TensorSpec

# What is computed on the host stays as it is: it is small, and a rounded angle is another angle
_FLOAT32 = frozenset(("rope_cos", "rope_sin", "position_weight"))


def lowered_contract(contract: Contract, target: Target) -> Contract:
    """The contract of the graph that `lower_vision` makes: pixels and rows are of the compute
    type; names and order stay."""

    def lowered(spec: TensorSpec) -> TensorSpec:
        rounded = spec.dtype == "float32" and spec.name not in _FLOAT32
        return TensorSpec(spec.name, target.compute if rounded else spec.dtype, spec.shape)

    return Contract(tuple(map(lowered, contract.inputs)), tuple(map(lowered, contract.outputs)))
