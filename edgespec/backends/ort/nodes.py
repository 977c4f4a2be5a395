"""Small constants and new nodes in a graph that is being lowered, and a run of a graph of a few
nodes.

Knows of names and places. Knows no operator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from edgespec.backends.ort.session import NO_FALLBACK, session_options
from edgespec.contract import OPSET


class Constants:
    """Small constants in the graph itself; the same name is the same constant."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph

    def __call__(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        """The constant of this name; made of `array` where there is none yet."""
        if name not in self.graph.initializers:
            tensor = ir.tensor(array, name=name)
            value = ir.Value(
                name=name,
                shape=ir.Shape(array.shape),
                type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )
            self.graph.register_initializer(value)
        return self.graph.initializers[name]

    def number(self, value: float, dtype: type[np.generic] = np.float32) -> ir.Value:
        """A scalar constant, by its value and dtype."""
        array = np.array(value, dtype)
        return self(f"lowered/{array.dtype.name}/{array.item()!r}", array)

    def int64(self, *values: int) -> ir.Value:
        """A constant vector in INT64."""
        return self(f"lowered/int64/{','.join(map(str, values))}", np.array(values, np.int64))


class Nodes:
    """New nodes in front of one that is there, in its own graph; their names begin with its
    name."""

    def __init__(self, before: ir.Node, constant: Constants, part: str = "x") -> None:
        self.before, self.constant, self.part = before, constant, part

    def __call__(
        self, op_type: str, *inputs: ir.Value | float, label: str, **attributes: Any
    ) -> ir.Value:
        """The output of a new node; numbers become constants in float32."""
        values = [
            value if isinstance(value, ir.Value) else self.constant.number(value)
            for value in inputs
        ]
        node = ir.node(op_type, values, attributes, name=f"{self.before.name}/{self.part}/{label}")
        name_outputs([node])
        assert self.before.graph is not None
        self.before.graph.insert_before(self.before, node)
        return node.outputs[0]


def name_outputs(nodes: list[ir.Node]) -> None:
    """Name each output after its node: `name:0`, `name:1`."""
    for node in nodes:
        for i, output in enumerate(node.outputs):
            output.name = f"{node.name}:{i}"


def probe_graph(node: ir.Node, x: ir.Value, in_features: int, out_features: int) -> ir.Graph:
    """A graph of one node, [rows, in] -> [rows, out] in float32, for a probe of what it is lowered
    to."""
    x.shape, x.type = ir.Shape((1, "rows", in_features)), ir.TensorType(ir.DataType.FLOAT)
    name_outputs([node])
    node.outputs[0].shape, node.outputs[0].type = ir.Shape((1, "rows", out_features)), x.type
    return ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": OPSET}, name="probe")


def run_probe(graph: ir.Graph, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The outputs [rows, out] that ONNX Runtime computes from x [rows, in]."""
    options = session_options()
    options.intra_op_num_threads = 1
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = ort.InferenceSession(
        model, options, providers=["CPUExecutionProvider"], **NO_FALLBACK
    )
    outputs: Any = session.run(None, {session.get_inputs()[0].name: x[None]})
    found: NDArray[np.float32] = outputs[0][0]
    return found
