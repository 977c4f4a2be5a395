"""A thin face over onnx-ir: readable node names, typed inputs, and weights that stay where they are until written.

Knows ONNX values and nodes. Knows no model: what a layer is stands in `layers` and in the families' files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.checkpoint.files import Checkpoint, TensorInfo
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
}


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a checkpoint and the place of its bytes beside the graph."""

    checkpoint: Checkpoint
    info: TensorInfo
    location: str  # file name beside model.onnx
    offset: int


@dataclass
class WeightPlan:
    """Where each weight will stand in the external data file. One plan serves a graph and the pieces of it."""

    location: str
    weights: dict[str, Weight] = field(default_factory=dict)
    size_bytes: int = 0

    def place(self, name: str, checkpoint: Checkpoint, info: TensorInfo) -> Weight:
        """The weight called `name`; its place is chosen at the first call."""
        if name not in self.weights:
            offset = -(-self.size_bytes // ALIGN_BYTES) * ALIGN_BYTES
            self.weights[name] = Weight(checkpoint, info, self.location, offset)
            self.size_bytes = offset + info.num_bytes
        return self.weights[name]

    def point(self, name: str, weight: Weight) -> None:
        """Let `name` stand in another file beside the graph, which someone else writes."""
        self.weights[name] = weight

    def written_here(self) -> list[Weight]:
        return [weight for weight in self.weights.values() if weight.location == self.location]


class GraphBuilder:
    """Collects the nodes of one graph; `scope` names stand in front of node names."""

    def __init__(self, name: str, plan: WeightPlan) -> None:
        self.name = name
        self.plan = plan
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

    def constant(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        """A small constant kept in the graph itself; the same name is the same constant."""
        if name not in self.initializers:
            tensor = ir.tensor(array, name=name)
            self.initializers[name] = ir.Value(
                name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
            )
        return self.initializers[name]

    def shape(self, *dims: int) -> ir.Value:
        return self.constant("shape/" + "x".join(map(str, dims)), np.array(dims, np.int64))

    def weight(self, weight: Weight, name: str) -> ir.Value:
        """A stored weight as a value in its own dtype; nothing is read."""
        if name not in self.initializers:
            info = weight.info
            shape, dtype = ir.Shape(info.shape), DTYPES[info.dtype]
            tensor = ir.ExternalTensor(weight.location, weight.offset, info.num_bytes, dtype, shape=shape, name=name)
            self.initializers[name] = ir.Value(name=name, shape=shape, type=ir.TensorType(dtype), const_value=tensor)
        return self.initializers[name]

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
