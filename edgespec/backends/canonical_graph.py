"""The graph of an export, checked before anything is computed from it: ONNX's own checker accepts
it, it has the operators, inputs and outputs of a canonical graph, and its weights stand in the
files beside it.

An export whose manifest is intact may still have been written by somebody else. How long a graph
runs, and how much memory its results take, nobody checks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from edgespec.artifacts import file_names
from edgespec.backends.golden_file import refused
from edgespec.contract import INPUT_SCALE, OPSET, Contract
from edgespec.errors import BundleError
from edgespec.safe_read.fields import EXPORT_AGAIN
from edgespec.safe_read.regular import read_regular

# Of ONNX's default domain: those that the exporter writes
OPERATORS = frozenset(
    (
        *("Add", "And", "Attention", "Cast", "Clip", "Compress", "Concat", "DequantizeLinear"),
        *("Div", "Equal", "Exp", "Expand", "EyeLike", "Gather", "GatherND", "Gelu", "Greater"),
        *("Identity", "If", "LayerNormalization", "Less", "Loop", "MatMul", "Mul", "Neg", "Pad"),
        *("QuantizeLinear", "RMSNormalization", "Range", "ReduceMin", "ReduceSum", "Reshape"),
        *("RotaryEmbedding", "Shape", "Sigmoid", "Slice", "Softmax", "Softplus", "Split"),
        *("Squeeze", "Sub", "Sum", "TensorScatter", "TopK", "Transpose", "Unsqueeze", "Where"),
    )
)
# Of stored weights: bits of an element
BITS = {
    **dict.fromkeys(("int4", "uint4", "float4_e2m1fn"), 4),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e8m0fnu"), 8),
    **dict.fromkeys(("float16", "bfloat16"), 16),
    **dict.fromkeys(("float32", "int32"), 32),
    "int64": 64,
}
NOT_ONNX = onnx.checker.ValidationError, onnx.shape_inference.InferenceError
OFFSET = re.compile(r"[0-9]{1,19}")


def check_graph(path: Path, contract: Contract, listed: Iterable[str]) -> None:
    """BundleError where model.onnx is not a canonical graph of this contract: another operator,
    input or output, weights outside the `listed` files, or shapes that do not fit."""
    model = read_model(path)
    for problem in problems(model, contract, sizes_of(path.parent, listed)):
        raise refused(path, problem)
    graph, stored = model.graph, list(model.graph.initializer)
    del graph.initializer[:]  # weights as inputs: ONNX's checker would refuse files that are links
    for tensor in stored:
        if is_external(tensor):
            dims = list(tensor.dims)
            graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, dims)
            )
        else:
            graph.initializer.append(tensor)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (*NOT_ONNX, ValueError, RuntimeError) as error:
        raise refused(path, f"not valid ONNX ({' '.join(str(error).split()):.200})") from error


def read_model(path: Path) -> ModelProto:
    """The model of a file, without its external data. BundleError where it is none."""
    model = ModelProto()
    try:
        model.ParseFromString(read_regular(path))
    except (OSError, DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a protobuf"
        raise BundleError(f"{path} is not an ONNX model: {reason}.", EXPORT_AGAIN) from error
    if not model.graph.node:
        raise BundleError(f"{path} is not an ONNX model: it has no graph.", EXPORT_AGAIN)
    return model


def sizes_of(directory: Path, listed: Iterable[str]) -> dict[str, int]:
    """The bytes of the files that weights may stand in."""
    known = {file_names.MODEL_DATA, file_names.EMBEDDING} & set(listed)
    return {name: (directory / name).stat().st_size for name in known}


def problems(model: ModelProto, contract: Contract, sizes: Mapping[str, int]) -> Iterator[str]:
    """What a valid ONNX model has that a canonical graph has not; `sizes` are those of files that
    weights may stand in."""
    versions = [(entry.domain, entry.version) for entry in model.opset_import]
    if versions != [("", OPSET)]:
        yield f"operator sets {versions!r:.80}, not ONNX's own of version {OPSET}"
    for node in all_nodes(model.graph):
        if node.domain or node.op_type not in OPERATORS:
            name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            yield f"node {node.name!r:.80} is a {name!r:.80}, which no export has"
        for mark in node.metadata_props:
            if mark.key == INPUT_SCALE and not is_scale(mark.value):
                yield f"node {node.name!r:.80} has an input scale of {mark.value!r:.80}"
    for tensor in model.graph.initializer:
        if is_external(tensor):
            yield from misplaced(tensor, sizes)
        elif len(tensor.raw_data) != num_bytes(tensor):
            yield f"tensor {tensor.name!r:.80} has {len(tensor.raw_data)} bytes"
    if model.graph.sparse_initializer:
        yield "sparse weights, which no export has"
    for kind, values, specs in (
        ("input", model.graph.input, contract.inputs),
        ("output", model.graph.output, contract.outputs),
    ):
        wanted = [
            f"{spec.name}: {spec.dtype} [{', '.join(map(str, spec.shape))}]" for spec in specs
        ]
        for is_, should in zip_longest(map(shown, values), wanted, fillvalue="none"):
            if is_ != should:
                yield f"{kind} {is_:.200}; by config.json {should}"


def is_external(tensor: TensorProto) -> bool:
    """Whether the bytes of a weight stand in a file."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def is_scale(text: str) -> bool:
    """Whether a mark holds the scale of activations: a positive number."""
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def num_bytes(tensor: TensorProto) -> int | None:
    """The bytes of a weight; None where no export has its type."""
    bits = BITS.get(dtype_of(tensor.data_type))
    return None if bits is None else -(-math.prod(tensor.dims) * bits // 8)


def misplaced(tensor: TensorProto, sizes: Mapping[str, int]) -> Iterator[str]:
    """Why the bytes of a weight are not where it says."""
    keys = {entry.key: entry.value for entry in tensor.external_data}
    location, name = keys.get("location", ""), f"tensor {tensor.name!r:.80}"
    dtype, wanted = dtype_of(tensor.data_type), num_bytes(tensor)
    if wanted is None or location not in sizes:
        yield f"{name} of {dtype} stands in {location!r:.80}, not in {' or '.join(sorted(sizes))}"
        return
    offset, length = keys.get("offset", "0"), keys.get("length", "")
    start = OFFSET.fullmatch(offset)
    if length != str(wanted) or not start or int(offset) + wanted > sizes[location]:
        yield f"{name} of {wanted} bytes has {length!r:.40} bytes at {offset!r:.40} of {location}"


def all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """The nodes of a graph and of its subgraphs."""
    waiting = [graph]
    while waiting:
        for node in waiting.pop().node:
            yield node
            waiting += [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]


def shown(value: onnx.ValueInfoProto) -> str:
    """Name, type and dimensions of an input or output."""
    tensor = value.type.tensor_type
    dims = ", ".join(dim.dim_param or str(dim.dim_value) for dim in tensor.shape.dim)
    return f"{value.name}: {dtype_of(tensor.elem_type)} [{dims}]"


def dtype_of(number: int) -> str:
    """The name of a type by ONNX's number, as numpy has it."""
    try:
        return str(onnx.helper.tensor_dtype_to_np_dtype(number).name)
    except KeyError:
        return f"type {number}"
