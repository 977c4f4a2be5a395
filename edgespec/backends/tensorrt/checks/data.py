"""Rules of files and of what is stored: external data, sizes, types of initializers and inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import onnx
from onnx import TensorProto

from edgespec.backends.tensorrt.checks.graph import View, type_name
from edgespec.backends.tensorrt.checks.operators import Problems, shown
from edgespec.backends.tensorrt.parser_operators import INITIALIZER_TYPES
from edgespec.backends.tensorrt.rules import MAX_DIMS, MAX_MODEL_BYTES

FOUR_BITS = ("INT4", "UINT4", "FLOAT4E2M1")


def model_size(view: View) -> Problems:
    """A model that no protobuf holds."""
    size = view.model.ByteSize()
    if size >= MAX_MODEL_BYTES:
        yield "the model", f"{size} bytes without external data"


def stored(view: View) -> Iterator[TensorProto]:
    """All initializers, of all graphs, and the values of Constants."""
    for scope in view.scopes:
        yield from scope.graph.initializer
        for node in scope.graph.node:
            if node.op_type == "Constant":
                yield from (each.t for each in node.attribute if each.name == "value")


def initializer_type(view: View) -> Problems:
    """Types that the parser does not read."""
    for tensor in stored(view):
        dtype = type_name(tensor.data_type)
        if dtype not in INITIALIZER_TYPES:
            yield tensor.name or "a constant", dtype


def four_bit_count(view: View) -> Problems:
    """Odd numbers of elements of half a byte."""
    for tensor in stored(view):
        if type_name(tensor.data_type) in FOUR_BITS and math.prod(tensor.dims) % 2:
            yield tensor.name or "a constant", f"{math.prod(tensor.dims)} elements"


def rank(view: View) -> Problems:
    """Values with too many dimensions."""
    for scope in view.scopes:
        for name, tensor in scope.tensors.items():
            if tensor.dims is not None and len(tensor.dims) > MAX_DIMS:
                yield name, f"the shape {shown(tensor.dims)}"


def int64_io(view: View) -> Problems:
    """Inputs and outputs of INT64."""
    yield from of_type(view, "INT64")


def bool_io(view: View) -> Problems:
    """Inputs and outputs of BOOL."""
    yield from of_type(view, "BOOL")


def of_type(view: View, dtype: str) -> Problems:
    """Inputs and outputs of a type."""
    graph = view.main.graph
    for kind, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            if view.main.tensor(value.name).dtype == dtype:
                yield value.name, f"an {kind} of {dtype}"


def external_data(view: View) -> Problems:
    """Weights that are not there, lie elsewhere, or have not the size of their tensor."""
    for tensor in stored(view):
        size = data_bytes(tensor)
        if tensor.data_location != TensorProto.EXTERNAL:
            if tensor.HasField("raw_data") and size not in (None, len(tensor.raw_data)):
                yield tensor.name, f"{len(tensor.raw_data)} bytes stored, {size} needed"
            continue
        said = {each.key: each.value for each in tensor.external_data}
        problem = place_problem(said, size, view.directory)
        if problem:
            yield tensor.name, problem


def place_problem(said: dict[str, str], size: int | None, directory: Path | None) -> str:
    """What is wrong with the place of a tensor's bytes; empty: nothing."""
    place = PurePosixPath(said.get("location", ""))
    if not place.parts or place.is_absolute() or ".." in place.parts:
        return f"its location is {said.get('location', '')!r}"
    try:
        offset, length = int(said.get("offset", "0")), int(said.get("length", str(size or 0)))
    except ValueError:
        return "its offset or length is not a whole number"
    if size is not None and length != size:
        return f"{length} bytes in {place}, {size} needed"
    if directory is None:
        return ""
    file = directory / place
    if not file.is_file():
        return f"{place} is missing"
    if offset < 0 or offset + length > file.stat().st_size:
        return f"it ends behind {place}, which has {file.stat().st_size} bytes"
    return ""


def data_bytes(tensor: TensorProto) -> int | None:
    """The bytes of a tensor's elements; None for types without a size."""
    count: int = math.prod(tensor.dims)
    if type_name(tensor.data_type) in FOUR_BITS:
        return -(-count // 2)
    try:
        return count * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    except (KeyError, ValueError):
        return None
