"""A thin wrapper of onnx-ir: readable node names, typed inputs, and weights that are not loaded.

Knows ONNX values and nodes. Knows no model: layers are in `layers` and in the families' files.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.checkpoint.source import ByteSink, TensorInfo
from edgespec.contract import OPSET, TensorSpec

IR_VERSION = 11  # the newest that TensorRT's parsers for opset 24 read
ALIGN_BYTES = 4096  # a page, so that engines can map each tensor
DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "int64": ir.DataType.INT64,
    "int32": ir.DataType.INT32,
    "bool": ir.DataType.BOOL,
    "int8": ir.DataType.INT8,
    "uint8": ir.DataType.UINT8,
    "int4": ir.DataType.INT4,
    "uint4": ir.DataType.UINT4,
    "float8_e4m3fn": ir.DataType.FLOAT8E4M3FN,
    "float8_e8m0fnu": ir.DataType.FLOAT8E8M0,
    "float4_e2m1fn": ir.DataType.FLOAT4E2M1,
}


class TensorSource(Protocol):
    """A source of tensor bytes: a checkpoint, or one that repacks quantized weights."""

    def write_to(self, name: str, fh: ByteSink) -> None:
        """Writes the little-endian bytes of a tensor."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a source, and the location of its bytes beside the graph."""

    source: TensorSource
    info: TensorInfo
    location: str  # file name beside model.onnx
    offset: int  # in bytes


