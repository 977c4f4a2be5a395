"""Which type each value of a lowered graph has, one rule a row."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from edgespec.backends.tensorrt.lowering import precision
from edgespec.backends.tensorrt.target import Compute, Dialect, Target
from edgespec.errors import ContractError

HEAD = '<ir_version: 11, opset_import: ["" : 24]> g '
INPUTS = "bfloat16[B,S,4] x, bfloat16[B,S,4] z, float[B,S,2] cos"
VALUES = {
    "bias": np.full(4, 0.1, np.float32),
    "stored": np.full(4, 0.1, ml_dtypes.bfloat16),
    "weight": np.eye(4, dtype=np.float32) / 3,
    "scale": np.array(0.3, np.float32),
    "mask": np.array([True, False, True, True]),
    "int8": np.ones((4, 4), np.int8),
}


def model(nodes: str, output: str) -> ir.Model:
    made = ir.from_onnx_text(f"{HEAD} ({INPUTS}) => ({output}) {{ {nodes} }}")
    for name, array in VALUES.items():
        tensor = ir.tensor(array, name=name)
        value = next(
            (v for node in made.graph for v in node.inputs if v is not None and v.name == name),
            None,
        )
        if value is not None:
            value.const_value, value.type = tensor, ir.TensorType(tensor.dtype)
            value.shape = ir.Shape(array.shape)
            made.graph.register_initializer(value)
    for i, node in enumerate(made.graph):
        node.name = f"n{i}"
    return made


def typed(nodes: str, output: str = "bfloat16[B,S,4] y", compute: Compute = "bfloat16") -> ir.Model:
    made = model(nodes, output)
    target = Target(dialect=Dialect.NATIVE, compute=compute, capacity=8, max_rows=2)
    precision.apply(made, target)
    onnx.checker.check_model(ir.to_proto(made), full_check=True)
    return made


def type_of(made: ir.Model, name: str) -> str:
    """Of the output of the node that the row is about."""
    node = next(node for node in made.graph if node.name == name)
    assert node.outputs[0].dtype is not None
    return node.outputs[0].dtype.name


# The last node of a row, and its type with bfloat16 inputs
RULES = {
    "product": ("y = MatMul (x, weight)", "BFLOAT16"),
    "bias": ("y = Add (x, bias)", "BFLOAT16"),
    "residual stream": ("y = Add (x, z)", "FLOAT"),
    "scale": ("y = Mul (x, scale)", "FLOAT"),
    "activation": ("y = Sigmoid (x)", "FLOAT"),
    "norm": ("y = RMSNormalization <axis = -1> (x, stored)", "FLOAT"),
    "product behind a norm": (
        "n = RMSNormalization <axis = -1> (x, stored) y = MatMul (n, weight)",
        "BFLOAT16",
    ),
    "smoothing behind a norm": (
        "n = RMSNormalization <axis = -1> (x, stored) y = Mul (n, bias)",
        "FLOAT",
    ),
    "moved": ("s = Sigmoid (x) y = Transpose <perm = [0, 1, 2]> (s)", "FLOAT"),
    "side by side": ("s = Sigmoid (x) y = Concat <axis = 1> (s, z)", "BFLOAT16"),
    "side by side in float32": ("s = Sigmoid (x) y = Concat <axis = 1> (s, s)", "FLOAT"),
    "chosen": ("y = Where (mask, x, z)", "BFLOAT16"),
}


@pytest.mark.parametrize("row", RULES)
def test_a_rule(row: str) -> None:
    nodes, wanted = RULES[row]
    made = typed(nodes)
    assert type_of(made, f"n{nodes.count('=') - nodes.count('<') - 1}") == wanted
    (output,) = made.graph.outputs
    assert (output.name, output.dtype) == ("y", ir.DataType.BFLOAT16)


def test_nothing_is_cast_in_float32() -> None:
    nodes = "h = MatMul (x, weight) s = Add (h, x) y = Mul (s, scale)"
    made = model(nodes, "float[B,S,4] y")
    for value in made.graph.inputs:
        value.type = ir.TensorType(ir.DataType.FLOAT)
    target = Target(dialect=Dialect.NATIVE, compute="float32", capacity=8, max_rows=2)
    precision.apply(made, target)
    assert [node.op_type for node in made.graph] == ["MatMul", "Add", "Mul"]


def test_a_marked_product_stays_float32_and_reads_its_weight_so() -> None:
    made = model("y = MatMul (x, weight)", "bfloat16[B,S,4] y")
    precision.keep_float32(made.graph[0])
    target = Target(dialect=Dialect.NATIVE, compute="bfloat16", capacity=8, max_rows=2)
    precision.apply(made, target)
    product = next(node for node in made.graph if node.op_type == "MatMul")
    assert {value.dtype for value in product.inputs if value} == {ir.DataType.FLOAT}


def test_a_stored_weight_is_never_rounded_twice() -> None:
    """bfloat16 -> float32 -> float16 and bfloat16 -> float16 are the same, but float32 -> bfloat16
    -> float16 would not be; and what is stored in the compute type is read as it is."""
    nodes = "w = Cast <to = 1> (stored) y = Mul (x, w)"
    made = typed(nodes)
    product = next(node for node in made.graph if node.op_type == "Mul")
    assert product.inputs[1] is made.graph.initializers["stored"]


def test_scales_of_a_quantized_weight_are_of_the_compute_type() -> None:
    nodes = "w = DequantizeLinear <axis = 1> (int8, bias) y = MatMul (x, w)"
    made = typed(nodes)
    product = next(node for node in made.graph if node.op_type == "MatMul")
    weight = product.inputs[1]
    assert weight is not None
    dequantized = weight.producer()
    assert dequantized is not None
    assert dequantized.op_type == "DequantizeLinear"  # directly in front of the product
    scale = dequantized.inputs[1]
    assert scale is not None
    assert scale.const_value is not None
    wanted = VALUES["bias"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(scale.const_value.numpy(), wanted)


def test_an_operator_without_a_rule_is_refused() -> None:
    with pytest.raises(ContractError, match=r"n0: lowering needs a rule for the type of Erf"):
        typed("y = Erf (x)")
