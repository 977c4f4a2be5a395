"""A graph as the checks see it: its nodes with those of subgraphs, and for each name its type, its
shape and its value where it is a constant.

Types and shapes are those that ONNX infers, not those that are written down. Operators of
TensorRT's own, which ONNX does not know, are replaced by a Cast to what they make, in a copy. Loads
no external data.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto
from onnx.defs import OpSchema, SchemaError
from onnx.shape_inference import InferenceError, infer_shapes

from edgespec.backends.tensorrt.parser_operators import CUSTOM_DOMAIN, CUSTOM_INPUTS
from edgespec.backends.tensorrt.versions import Capabilities

Dims = tuple[int | str | None, ...]
DEFAULT_DOMAINS = ("", "ai.onnx")
CONTRADICTIONS = (InferenceError, ValueError)  # as inference raises them
MAX_TEXT = 200  # characters of what ONNX says
MAX_VALUES = 2**16  # elements of a constant whose value is looked at


@dataclass(frozen=True, slots=True)
class Tensor:
    """What is known of a value: the name of its type, its dimensions; None where unknown."""

    dtype: str | None = None
    dims: Dims | None = None


UNKNOWN = Tensor()


@dataclass(frozen=True, slots=True)
class Scope:
    """One graph, the main one or a branch or a body: what its names mean, outer ones included."""

    graph: GraphProto
    tensors: Mapping[str, Tensor]
    stored: Mapping[str, TensorProto]
    constants: frozenset[str]  # what is known when the engine is built
    owner: NodeProto | None = None

    def tensor(self, name: str) -> Tensor:
        """Type and dimensions of a value, by its name."""
        return self.tensors.get(name, UNKNOWN)

    def array(self, name: str) -> NDArray[np.generic] | None:
        """The value of a small constant that is stored in the graph; None where it is none."""
        tensor = self.stored.get(name)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            return None
        if np.prod(tensor.dims) > MAX_VALUES:
            return None
        return np.asarray(onnx.numpy_helper.to_array(tensor))

    def is_constant(self, name: str) -> bool:
        """Whether a value is known when the engine is built: stored, or made of such values."""
        return name in self.constants


class View:
    """A model, checked for one release, whose external data lies in `directory`; None: it is not
    looked at. `contradiction` is the first node at which types and shapes contradict each other or
    the operator's definition, and what ONNX says of it."""

    def __init__(
        self, model: ModelProto, version: Capabilities, directory: Path | None = None
    ) -> None:
        self.model, self.version, self.directory = model, version, directory
        typed, self.contradiction = inferred(model)
        self.scopes = list(scopes_of(typed))

    def nodes(self, *op_types: str) -> Iterator[tuple[Scope, NodeProto]]:
        """The nodes of these types, of all graphs, that have the form of their operator; without
        types every node."""
        for scope in self.scopes:
            for node in scope.graph.node:
                if not op_types or (node.op_type in op_types and self.has_form(node)):
                    yield scope, node

    def schema(self, node: NodeProto) -> OpSchema | None:
        """The definition of a standard operator in the model's opset; TensorRT's domain may have
        such ones too."""
        if not is_known(node) or node.op_type in CUSTOM_INPUTS:
            return None
        versions = [o.version for o in self.model.opset_import if o.domain in DEFAULT_DOMAINS]
        try:
            return onnx.defs.get_schema(node.op_type, max(versions, default=1), "")
        except SchemaError:
            return None

    def has_form(self, node: NodeProto) -> bool:
        """Whether a node is of a known operator, and as that defines it."""
        known = node.op_type in CUSTOM_INPUTS or self.schema(node) is not None
        return known and is_known(node) and not self.form_problem(node)

    def form_problem(self, node: NodeProto) -> str:
        """What a node lacks that its operator needs; empty: nothing."""
        schema = self.schema(node)
        inputs, outputs = CUSTOM_INPUTS.get(node.op_type, 0), 1
        if schema is not None:
            inputs, outputs = schema.min_input, schema.min_output
        elif not is_known(node):
            return ""
        if len(node.input) < inputs or not all(node.input[i] for i in required_of(schema, inputs)):
            return f"{node.op_type} has {inputs} inputs at least"
        if len(node.output) < outputs:
            return f"{node.op_type} has {outputs} outputs at least"
        known = {} if schema is None else schema.attributes
        for each in node.attribute:
            if each.name in known and str(known[each.name].type) != attribute_type(each.type):
                return f"{each.name} is of another type"
        return ""

    @property
    def main(self) -> Scope:
        """The main graph."""
        return self.scopes[0]


def required_of(schema: OpSchema | None, count: int) -> Iterator[int]:
    """Which of the first `count` inputs may not be left out."""
    single = OpSchema.FormalParameterOption.Single
    for i in range(count):
        kinds = [] if schema is None else schema.inputs
        if i >= len(kinds) or kinds[i].option == single:
            yield i


def is_known(node: NodeProto) -> bool:
    """Whether a node is of the default domain or of TensorRT's."""
    return node.domain in (*DEFAULT_DOMAINS, CUSTOM_DOMAIN)


def name_of(node: NodeProto) -> str:
    """The node's name, or that of its first output, and its operator."""
    made = next((name for name in node.output if name), "")
    return f"{node.name or made or 'a node'} ({node.op_type})"


def attribute_of(node: NodeProto, name: str) -> object:
    """The value of an attribute; None where the node has it not."""
    for each in node.attribute:
        if each.name == name:
            return onnx.helper.get_attribute_value(each)
    return None


def integer(node: NodeProto, name: str, default: int) -> int:
    """An attribute that is an integer."""
    value = attribute_of(node, name)
    return value if isinstance(value, int) else default