@dataclass
class WeightPlan:
    """The offset of each weight in the external data file.

    One plan serves a graph and its pieces.
    """

    location: str
    weights: dict[str, Weight] = field(default_factory=dict)
    size_bytes: int = 0

    def place(self, name: str, source: TensorSource, info: TensorInfo) -> Weight:
        """Returns the weight called `name`; the first call chooses its offset."""
        if name not in self.weights:
            offset = -(-self.size_bytes // ALIGN_BYTES) * ALIGN_BYTES
            self.weights[name] = Weight(source, info, self.location, offset)
            self.size_bytes = offset + info.num_bytes
        return self.weights[name]

    def point(self, name: str, weight: Weight) -> None:
        """Assigns `name` a location in another file beside the graph, which the caller writes."""
        self.weights[name] = weight

    def written_here(self) -> list[Weight]:
        """Returns the weights in this plan's own file, in the order of their offsets."""
        return [weight for weight in self.weights.values() if weight.location == self.location]


class GraphBuilder:
    """Collects the nodes of one graph."""

    def __init__(self, name: str, plan: WeightPlan) -> None:
        self.name = name
        self.plan = plan
        self.shared: dict[Hashable, Any] = {}  # values with several readers
        self.nodes: list[ir.Node] = []
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []
        self.initializers: dict[str, ir.Value] = {}

    def input(self, spec: TensorSpec) -> ir.Value:
        """Adds and returns an input."""
        value = typed(ir.Value(name=spec.name), spec)
        self.inputs.append(value)
        return value

    def output(self, value: ir.Value, spec: TensorSpec) -> None:
        """Declares `value` an output with the name, shape and type of `spec`."""
        if value.name in {other.name for other in (*self.inputs, *self.outputs)}:
            value = self.op("Identity", value, name=f"{spec.name}/identity")
        value.name = spec.name
        self.outputs.append(typed(value, spec))

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        name: str,
        domain: str = "",
        **attributes: int | float | str | Sequence[int] | ir.Graph,
    ) -> ir.Value:
        """Adds a node with one output, called `name:0`, and returns the output."""
        known: dict[str, Any] = {  # ir.node would find the type of a list out, by protocols
            key: ir.AttrInt64s(key, value) if isinstance(value, list | tuple) else value
            for key, value in attributes.items()
        }
        node = ir.node(op_type, inputs, known, domain=domain, name=name)
        node.outputs[0].name = f"{name}:0"
        self.nodes.append(node)
        return node.outputs[0]

    def split(
        self, x: ir.Value, sizes: Sequence[int], axis: int, name: str
    ) -> tuple[ir.Value, ...]:
        """Splits `x` along an axis into parts of the given sizes."""
        node = ir.node(
            "Split", [x, self.shape(*sizes)], {"axis": axis}, num_outputs=len(sizes), name=name
        )
        return self.parts(node)

    def halves(self, x: ir.Value, axis: int, name: str) -> tuple[ir.Value, ...]:
        """Splits `x` into halves along an axis of even, possibly symbolic length."""
        return self.parts(
            ir.node("Split", [x], {"axis": axis, "num_outputs": 2}, num_outputs=2, name=name)
        )

    def loop(
        self,
        times: ir.Value,
        start: ir.Value,
        body: Callable[[ir.Value, ir.Value], ir.Value],
        name: str,
    ) -> ir.Value:
        """Returns the result of `value = body(round, value)`, repeated `times` from `start`.

        The body may read values of the outer graph.
        """
        spec = TensorSpec(f"{name}/round", "int64", ())
        round_, going = typed(ir.Value(name=spec.name), spec), ir.Value(name=f"{name}/going")
        typed(going, TensorSpec(f"{name}/going", "bool", ()))
        value = ir.Value(name=f"{name}/value", type=ir.TensorType(ir.DataType.FLOAT))
        before = len(self.nodes)
        result = body(round_, value)
        on = self.op("Identity", going, name=f"{name}/on")
        nodes, self.nodes[before:] = self.nodes[before:], []
        graph = ir.Graph([round_, going, value], [on, result], nodes=nodes, name=name)
        return self.op("Loop", times, None, start, name=name, body=graph)

    def parts(self, node: ir.Node) -> tuple[ir.Value, ...]:
        """Adds a node with several outputs, called `name:i`, and returns them."""
        for i, output in enumerate(node.outputs):
            output.name = f"{node.name}:{i}"
        self.nodes.append(node)
        return tuple(node.outputs)

    def constant(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        """Returns a small constant that is stored in the graph; one name is one constant."""
        if name not in self.initializers:
            tensor = ir.tensor(array, name=name)
            self.initializers[name] = ir.Value(
                name=name,
                shape=ir.Shape(array.shape),
                type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )
        return self.initializers[name]

    def shape(self, *dims: int) -> ir.Value:
        """Returns the int64 constant [*dims]."""
        return self.constant("shape/" + "x".join(map(str, dims)), np.array(dims, np.int64))

    def weight(self, weight: Weight, name: str) -> ir.Value:
        """Returns a stored weight as a value in its stored dtype. Reads nothing."""
        if name not in self.initializers:
            info = weight.info
            shape, dtype = ir.Shape(info.shape), DTYPES[info.dtype]
            tensor = ir.ExternalTensor(
                weight.location, weight.offset, info.num_bytes, dtype, shape=shape, name=name
            )
            self.initializers[name] = ir.Value(
                name=name, shape=shape, type=ir.TensorType(dtype), const_value=tensor
            )
        return self.initializers[name]

    def model(self) -> ir.Model:
        """Returns the collected graph as a model of opset OPSET."""
        graph = ir.Graph(
            self.inputs,
            self.outputs,
            nodes=self.nodes,
            initializers=list(self.initializers.values()),
            opset_imports={"": OPSET},
            name=self.name,
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="edgespec")


def typed(value: ir.Value, spec: TensorSpec) -> ir.Value:
    """Sets the shape and type of `spec` and returns the value."""
    value.shape = ir.Shape(spec.shape)
    value.type = ir.TensorType(DTYPES[spec.dtype])
    return value


def branch(name: str, nodes: Sequence[ir.Node], output: ir.Value) -> ir.Graph:
    """Returns one branch of an `If`."""
    return ir.Graph([], [output], nodes=list(nodes), name=name)


def save(model: ir.Model, path: Path) -> None:
    """Writes the graph. External weights are referenced, not written."""
    ir.save(model, path)
