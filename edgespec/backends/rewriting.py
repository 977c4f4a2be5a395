"""What rewrites of a graph have in common: new nodes and small constants in it, and preconditions.

Knows of names, places and nodes that make a value. Knows no operator and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.contract import TensorSpec
from edgespec.errors import ContractError


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
        name = f"lowered/int64/[{','.join(map(str, values))}]"  # a vector of one is no scalar
        return self(name, np.array(values, np.int64))


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
        return self.node(op_type, values, attributes, label=label).outputs[0]

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        label: str = "",
        domain: str = "",
        num_outputs: int = 1,
    ) -> ir.Node:
        """A new node with named outputs."""
        name = "/".join(part for part in (str(self.before.name), self.part, label) if part)
        node = ir.node(
            op_type,
            inputs,
            dict(attributes or {}),
            domain=domain,
            num_outputs=num_outputs,
            name=name,
        )
        name_outputs([node])
        assert self.before.graph is not None
        self.before.graph.insert_before(self.before, node)
        return node


def described(value: ir.Value, spec: TensorSpec) -> ir.Value:
    """The value with the name, the type and the shape that a contract says."""
    value.name, value.shape = spec.name, ir.Shape(spec.shape)
    value.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(spec.dtype)))
    return value


def name_outputs(nodes: list[ir.Node]) -> None:
    """Name each output after its node: `name:0`, `name:1`."""
    for node in nodes:
        for i, output in enumerate(node.outputs):
            output.name = f"{node.name}:{i}"


# ---- preconditions


def required(value: ir.Value | None) -> ir.Value:
    """The value itself; ContractError where it is None."""
    if value is None:
        raise ContractError(
            "a node lacks an input", "Export the checkpoint again with this version."
        )
    return value


def require(holds: bool, node: ir.Node, requirement: str) -> None:
    """ContractError that lowering needs `requirement` at this node, unless it holds."""
    if not holds:
        raise ContractError(
            f"{node.name}: lowering needs {requirement}",
            "The graph was not written by this version: export it again.",
        )


def scalar(value: ir.Value | None, where: ir.Node) -> float:
    """The value of a positive constant. ContractError otherwise: GroupQueryAttention takes a scale
    of zero for none."""
    constant = required(value).const_value
    require(
        constant is not None and constant.size == 1 and float(constant.numpy()) > 0,
        where,
        "a constant scale",
    )
    assert constant is not None
    return float(constant.numpy())


def producer(value: ir.Value, op_type: str | None, where: ir.Node) -> ir.Node:
    """The node that makes a value; ContractError where there is none or of another type."""
    node = value.producer()
    require(
        node is not None and op_type in (None, node.op_type),
        where,
        f"{value.name} made by {op_type or 'a node'}",
    )
    assert node is not None
    return node


def only_user(value: ir.Value, op_type: str, where: ir.Node) -> ir.Node:
    """The one node that reads a value; ContractError where there are more or of another type."""
    users = [node for node, _ in value.uses()]
    require(
        len(users) == 1 and users[0].op_type == op_type, where, f"its output read by one {op_type}"
    )
    return users[0]


def replace_output(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Let `new` be the graph output that `old` was, by name, shape and type."""
    index = next(i for i, value in enumerate(graph.outputs) if value is old)
    new.name, old.name = old.name, f"{old.name}/canonical"
    new.shape, new.type = old.shape, old.type
    graph.outputs[index] = new


def replace_value(new: ir.Value, old: ir.Value) -> None:
    """Let `new` have the name and the users of `old`."""
    new.name, new.shape, new.type = old.name, old.shape, old.type
    old.name = f"{old.name}/apart"
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def drop_input(graph: ir.Graph, name: str) -> None:
    """Remove a graph input that no node reads; ContractError where one does."""
    value = next(v for v in graph.inputs if v.name == name)
    require(not value.uses(), graph[0], f"input {name} unused after the rewrites")
    graph.inputs.remove(value)


def count(graph: ir.Graph, op_type: str) -> int:
    """How many nodes of the graph have this type."""
    return sum(node.op_type == op_type for node in graph)
