"""RMSNormalization against its basic operators: what small and large rows tell apart."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from edgespec.backends.tensorrt.lowering import basic_norms, precision
from edgespec.backends.tensorrt.target import Compute, Dialect, Target

WIDTH, EPSILON = 8, 1e-5
WEIGHT = np.linspace(0.5, 2, WIDTH).astype(np.float32)
KINDS = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16}


def normed(compute: Compute) -> ir.Model:
    """x -> Identity of its norm, in a graph that was not lowered."""
    x, y = (
        ir.Value(name=name, shape=ir.Shape(("B", WIDTH)), type=ir.TensorType(KINDS[compute]))
        for name in "xy"
    )
    weight = ir.Value(name="w", const_value=ir.tensor(WEIGHT, name="w"))
    weight.type, weight.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape((WIDTH,))
    attributes = {"axis": -1, "epsilon": EPSILON, "stash_type": 1}
    node = ir.node("RMSNormalization", [x, weight], attributes, outputs=[y], name="norm")
    graph = ir.Graph(
        [x], [y], nodes=[node], initializers=[weight], opset_imports={"": 24}, name="g"
    )
    return ir.Model(graph, ir_version=11)


def lowered(compute: Compute) -> ir.Model:
    target = Target(dialect=Dialect.PORTABLE, compute=compute, capacity=8, max_rows=8)
    model = normed(compute)
    basic_norms.apply(model, target)
    precision.apply(model, target)
    return model


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    data = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_basic_operators_give_the_norm_of_rows_of_any_size(size: float) -> None:
    """Beside small rows epsilon counts."""
    x = size * np.random.default_rng(0).standard_normal((5, WIDTH)).astype(np.float32)
    wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + EPSILON) * WEIGHT
    np.testing.assert_allclose(run(lowered("float32"), x), wanted, rtol=1e-5)
    np.testing.assert_allclose(run(normed("float32"), x), wanted, rtol=1e-5)


def test_squares_beyond_float16_are_no_infinities() -> None:
    """ONNX Runtime may leave out the casts between its nodes: so their types are looked at too."""
    x = 3000 * np.random.default_rng(0).standard_normal((5, WIDTH)).astype(np.float16)
    assert (np.abs(x.astype(np.float32)) ** 2 > np.finfo(np.float16).max).any()
    model = lowered("float16")
    parts = [node for node in model.graph if node.op_type != "Cast"]
    assert {output.dtype for node in parts for output in node.outputs} == {ir.DataType.FLOAT}
    wanted = run(normed("float32"), x.astype(np.float32))
    np.testing.assert_allclose(run(model, x), wanted, rtol=2e-3)
