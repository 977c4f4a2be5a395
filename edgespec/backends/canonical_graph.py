"""The graph of an export, checked before anything is computed from it.

What is allowed stands in `edgespec.backends.operators`, what the graph reads and gives in the
contract. An export whose manifest is intact may still have been written by somebody else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from edgespec.artifacts import file_names
from edgespec.backends.operators import (
    MAX_INLINE_BYTES,
    MAX_INTEGER,
    MAX_INTEGERS,
    MAX_NODES,
    MAX_RANK,
    OPERATORS,
    TENSOR_TYPES,
    Float,
    Int,
    Ints,
    Rule,
    Subgraph,
    Text,
)
from edgespec.contract import (
    ACTIVATIONS,
    INPUT_SCALE,
    KEEP_PRECISION,
    OPSET,
    SCHEME,
    GraphShape,
    TensorSpec,
    canonical_contract,
)
from edgespec.errors import BundleError
from edgespec.quantization.schemes import SCHEMES
from edgespec.safe_read.fields import EXPORT_AGAIN
from edgespec.safe_read.regular import read_regular

TYPE_NUMBERS = {name: number for number, name in TENSOR_TYPES.items()}
FOUR_BITS = ("int4", "float4_e2m1fn")
LOCATION_KEYS = {"location", "offset", "length", "checksum"}
# Sizes by which shapes are inferred: of a short call
CALL_SIZES = {"B": 1, "S": 8, "C": 32, "G": 4, "L": 4, "P": 2, "S_base": 8, "S_draft": 8}
MAX_GROWTH = 16  # how much larger than every weight and input a result may be, in elements
MIN_ELEMENTS = 2**22  # so that small models have room
COUNTS = {"Loop": 0, "Range": 1}  # operator -> the input that says how often, or how far


def check_graph(path: Path, shape: GraphShape, listed: Collection[str]) -> None:
    """BundleError where model.onnx is not a canonical graph of this shape: another operator,
    attribute, input or output, data outside the `listed` files, or results without bound."""
    contract = canonical_contract(shape)
    check_canonical(path, contract.inputs, contract.outputs, listed, CALL_SIZES)


def check_canonical(
    path: Path,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    listed: Collection[str],
    call_sizes: Mapping[str, int],
) -> None:
    """The same for a graph with these inputs and outputs; `call_sizes` are those of a short call by
    symbol."""
    model = read_model(path)
    checker = Checker(path, listed)
    checker.check_model(model)
    checker.check_signature(model.graph, inputs, outputs)
    checker.check_sizes(model, call_sizes)


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


class Checker:
    """The rules, for the graph of one file."""

    def __init__(self, path: Path, listed: Collection[str]) -> None:
        self.path, self.listed = path, listed
        self.sizes = {
            name: (path.parent / name).stat().st_size
            for name in (file_names.MODEL_DATA, file_names.EMBEDDING)
            if name in listed
        }

    def refused(self, problem: str) -> BundleError:
        """The error that says `problem` of the graph."""
        return BundleError(f"{self.path}: {problem}.", EXPORT_AGAIN)

    # ---- operators

    def check_model(self, model: ModelProto) -> None:
        """Operators, attributes and constants."""
        versions = [(entry.domain, entry.version) for entry in model.opset_import]
        if versions != [("", OPSET)]:
            raise self.refused(f"operator sets {versions!r:.80}, not ONNX's own of version {OPSET}")
        if model.functions or model.training_info or model.graph.sparse_initializer:
            raise self.refused("functions, training or sparse weights, which no export has")
        nodes = list(all_nodes(model.graph))
        if len(nodes) > MAX_NODES:
            raise self.refused(f"{len(nodes)} nodes, more than {MAX_NODES}")
        for tensor in model.graph.initializer:
            self.check_tensor(tensor)
        for node in nodes:
            self.check_node(node)
        self.check_edges(model.graph)
        self.check_counts(model.graph)

    def check_edges(self, graph: GraphProto) -> None:
        """Every value that is read is an input, a constant or the result of a node."""
        made = {value.name for value in graph.input} | {t.name for t in graph.initializer}
        nodes = list(all_nodes(graph))
        for inner in subgraphs(graph):
            made |= {value.name for value in inner.input}
        made |= {name for node in nodes for name in node.output}
        for node in nodes:
            for name in node.input:
                if name and name not in made:
                    raise self.refused(
                        f"node {node.name!r:.80} reads {name!r:.80}: nothing makes it"
                    )

    def check_node(self, node: NodeProto) -> None:
        """One node and, where it has subgraphs, which operators these have."""
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        rules = OPERATORS.get(node.op_type) if not node.domain else None
        if rules is None:
            raise self.refused(f"node {node.name!r:.80} is a {name!r:.80}, which no export has")
        for attribute in node.attribute:
            rule = rules.get(attribute.name)
            if rule is None or not follows(attribute, rule):
                shown = f"{attribute.name}={value_of(attribute)!r:.60}"
                raise self.refused(f"node {node.name!r:.80} ({name}) has {shown}")
        self.check_marks(node)

    def check_marks(self, node: NodeProto) -> None:
        """What a node's metadata says of a quantized weight."""
        for entry in node.metadata_props:
            if not is_mark(entry.key, entry.value):
                shown = f"{entry.key}={entry.value}"
                raise self.refused(f"node {node.name!r:.80} is marked {shown!r:.80}")

    def check_counts(self, graph: GraphProto) -> None:
        """Loops run as often as a tensor is long, and ranges are as long: never by a constant."""
        made_by = {name: node for node in all_nodes(graph) for name in node.output}
        for node in all_nodes(graph):
            if node.op_type not in COUNTS:
                continue
            places = node.input[COUNTS[node.op_type] :]
            length = made_by.get(places[0]) if places else None
            of = made_by.get(length.input[0]) if length is not None and length.input else None
            if length is None or of is None or (length.op_type, of.op_type) != ("Squeeze", "Shape"):
                problem = (
                    f"node {node.name!r:.80} ({node.op_type}) does not count the rows of a tensor"
                )
                raise self.refused(problem)

    # ---- constants and weights

    def check_tensor(self, tensor: TensorProto) -> None:
        """One initializer: its type, its size and where its bytes stand."""
        name, dtype = tensor.name, TENSOR_TYPES.get(tensor.data_type)
        if dtype is None or len(tensor.dims) > MAX_RANK or any(d < 0 for d in tensor.dims):
            shown = f"type {tensor.data_type} {list(tensor.dims)!r:.60}"
            raise self.refused(f"tensor {name!r:.80} is of {shown}, which no export has")
        if tensor.data_location == TensorProto.EXTERNAL:
            self.check_location(tensor, dtype)
        else:
            self.check_inline(tensor, dtype)

    def check_location(self, tensor: TensorProto, dtype: str) -> None:
        """A weight in a file beside the graph."""
        keys = {entry.key: entry.value for entry in tensor.external_data}
        location = keys.get("location", "")
        if not keys.keys() <= LOCATION_KEYS or location not in self.sizes:
            where = f"tensor {tensor.name!r:.80} stands in {location!r:.80}"
            raise self.refused(f"{where}, not in {' or '.join(self.sizes)}")
        offset, length = (whole(keys.get(key, "0")) for key in ("offset", "length"))
        count = math.prod(tensor.dims)
        wanted = (count + 1) // 2 if dtype in FOUR_BITS else count * item_bytes(dtype)
        if offset is None or length != wanted or offset + wanted > self.sizes[location]:
            span = f"{keys.get('length', '')!r:.40} bytes at {keys.get('offset', '')!r:.40}"
            problem = f"tensor {tensor.name!r:.80} of {wanted} bytes has {span} of {location}"
            raise self.refused(problem)

    def check_inline(self, tensor: TensorProto, dtype: str) -> None:
        """A constant in the graph itself: small, and where it says sizes or axes, bounded."""
        count = math.prod(tensor.dims)
        size = count * item_bytes(dtype)
        whole_numbers = dtype in ("int32", "int64")
        if size > MAX_INLINE_BYTES or (whole_numbers and count > MAX_INTEGERS):
            raise self.refused(f"the constant {tensor.name!r:.80} has {count} elements")
        try:
            array = numpy_helper.to_array(tensor)
        except (ValueError, TypeError) as error:
            problem = f"the constant {tensor.name!r:.80} is damaged ({error!s:.80})"
            raise self.refused(problem) from error
        if whole_numbers and array.size and int(np.abs(array).max()) > MAX_INTEGER:
            raise self.refused(f"the constant {tensor.name!r:.80} is beyond {MAX_INTEGER}")

    # ---- inputs, outputs and results

    def check_signature(
        self, graph: GraphProto, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> None:
        """Inputs and outputs are those of the contract, in its order."""
        for kind, values, wanted in (
            ("input", graph.input, inputs),
            ("output", graph.output, outputs),
        ):
            for value, spec in zip(values, wanted, strict=False):
                if (value.name, shown_type(value)) != (spec.name, shown_spec(spec)):
                    is_, should = shown_type(value), shown_spec(spec)
                    problem = f"{kind} {value.name!r:.80} is {is_}; by config.json {spec.name!r} is"
                    raise self.refused(f"{problem} {should}")
            if len(values) != len(wanted):
                raise self.refused(f"{len(values)} {kind}s; by config.json {len(wanted)}")

    def check_sizes(self, model: ModelProto, call_sizes: Mapping[str, int]) -> None:
        """Shapes fit together, and no result is much larger than all weights and inputs."""
        sizes = [math.prod(tensor.dims) for tensor in model.graph.initializer]
        for value in model.graph.input:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_value = call_sizes[dim.dim_param]
            sizes.append(math.prod(d.dim_value for d in value.type.tensor_type.shape.dim))
        for value in model.graph.output:
            value.type.tensor_type.ClearField("shape")
        most = max(MIN_ELEMENTS, MAX_GROWTH * max(sizes))
        shapes = dict(inferred(model, self.refused))
        for name, dims in shapes.items():
            known = math.prod(dim for dim in dims if dim is not None)
            if known > most:
                raise self.refused(f"the result {name!r:.80} has {known} elements")
        self.check_concats(model, shapes)

    def check_concats(self, model: ModelProto, shapes: Mapping[str, Sequence[int | None]]) -> None:
        """A result that is joined of others has a known length: a chain of them doubles each
        time."""
        for node in model.graph.node:
            if node.op_type != "Concat":
                continue
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            dims = shapes.get(node.output[0], [])
            if not -len(dims) <= axis < len(dims) or dims[axis] is None:
                raise self.refused(f"node {node.name!r:.80} (Concat) makes a result of any length")


def inferred(
    model: ModelProto, refused: Callable[[str], BundleError]
) -> Iterator[tuple[str, list[int | None]]]:
    """The name and the dimensions of each result whose rank is known; None: not known."""
    try:
        with_shapes = onnx.shape_inference.infer_shapes(
            model, check_type=True, strict_mode=True, data_prop=True
        )
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        message = " ".join(str(error).split())
        raise refused(f"its shapes do not fit ({message:.200})") from error
    for value in (*with_shapes.graph.value_info, *with_shapes.graph.output):
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            dims = tensor.shape.dim
            yield value.name, [d.dim_value if d.HasField("dim_value") else None for d in dims]


def all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """The nodes of a graph and of its subgraphs."""
    waiting = [graph]
    while waiting:
        for node in waiting.pop().node:
            yield node
            waiting += [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]


def subgraphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The subgraphs of all nodes."""
    for node in all_nodes(graph):
        yield from (a.g for a in node.attribute if a.type == AttributeProto.GRAPH)


def follows(attribute: AttributeProto, rule: Rule) -> bool:
    """Whether an attribute is of the type and within the bounds of a rule."""
    kind = attribute.type
    match rule:
        case Int(low, high):
            return bool(kind == AttributeProto.INT and low <= attribute.i <= high)
        case Ints(low, high):
            fits = len(attribute.ints) <= MAX_RANK and all(low <= i <= high for i in attribute.ints)
            return bool(kind == AttributeProto.INTS and fits)
        case Float(low, high):
            return bool(kind == AttributeProto.FLOAT and low <= attribute.f <= high)
        case Text(words):
            text = attribute.s.decode(errors="replace")
            return bool(kind == AttributeProto.STRING and text in words)
        case Subgraph(of):
            return bool(kind == AttributeProto.GRAPH and is_flat(attribute.g, of))


def is_flat(graph: GraphProto, of: Collection[str]) -> bool:
    """Whether a subgraph has no weights and no subgraphs of its own, only the operators `of`, and
    no chain of joined results."""
    nested = any(a.type == AttributeProto.GRAPH for node in graph.node for a in node.attribute)
    known = not of or all(node.op_type in of for node in graph.node)
    joins = sum(node.op_type == "Concat" for node in graph.node)
    stored = graph.initializer or graph.sparse_initializer
    return known and not nested and not stored and joins <= 1


def value_of(attribute: AttributeProto) -> object:
    """The value of an attribute, for a message."""
    if attribute.type == AttributeProto.GRAPH:
        return "a subgraph of " + ", ".join(sorted({n.op_type for n in attribute.g.node}))
    try:
        return onnx.helper.get_attribute_value(attribute)
    except (ValueError, TypeError):
        return "an unknown type"


def is_mark(key: str, value: str) -> bool:
    """Whether metadata of a node is what the exporter writes of quantized weights."""
    if key == INPUT_SCALE:
        try:
            return 0 < float(value) < math.inf
        except ValueError:
            return False
    known: Mapping[str, Iterable[str]] = {
        SCHEME: SCHEMES,
        ACTIVATIONS: {scheme.activations for scheme in SCHEMES.values()},
        KEEP_PRECISION: ("true",),
    }
    return value in known.get(key, ())


def whole(text: str) -> int | None:
    """A whole number from 0 as text; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def item_bytes(dtype: str) -> int:
    """Bytes of an element; four-bit types count as one."""
    return {"int8": 1, "bool": 1, "int32": 4, "int64": 8, "float32": 4}.get(
        dtype, 2 if dtype.endswith("16") else 1
    )


def shown_type(value: onnx.ValueInfoProto) -> str:
    """Type and dimensions of an input or output, as `shown_spec` shows those of the contract."""
    tensor = value.type.tensor_type
    dims = ", ".join(d.dim_param or str(d.dim_value) for d in tensor.shape.dim)
    return f"{TENSOR_TYPES.get(tensor.elem_type, 'of another type')} [{dims:.120}]"


def shown_spec(spec: TensorSpec) -> str:
    """Type and dimensions of a tensor of the contract."""
    return f"{spec.dtype} [{', '.join(map(str, spec.shape))}]"
