"""Rules of QuantizeLinear, DequantizeLinear and of TensorRT's own quantizing operators."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from onnx import NodeProto

from edgespec.backends.tensorrt.checks.graph import (
    Dims,
    Scope,
    View,
    attribute_of,
    integer,
    name_of,
    type_name,
)
from edgespec.backends.tensorrt.checks.operators import Problems, shown
from edgespec.backends.tensorrt.parser_operators import FLOAT_TYPES, QUANTIZED_TYPES

BLOCK_SIZES = {"TRT_FP4DynamicQuantize": 16, "TRT_MXFP8DynamicQuantize": 32}
LINEAR = ("QuantizeLinear", "DequantizeLinear")


def zero_point(view: View) -> Problems:
    """Zero points that are not zero, or not known."""
    for scope, node in view.nodes(*LINEAR):
        name = node.input[2] if len(node.input) > 2 else ""
        if not name:
            continue
        values = scope.array(name)
        if values is None or np.any(values.astype(np.float32) != 0):
            yield name_of(node), f"{name} is not all zero"


def quantized_type(view: View) -> Problems:
    """Quantized values of a type that TensorRT has not."""
    for scope, node in view.nodes("DequantizeLinear"):
        dtype = scope.tensor(node.input[0]).dtype
        if dtype is not None and dtype not in QUANTIZED_TYPES:
            yield name_of(node), f"{node.input[0]} is {dtype}"
    for scope, node in view.nodes("QuantizeLinear"):
        made = integer(node, "output_dtype", 0)
        point = scope.tensor(node.input[2]).dtype if len(node.input) > 2 else None
        dtype = type_name(made) if made else point or "UINT8"
        if dtype not in QUANTIZED_TYPES:
            yield name_of(node), f"it makes {dtype}"


def scale_positive(view: View) -> Problems:
    """Constant scales with a number that is not positive."""
    for scope, node in view.nodes(*LINEAR):
        values = scope.array(node.input[1])
        if values is not None and not np.all(values.astype(np.float32) > 0):
            yield name_of(node), f"{node.input[1]} has numbers that are not positive"


def scale_type(view: View) -> Problems:
    """Scales of QuantizeLinear of another type than what is quantized."""
    for scope, node in view.nodes("QuantizeLinear"):
        data, scale = (scope.tensor(name).dtype for name in node.input[:2])
        if data in FLOAT_TYPES and scale in FLOAT_TYPES and data != scale:
            yield name_of(node), f"{scale} for {data}"


def scale_shape(view: View) -> Problems:
    """Scales whose shape is none of the three."""
    for scope, node in view.nodes(*LINEAR):
        data, scale = (scope.tensor(name).dims for name in node.input[:2])
        if data is None or scale is None or is_one(scale):
            continue
        said = f"a scale of {shown(scale)} for {shown(data)}"
        if len(scale) == 1:
            wanted = along(data, axis_of(node, data))
            blocked = attribute_of(node, "block_size") not in (None, 0)
            if blocked or not agree(wanted, scale[0]):
                yield name_of(node), said
        elif len(scale) != len(data) or sum(map(agree, data, scale)) < len(data) - 1:
            yield name_of(node), said


def block_size(view: View) -> Problems:
    """Block sizes that do not divide the axis, or that the scales contradict."""
    for scope, node in view.nodes(*LINEAR):
        size = integer(node, "block_size", 0)
        data, scale = (scope.tensor(name).dims for name in node.input[:2])
        if not size or data is None or scale is None or len(data) != len(scale):
            continue
        axis = axis_of(node, data)
        length, blocks = along(data, axis), along(scale, axis)
        if isinstance(length, int) and isinstance(blocks, int) and length != blocks * size:
            yield name_of(node), f"{length} elements, {blocks} blocks of {size}"


def block_axis(view: View) -> Problems:
    """Blocks along an axis that has two or more behind it."""
    for scope, node in view.nodes(*LINEAR):
        data, scale = (scope.tensor(name).dims for name in node.input[:2])
        if data is None or scale is None or len(data) != len(scale) or len(data) < 3:
            continue
        differ = [i for i in range(len(data)) if not agree(data[i], scale[i])]
        if any(axis < len(data) - 2 for axis in differ):
            yield name_of(node), f"a scale of {shown(scale)} for {shown(data)}"


def activation_scale(view: View) -> Problems:
    """Several scales for what is computed at run time."""
    for scope, node in view.nodes("QuantizeLinear"):
        scale = scope.tensor(node.input[1]).dims
        if scale is None or is_one(scale) or scope.is_constant(node.input[0]):
            continue
        yield name_of(node), f"a scale of {shown(scale)} for {node.input[0]}"


def shared_scale(view: View) -> Problems:
    """Single scales that several DequantizeLinear read."""
    readers: defaultdict[int, list[NodeProto]] = defaultdict(list)
    names: dict[int, str] = {}
    for scope, node in view.nodes("DequantizeLinear"):
        tensor = scope.stored.get(node.input[1])
        if tensor is not None and is_one(tuple(tensor.dims)):
            readers[id(tensor)].append(node)
            names[id(tensor)] = node.input[1]
    for key, nodes in readers.items():
        if len(nodes) > 1:
            yield name_of(nodes[0]), f"{names[key]} is read by {len(nodes)} DequantizeLinear"


def dynamic_quantize(view: View) -> Problems:
    """Other block sizes than the formats have, or a scale that is no single constant."""
    for scope, node in view.nodes(*BLOCK_SIZES):
        wanted = BLOCK_SIZES[node.op_type]
        size = integer(node, "block_size", wanted)
        if size != wanted:
            yield name_of(node), f"blocks of {size}"
        if node.op_type == "TRT_FP4DynamicQuantize" and not single_constant(scope, node):
            yield name_of(node), "its scale is not one stored number"


def single_constant(scope: Scope, node: NodeProto) -> bool:
    """Whether the second input is a stored number."""
    tensor = scope.stored.get(node.input[1]) if len(node.input) > 1 else None
    return tensor is not None and is_one(tuple(tensor.dims))


def is_one(dims: Dims) -> bool:
    """Whether a tensor of these dimensions is a single number."""
    return all(dim == 1 for dim in dims)


def axis_of(node: NodeProto, dims: Dims) -> int:
    """The axis of a quantizing node, counted from the first."""
    axis = integer(node, "axis", 1)
    return axis + len(dims) if axis < 0 else axis


def along(dims: Dims, axis: int) -> int | str | None:
    """The size along an axis; None where there is none."""
    return dims[axis] if 0 <= axis < len(dims) else None


def agree(one: int | str | None, other: int | str | None) -> bool:
    """Whether two sizes are, or may be, the same."""
    known = isinstance(one, int) and isinstance(other, int)
    return one == other or not known
