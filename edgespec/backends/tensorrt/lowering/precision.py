"""One type for each value: products, attention and the cache in the compute type, the rest in
float32.

TensorRT is strongly typed: the inputs of a node have one type, and every change of type is a Cast.
The canonical graph is float32 throughout; this pass goes through it once, gives each node a type
and puts a Cast where a value of another type comes in. Knows operators. Knows no layer.

- PRODUCTS: the compute type. Weights are read in it, whatever type they are stored in, and
  DequantizeLinear makes it.
- ALWAYS_FLOAT32, sums of two computed values (the residual stream) and products with one number
  (scales): float32. So is what other passes, or export, have marked (`keep_float32`).
- ELEMENTWISE: float32 where something that is computed comes in so, else the compute type. What is
  float32 stays so until a product, a cache or an output rounds it.
- MOVES: the type of what is moved. JOINS: float32 where all parts are, else the compute type.

A compiler fuses what is elementwise with its neighbours: float32 there costs no memory traffic, but
for the residual stream, which is small beside weights. What it is worth, as the mean relative RMS
error of all outputs against float32 over five random toys of tests/parity/tensorrt_graphs.py:
float16 8.7e-4 (1.1e-3 with norms, rotations, residual stream and gates rounded too), bfloat16
7.1e-3 (8.6e-3); of that the residual stream alone 9.9e-4 and 8.0e-3, norms 9.7e-4 and 7.7e-3,
rotations 9.0e-4 and 7.3e-3. What it is for is range: the residual stream of some models, and the
squares of its norms, are beyond float16.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from edgespec.backends.rewriting import Constants, name_outputs, require, required
from edgespec.backends.tensorrt.target import Compute, Target
from edgespec.contract import KEEP_PRECISION

TYPES: dict[Compute, ir.DataType] = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
FLOATS = frozenset(TYPES.values())
NUMPY = {
    ir.DataType.FLOAT: np.dtype(np.float32),
    ir.DataType.FLOAT16: np.dtype(np.float16),
    ir.DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}

PRODUCTS = frozenset({"MatMul", "Attention", "TensorScatter", "QuantizeLinear", "DequantizeLinear"})
# What loses more than a rounding in half precision, or grows beyond float16
ALWAYS_FLOAT32 = frozenset(
    {
        *(
            "RMSNormalization",
            "LayerNormalization",
            "RotaryEmbedding",
            "Softmax",
            "Sigmoid",
            "Gelu",
            "Exp",
            "Softplus",
        ),
        *("ReduceMean", "ReduceSum", "ReduceMin", "Sqrt", "Reciprocal", "CumSum"),
    }
)
ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Neg", "Sum", "Clip"})
MOVES = frozenset(
    {
        *("Reshape", "Transpose", "Slice", "Gather", "GatherND", "GatherElements", "Identity"),
        *("Unsqueeze", "Squeeze", "Expand", "Split", "Pad", "TopK"),
    }
)
JOINS = frozenset({"Concat", "Where"})
NAMES_ITS_TYPE = frozenset({"Cast"})
WITHOUT_FLOATS = {
    **dict.fromkeys(("Shape", "Size", "ArgMax"), ir.DataType.INT64),
    **dict.fromkeys(
        ("And", "Or", "Not", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"),
        ir.DataType.BOOL,
    ),
}


def keep_float32(node: ir.Node) -> None:
    """Mark a node whose inputs and outputs stay float32."""
    node.metadata_props[KEEP_PRECISION] = "true"


def apply(model: ir.Model, target: Target) -> None:
    """Give each value its type, from those of the graph's inputs to those of its outputs.

    ContractError for an operator whose type no rule says.
    """
    graph, compute = model.graph, TYPES[target.compute]
    typing = Typing(graph, compute)
    for node in list(graph):
        typing.type_node(node)
    for index, output in enumerate(graph.outputs):
        typing.type_output(index, output)
    check_types(graph)


class Typing:
    """The walk over a graph: nodes come in the order of their inputs."""

    def __init__(self, graph: ir.Graph, compute: ir.DataType) -> None:
        self.graph, self.compute, self.constant = graph, compute, Constants(graph)
        self.outputs = {value: value.dtype for value in graph.outputs}  # as declared
        self.cast: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self.constants: set[ir.Value] = set(graph.initializers.values())

    def type_node(self, node: ir.Node) -> None:
        """Let the inputs of a node have its type, and its outputs be declared of it."""
        if node.domain:  # `quantization` has declared what it makes
            if required(node.inputs[0]).dtype in FLOATS:
                self.unify(node, [0], self.compute)
            return
        if node.inputs and all(value is None or self.is_constant(value) for value in node.inputs):
            self.constants.update(node.outputs)  # of a weight: its reader says which type
            declare(node, own_type(node))
            return
        floats = [i for i, value in enumerate(node.inputs) if value and value.dtype in FLOATS]
        if floats and node.op_type not in NAMES_ITS_TYPE:
            self.unify(node, floats, self.type_of(node, floats))
        declare(node, own_type(node))

    def type_of(self, node: ir.Node, floats: list[int]) -> ir.DataType:
        """The type that a node computes in."""
        computed = [
            required(node.inputs[i]).dtype
            for i in floats
            if not self.is_constant(required(node.inputs[i]))
        ]
        always = node.op_type in ALWAYS_FLOAT32 or node.op_type in WITHOUT_FLOATS
        if KEEP_PRECISION in node.metadata_props or always:
            return ir.DataType.FLOAT
        if node.op_type in PRODUCTS:
            return self.compute
        if node.op_type in MOVES:
            dtype = required(node.inputs[floats[0]]).dtype
            assert dtype is not None
            return dtype
        all_float32 = bool(computed) and set(computed) == {ir.DataType.FLOAT}
        if node.op_type in JOINS:
            return ir.DataType.FLOAT if all_float32 else self.compute
        require(node.op_type in ELEMENTWISE, node, f"a rule for the type of {node.op_type}")
        residual = node.op_type == "Add" and len(computed) == 2
        if residual or self.scales(node) or ir.DataType.FLOAT in computed:
            return ir.DataType.FLOAT
        return self.compute

    def scales(self, node: ir.Node) -> bool:
        """Whether it is a product with one number."""
        scale = node.inputs[1] if node.op_type == "Mul" else None
        return scale is not None and scale.const_value is not None and scale.const_value.size == 1

    def unify(self, node: ir.Node, floats: list[int], dtype: ir.DataType) -> None:
        """Let these inputs of a node be of one type."""
        for i in floats:
            node.replace_input_with(i, self.as_type(required(node.inputs[i]), dtype, node))

    def type_output(self, index: int, value: ir.Value) -> None:
        """Let an output be of the type that it was declared with."""
        wanted = self.outputs[value]
        if wanted is None or value.dtype == wanted:
            return
        node = value.producer()
        assert node is not None
        cast = ir.node(
            "Cast", [value], {"to": int(wanted)}, name=f"{node.name}/{wanted.name.lower()}"
        )
        made, name = cast.outputs[0], value.name
        value.name, made.name = f"{name}/computed", name
        made.type, made.shape = ir.TensorType(wanted), value.shape
        self.graph.append(cast)
        self.graph.outputs[index] = made

    # ---- values in another type

    def as_type(self, value: ir.Value, dtype: ir.DataType, before: ir.Node) -> ir.Value:
        """The value in a type, made in front of `before` where no earlier node has asked."""
        if value.dtype == dtype:
            return value
        if (value, dtype) not in self.cast:
            self.cast[value, dtype] = (
                self.constant_as_type(value, dtype, before)
                if self.is_constant(value)
                else self.cast_of(value, dtype, before)
            )
        return self.cast[value, dtype]

    def constant_as_type(self, value: ir.Value, dtype: ir.DataType, before: ir.Node) -> ir.Value:
        """A weight in a type, from what is stored: never by way of float32."""
        node = value.producer()
        if node is None:
            stored = value.const_value
            if stored is None or isinstance(stored, ir.ExternalTensor):
                return self.cast_of(value, dtype, before)
            array = stored.numpy().astype(NUMPY[dtype])
            return self.constant(f"{value.name}/{dtype.name.lower()}", array)
        if node.op_type == "Cast":
            return self.as_type(required(node.inputs[0]), dtype, before)
        if node.op_type == "Transpose":
            source = self.as_type(required(node.inputs[0]), dtype, before)
            return self.again(node, [source], dtype, before, dict(node.attributes))
        if node.op_type == "DequantizeLinear" and KEEP_PRECISION not in node.metadata_props:
            return self.dequantized(node, dtype, before)
        return self.cast_of(value, dtype, before)

    def dequantized(self, node: ir.Node, dtype: ir.DataType, before: ir.Node) -> ir.Value:
        """A quantized weight in a type, by scales of that type: TensorRT gives the result its
        scales' type. Scales that are quantized themselves are worth something in float32 alone:
        their global scale is below what float16 holds."""
        values, scale = (required(value) for value in node.inputs[:2])
        attributes = dict(node.attributes)
        attributes.pop("output_dtype", None)
        if scale.dtype not in FLOATS:  # powers of two, which are no type to compute in
            attributes["output_dtype"] = ir.AttrInt64("output_dtype", int(dtype))
        elif (maker := scale.producer()) is not None and maker.op_type != "Cast":
            scale = self.cast_of(scale, dtype, before)
        else:
            scale = self.as_type(scale, dtype, before)
        return self.again(node, [values, scale], dtype, before, attributes)

    def again(
        self,
        node: ir.Node,
        inputs: list[ir.Value],
        dtype: ir.DataType,
        before: ir.Node,
        attributes: dict[str, ir.Attr],
    ) -> ir.Value:
        """The output of a node like `node` over other inputs, in front of `before`."""
        name = f"{node.name}/{dtype.name.lower()}"
        made = ir.node(node.op_type, inputs, attributes, name=name)
        self.place(made, dtype, before)
        self.constants.add(made.outputs[0])
        return made.outputs[0]

    def cast_of(self, value: ir.Value, dtype: ir.DataType, before: ir.Node) -> ir.Value:
        """A Cast in front of a node."""
        name = f"{value.name}/{dtype.name.lower()}"
        node = ir.node("Cast", [value], {"to": int(dtype)}, name=name)
        self.place(node, dtype, before)
        if self.is_constant(value):
            self.constants.add(node.outputs[0])
        return node.outputs[0]

    def is_constant(self, value: ir.Value) -> bool:
        """Whether a value is a weight, or made of weights alone."""
        return value in self.constants or value.is_initializer()

    def place(self, node: ir.Node, dtype: ir.DataType, before: ir.Node) -> None:
        """Put a new node in front of `before`; all that read its output come later."""
        name_outputs([node])
        self.graph.insert_before(before, node)
        declare(node, dtype)


def declare(node: ir.Node, dtype: ir.DataType) -> None:
    """Set the type of a node's outputs; the indices of TopK are integers."""
    for i, output in enumerate(node.outputs):
        kind = ir.DataType.INT64 if node.op_type == "TopK" and i else dtype
        output.type = ir.TensorType(kind)


def own_type(node: ir.Node) -> ir.DataType:
    """The type that a node's inputs and attributes give its output, as ONNX has it."""
    if node.op_type in WITHOUT_FLOATS:
        return WITHOUT_FLOATS[node.op_type]
    for name in ("to", "output_dtype"):
        if name in node.attributes:
            return ir.DataType(node.attributes[name].as_int())
    index = 1 if node.op_type in ("Where", "DequantizeLinear") else 0
    dtype = required(node.inputs[index]).dtype
    require(dtype is not None, node, "inputs of known types")
    assert dtype is not None
    return dtype


# ---- postcondition


def check_types(graph: ir.Graph) -> None:
    """ContractError where the floating-point inputs of a node have several types, as in no strongly
    typed network."""
    for node in graph:
        if node.domain:
            continue  # its scale is float32 beside any type
        dtypes = {value.dtype for value in node.inputs if value and value.dtype in FLOATS}
        require(len(dtypes) <= 1, node, "inputs of one type")
