"""A lowered graph as files: the graph, and its weights beside it, which stay the export's own.

Knows ONNX files and where external data stands. Knows no operator and no engine library.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx_ir as ir

from edgespec.artifacts import file_names, hashes
from edgespec.backends.onnx_dir import AnyOnnxDir, VisionOnnxDir
from edgespec.backends.tensorrt.lowering import lower
from edgespec.backends.tensorrt.lowering.vision import lower_vision
from edgespec.backends.tensorrt.target import Compute, Target
from edgespec.contract import ITEM_BYTES, canonical_contract
from edgespec.vision.contract import vision_contract

NEW_DATA = "lowered.onnx.data"  # weights that a rewrite had to make
SMALL_BYTES = 1 << 10  # constants up to it stay in the graph
COMPUTE_OF: dict[ir.DataType, Compute] = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
}


def stored_compute(model: ir.Model) -> Compute:
    """The type of most unquantized weights of a canonical graph: the checkpoint's. Scales of
    quantized weights do not count."""
    count: Counter[Compute] = Counter()
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype not in COMPUTE_OF:
            continue
        if not any(node.op_type == "DequantizeLinear" for node, _ in value.uses()):
            count[COMPUTE_OF[tensor.dtype]] += tensor.size
    return count.most_common(1)[0][0] if count else "float16"


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """The weights of a graph that stand in files."""
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            yield value.const_value


def weight_bytes(model: ir.Model, compute: Compute, *, least: bool = False) -> int:
    """Bytes of all constants of a graph, once weights that are not quantized have the type in which
    they are multiplied. With `least` one that is stored in fewer bytes keeps them."""
    size, item = 0, ITEM_BYTES[compute]
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None:
            continue
        computed = tensor.size * item if tensor.dtype in COMPUTE_OF else tensor.nbytes
        size += min(computed, tensor.nbytes) if least else computed
    return size


def lowered_model(onnx: AnyOnnxDir, target: Target, model: ir.Model) -> ir.Model:
    """The graph of an export, lowered. ContractError where it has another form."""
    if isinstance(onnx, VisionOnnxDir):
        return lower_vision(model, vision_contract(onnx.config.vision), target)
    return lower(model, canonical_contract(onnx.config.graph), target)


def write(
    model: ir.Model,
    source: Path,
    directory: Path,
    put: Callable[[Path, Path], object] = os.symlink,
) -> Path:
    """Write a lowered graph to `directory`, and beside it, by `put(from, to)`, the files of the
    export `source` that its weights stand in; the path of the graph. Raises OSError."""
    for location in sorted({str(tensor.location) for tensor in external_tensors(model)}):
        put(hashes.contained(source, location).resolve(), directory / location)
    move_out(model, directory)
    path = directory / file_names.MODEL
    ir.save(model, path)
    return path


def move_out(model: ir.Model, directory: Path) -> None:
    """Write new weights to a data file: a graph file may have 2 GB."""
    values = [
        value
        for value in model.graph.initializers.values()
        if value.const_value is not None
        and not isinstance(value.const_value, ir.ExternalTensor)
        and value.const_value.nbytes > SMALL_BYTES
    ]
    tensors = [value.const_value for value in values if value.const_value is not None]
    if not tensors:
        return
    external = ir.external_data.convert_tensors_to_external(tensors, directory, NEW_DATA)
    for value, tensor in zip(values, external, strict=True):
        value.const_value = tensor
