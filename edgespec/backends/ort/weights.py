"""Lowers stored weights: halves -> float32, in the [in, out] layout that MatMul reads.

Knows where a weight stands in the exported data file and where it will in the engine's. Knows no operator but the Cast
and the Transpose that stand behind a weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.bundle import contained

ALIGN_BYTES = 4096
NUMPY = {
    ir.DataType.FLOAT: np.dtype(np.float32),
    ir.DataType.FLOAT16: np.dtype(np.float16),
    ir.DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight of the lowered graph: where its source stands, and where its float32 form will."""

    source: ir.ExternalTensor
    transposed: bool
    offset: int
    num_bytes: int


def lower_weights(graph: ir.Graph, data_name: str) -> list[StoredWeight]:
    """Replace initializer -> [Cast] -> [Transpose] by one float32 initializer in the form that its user reads."""
    weights: list[StoredWeight] = []
    end = 0
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        for final, transposed in final_forms(value):
            dims = tuple(reversed(tensor.shape.numpy())) if transposed else tensor.shape.numpy()
            offset = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            weights.append(StoredWeight(tensor, transposed, offset, 4 * int(np.prod(dims))))
            end = offset + weights[-1].num_bytes
            name = f"{value.name}/{'t' if transposed else 'fp32'}"
            shape = ir.Shape(dims)
            stored = ir.ExternalTensor(
                data_name, offset, weights[-1].num_bytes, ir.DataType.FLOAT, shape=shape, name=name
            )
            new = ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.FLOAT), const_value=stored)
            graph.register_initializer(new)
            final.replace_all_uses_with(new)
    return weights


def final_forms(value: ir.Value) -> Iterator[tuple[ir.Value, bool]]:
    """The values that `value` ends in after an optional Cast and an optional Transpose of two axes."""
    users = [node for node, _ in value.uses()]
    casts = [node for node in users if node.op_type == "Cast"]
    turns = [node for node in users if node.op_type == "Transpose"]
    if casts:
        yield from (form for cast in casts for form in final_forms(cast.outputs[0]))
    elif turns:
        yield from ((turn.outputs[0], True) for turn in turns)
    elif users:
        yield value, False


def read_fp32(weight: StoredWeight, directory: Path) -> NDArray[np.float32]:
    """The weight's float32 form, read from the canonical directory."""
    source = weight.source
    dtype = NUMPY[source.dtype]
    with contained(directory, str(source.location)).open("rb") as file:
        file.seek(source.offset or 0)
        array = np.fromfile(file, dtype, int(np.prod(source.shape.numpy())))
    array = array.reshape(source.shape.numpy())
    return np.ascontiguousarray((array.T if weight.transposed else array).astype(np.float32, order="C"))
