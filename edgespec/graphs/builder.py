"""A thin face over onnx-ir: readable node names, typed inputs, and weights that stay where they are
until written.

Knows ONNX values and nodes. Knows no model: what a layer is stands in `layers` and in the families'
files.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.checkpoint.files import ByteSink, TensorInfo
from edgespec.contract import OPSET, TensorSpec

IR_VERSION = 11  # the newest that TensorRT's parsers of opset 24 read
ALIGN_BYTES = 4096  # a page, so that engines can map each tensor
DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "int64": ir.DataType.INT64,
    "int32": ir.DataType.INT32,
    "bool": ir.DataType.BOOL,
    "int8": ir.DataType.INT8,
    "int4": ir.DataType.INT4,
    "float8_e4m3fn": ir.DataType.FLOAT8E4M3FN,
    "float8_e8m0fnu": ir.DataType.FLOAT8E8M0,
    "float4_e2m1fn": ir.DataType.FLOAT4E2M1,
}


class TensorSource(Protocol):
    """Who writes a tensor's bytes when it is asked: a checkpoint, or what packs a quantized weight
    anew."""

    def write_to(self, name: str, fh: ByteSink) -> None: ...


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a source, and the place of its bytes beside the graph."""

    source: TensorSource
    info: TensorInfo
    location: str  # file name beside model.onnx
    offset: int


@dataclass
class WeightPlan:
    """Where each weight will stand in the external data file. One plan serves a graph and the
    pieces of it."""

    location: str
    weights: dict[str, Weight] = field(default_factory=dict)
    size_bytes: int = 0

    def place(self, name: str, source: TensorSource, info: TensorInfo) -> Weight:
        """The weight called `name`; its place is chosen at the first call."""
        if name not in self.weights:
            offset = -(-self.size_bytes // ALIGN_BYTES) * ALIGN_BYTES
            self.weights[name] = Weight(source, info, self.location, offset)
            self.size_bytes = offset + info.num_bytes
        return self.weights[name]

    def point(self, name: str, weight: Weight) -> None:
        """Let `name` stand in another file beside the graph, which someone else writes."""
        self.weights[name] = weight

    def written_here(self) -> list[Weight]:
        return [weight for weight in self.weights.values() if weight.location == self.location]


class GraphBuilder:
    """Collects the nodes of one graph.

    With `feeds_weights`, quantized weights are not in the graph: they are inputs of it, in float32,
    whose values are collected in `fed`. So a piece runs where an engine lacks their types, and no
    protobuf holds them.
    """

    def __init__(self, name: str, plan: WeightPlan, *, feeds_weights: bool = False) -> None:
        self.name = name
        self.plan = plan
        self.feeds_weights = feeds_weights
        self.fed: dict[str, NDArray[np.float32]] = {}
        self.shared: dict[Hashable, Any] = {}  # values that several readers may have in common
        self.nodes: list[ir.Node] = []
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []
        self.initializers: dict[str, ir.Value] = {}

    def input(self, spec: TensorSpec) -> ir.Value:
        value = typed(ir.Value(name=spec.name), spec)
        self.inputs.append(value)
        return value

    def output(self, value: ir.Value, spec: TensorSpec) -> None:
        """Declare `value` an output under the name and type of `spec`."""
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
        """Add a node with one output, which bears the node's name."""
        node = ir.node(op_type, inputs, attributes, domain=domain, name=name)
        node.outputs[0].name = f"{name}:0"
        self.nodes.append(node)
        return node.outputs[0]

    def split(
        self, x: ir.Value, sizes: Sequence[int], axis: int, name: str
    ) -> tuple[ir.Value, ...]:
        """Parts of so many entries along an axis."""
        node = ir.node(
            "Split", [x, self.shape(*sizes)], {"axis": axis}, num_outputs=len(sizes), name=name
        )
        return self.parts(node)

    def halves(self, x: ir.Value, axis: int, name: str) -> tuple[ir.Value, ...]:
        """Both halves along an axis of even, perhaps symbolic length."""
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
        """`body(round, value)` as often as `times` says, beginning with `start`; its nodes may read
        values outside."""
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
        for i, output in enumerate(node.outputs):
            output.name = f"{node.name}:{i}"
        self.nodes.append(node)
        return tuple(node.outputs)

    def constant(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        """A small constant kept in the graph itself; the same name is the same constant."""
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
        return self.constant("shape/" + "x".join(map(str, dims)), np.array(dims, np.int64))

    def weight(self, weight: Weight, name: str) -> ir.Value:
        """A stored weight as a value in its own dtype; nothing is read."""
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

    def feed(self, name: str, array: NDArray[np.float32]) -> ir.Value:
        """An input whose value stands in `fed`."""
        self.fed[name] = array
        return self.input(TensorSpec(name, "float32", array.shape))

    def model(self) -> ir.Model:
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
    value.shape = ir.Shape(spec.shape)
    value.type = ir.TensorType(DTYPES[spec.dtype])
    return value


def branch(name: str, nodes: Sequence[ir.Node], output: ir.Value) -> ir.Graph:
    """One side of an `If`."""
    return ir.Graph([], [output], nodes=list(nodes), name=name)


def save(model: ir.Model, path: Path) -> None:
    """Write the graph alone; external weights are only referred to."""
    ir.save(model, path)