def type_name(number: int) -> str:
    """ONNX's name of a tensor type; its number where it has none."""
    try:
        return str(TensorProto.DataType.Name(number))
    except ValueError:
        return str(number)


def attribute_type(number: int) -> str:
    """A type of attributes as the definitions of operators name it."""
    return f"AttrType.{AttributeProto.AttributeType.Name(number)}"


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The branches of If, the body of Loop or Scan."""
    for each in node.attribute:
        if each.type == AttributeProto.GRAPH:
            yield each.g


# ---- types and shapes


def inferred(model: ModelProto) -> tuple[ModelProto, tuple[str, str] | None]:
    """A copy with inferred types, whose nodes are those of `model` again, and the contradiction."""
    typed, problem = standard(model), None
    try:
        typed = infer_shapes(typed, check_type=True, strict_mode=True, data_prop=True)
    except CONTRADICTIONS as error:
        problem = place_of(error)
        with suppress(*CONTRADICTIONS):
            typed = infer_shapes(typed, data_prop=True)
    pairs = zip([*every_graph(typed.graph)], [*every_graph(model.graph)], strict=True)
    for graph, source in pairs:
        for i, node in enumerate(source.node):
            if node.domain == CUSTOM_DOMAIN:
                graph.node[i].CopyFrom(node)
    return typed, problem


def standard(model: ModelProto) -> ModelProto:
    """A copy of standard operators alone, without the types that are written in it."""
    copy = ModelProto()
    copy.CopyFrom(model)
    for graph in every_graph(copy.graph):
        replace_custom(graph)
        del graph.value_info[:]
    return copy


def place_of(error: Exception) -> tuple[str, str]:
    """The node that ONNX names in an error, and what it says of it."""
    text = " ".join(str(error).split())
    node = re.search(r"\(op_type:(\w+)(?:, node name: ([^)]*))?\)", text)
    place = f"{node[2] or 'a node'} ({node[1]})" if node else "the model"
    return place, text[-MAX_TEXT:]


def every_graph(graph: GraphProto) -> Iterator[GraphProto]:
    """The graph and those below it; each before those in it."""
    yield graph
    for node in graph.node:
        for below in subgraphs(node):
            yield from every_graph(below)


def replace_custom(graph: GraphProto) -> None:
    """Let operators of TensorRT's own be Casts to what their first output is."""
    for node in graph.node:
        if node.domain != CUSTOM_DOMAIN or not node.input or not node.output:
            continue
        made = made_type(node)
        first = node.output[0]
        keep = [node.input[0]]
        node.Clear()
        node.op_type = "Cast"
        node.input.extend(keep)
        node.output.append(first)
        node.attribute.append(onnx.helper.make_attribute("to", made))


def made_type(node: NodeProto) -> int:
    """The type of the first output of an operator of TensorRT's own."""
    if node.op_type == "TRT_FP4DynamicQuantize":
        return TensorProto.FLOAT4E2M1
    if node.op_type.startswith("TRT_INT4Q"):
        return TensorProto.INT4
    quantizes = "Quantize" in node.op_type and "Dequantize" not in node.op_type
    return integer(
        node, "output_dtype", TensorProto.FLOAT8E4M3FN if quantizes else TensorProto.FLOAT
    )


def scopes_of(model: ModelProto) -> Iterator[Scope]:
    """The main graph and all below it, each with its names."""
    yield from scopes_below(model.graph, None, None)


def scopes_below(
    graph: GraphProto, outer: Scope | None, owner: NodeProto | None
) -> Iterator[Scope]:
    """A graph and those in it; `owner` is the node that it belongs to."""
    tensors = {value.name: tensor_of(value) for value in values_of(graph)}
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.output:
            constant = constant_of(node)
            if constant is not None:
                stored[node.output[0]] = constant
    for name, tensor in stored.items():
        tensors[name] = Tensor(type_name(tensor.data_type), tuple(tensor.dims))
    scope = Scope(
        graph,
        tensors if outer is None else ChainMap(tensors, dict(outer.tensors)),
        stored if outer is None else ChainMap(stored, dict(outer.stored)),
        constants_of(graph, {*stored, *(() if outer is None else outer.constants)}),
        owner,
    )
    yield scope
    for node in graph.node:
        for below in subgraphs(node):
            yield from scopes_below(below, scope, node)


def constants_of(graph: GraphProto, known: set[str]) -> frozenset[str]:
    """The names of a graph that are `known`, or made of such ones; nodes come in the order of their
    inputs."""
    for node in graph.node:
        follows = all(name in known for name in node.input if name)
        if follows and node.op_type not in ("If", "Loop", "Scan"):
            known.update(name for name in node.output if name)
    return frozenset(known)


def values_of(graph: GraphProto) -> Iterable[ValueInfoProto]:
    """All values whose types are written down."""
    return [*graph.value_info, *graph.input, *graph.output]


def tensor_of(value: ValueInfoProto) -> Tensor:
    """What a value's type says."""
    made = value.type.tensor_type
    dtype = type_name(made.elem_type) if made.elem_type else None
    if not made.HasField("shape"):
        return Tensor(dtype)
    dims = [
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
        for dim in made.shape.dim
    ]
    return Tensor(dtype, tuple(dims))


def constant_of(node: NodeProto) -> TensorProto | None:
    """The value of a Constant as a tensor; None for kinds that the parser refuses."""
    for each in node.attribute:
        value = onnx.helper.get_attribute_value(each)
        if each.name == "value":
            tensor: TensorProto = each.t
            return tensor
        if each.name in ("value_int", "value_ints"):
            return onnx.numpy_helper.from_array(np.array(value, np.int64), node.output[0])
        if each.name in ("value_float", "value_floats"):
            return onnx.numpy_helper.from_array(np.array(value, np.float32), node.output[0])
    return None
