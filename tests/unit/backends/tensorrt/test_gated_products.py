"""What is put around the product of a gated MLP in float16, and where nothing is."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from edgespec.backends.tensorrt.lowering import gated_products
from edgespec.backends.tensorrt.target import Compute, Dialect, Target

SILU = "s = Sigmoid (x) a = Mul (x, s) p = Mul (a, z)"
GELU = 'a = Gelu <approximate = "tanh"> (x) p = Mul (a, z)'
DOWN = "d = MatMul (p, weight) y = Add (d, x)"
ROUNDED = "q = QuantizeLinear <output_dtype = 3> (p, step) r = DequantizeLinear (q, step)"
FORMS = {
    "silu": f"{SILU} {DOWN}",
    "gelu": f"{GELU} {DOWN}",
    "smoothed": f"{SILU} m = Mul (p, smooth) d = MatMul (m, weight) y = Add (d, x)",
    "ordered": f"{SILU} o = Gather <axis = -1> (p, order) d = MatMul (o, weight) y = Add (d, x)",
}
OTHERS = {
    "gate of attention": f"s = Sigmoid (z) p = Mul (x, s) {DOWN}",
    "gate of another value": f"s = Sigmoid (z) a = Mul (x, s) p = Mul (a, z) {DOWN}",
    "activation alone": f"s = Sigmoid (x) p = Mul (x, s) {DOWN}",
    "read by two": f"{SILU} d = MatMul (p, weight) y = Add (d, p)",
}
VALUES = {
    "weight": np.arange(16, dtype=np.float32).reshape(4, 4) / 16,
    "smooth": np.array([1, 2, 0.5, 4], np.float32),
    "order": np.array([3, 1, 0, 2]),
    "step": np.array(100, np.float32),
}


def model(nodes: str) -> ir.Model:
    made = ir.from_onnx_text(
        '<ir_version: 11, opset_import: ["" : 24]> g'
        f" (float[1,2,4] x, float[1,2,4] z) => (float[1,2,4] y) {{ {nodes} }}"
    )
    for i, node in enumerate(made.graph):
        node.name = f"n{i}"
        for value in node.inputs:
            if value is not None and value.name in VALUES and not value.is_initializer():
                value.const_value = ir.tensor(VALUES[value.name], name=value.name)
                value.type, value.shape = (
                    ir.TensorType(value.const_value.dtype),
                    ir.Shape(VALUES[value.name].shape),
                )
                made.graph.register_initializer(value)
    return made


def lowered(nodes: str, compute: Compute = "float16") -> ir.Model:
    made = model(nodes)
    target = Target(dialect=Dialect.NATIVE, compute=compute, capacity=8, max_rows=2)
    gated_products.apply(made, target)
    return made


def kinds(made: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in made.graph)


def run(made: ir.Model) -> np.ndarray:
    x = np.linspace(-2, 80, 8, dtype=np.float32).reshape(1, 2, 4)
    (found,) = ReferenceEvaluator(ir.to_proto(made)).run(None, {"x": x, "z": 125 * x})
    assert isinstance(found, np.ndarray)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_the_product_reads_less_and_gives_the_same(form: str) -> None:
    """The factor is a power of two: not a bit differs in float32."""
    made = lowered(FORMS[form])
    assert kinds(made) - kinds(model(FORMS[form])) == Counter(Mul=2)
    np.testing.assert_array_equal(run(made), run(model(FORMS[form])))
    product = next(node for node in made.graph if node.op_type == "MatMul")
    given = product.inputs[0]
    assert given is not None
    made.graph.outputs[:] = [given]
    given.type, given.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, 2, 4])
    largest = np.abs(run(made)).max()
    assert largest < 65504 < gated_products.SHIFT * largest


@pytest.mark.parametrize("form", OTHERS)
def test_nothing_else_is_changed(form: str) -> None:
    assert kinds(lowered(OTHERS[form])) == kinds(model(OTHERS[form]))


def test_what_is_quantized_is_clipped_as_the_quantizer_would() -> None:
    nodes = f"{SILU} {ROUNDED} d = MatMul (r, weight) y = Add (d, x)"
    made = lowered(nodes)
    assert kinds(made) - kinds(model(nodes)) == Counter(Clip=1)
    np.testing.assert_array_equal(run(made), run(model(nodes)))


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_types_with_the_range_of_float32_need_nothing(compute: Compute) -> None:
    assert kinds(lowered(FORMS["silu"], compute)) == kinds(model(FORMS["silu"]))
