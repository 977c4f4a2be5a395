"""Norms and gates become parts of the product that reads them where they are its own, and operators
by themselves elsewhere. That nothing else is computed is a claim of
tests/parity/test_norm_matmul.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from edgespec.backends.ort.norm_matmul import fuse_norms
from edgespec.contract import OPSET

WIDTH = 4


class Made:
    """A graph in the making: its nodes by the names of their outputs."""

    def __init__(self) -> None:
        self.values: dict[str, ir.Value] = {}
        self.inputs: list[ir.Value] = []
        self.initializers: list[ir.Value] = []
        self.nodes: list[ir.Node] = []

    def given(self, name: str) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape(("rows", WIDTH)), type=FLOAT)
        self.inputs.append(value)
        return value

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        tensor = ir.tensor(array, name=name)
        kind = ir.TensorType(tensor.dtype)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=kind, const_value=tensor)
        self.initializers.append(value)
        return value

    def op(self, op_type: str, *inputs: ir.Value, name: str, outputs: int = 1, **more: object):
        domain = "edgespec" if op_type == "LowBitMatMul" else ""
        node = ir.node(op_type, inputs, more, domain=domain, num_outputs=outputs, name=name)
        for i, output in enumerate(node.outputs):
            output.name = f"{name}:{i}"
        self.nodes.append(node)
        return node.outputs[0] if outputs == 1 else node.outputs

    def norm(self, x: ir.Value, name: str, epsilon: float = 1e-6, axis: int = -1) -> ir.Value:
        weight = self.constant(f"{name}/weight", np.ones(WIDTH, np.float32))
        return self.op("RMSNormalization", x, weight, name=name, epsilon=epsilon, axis=axis)

    def product(self, x: ir.Value, name: str, outputs: int = 1):
        weights = [self.constant(f"{name}/w{i}", np.zeros(1, np.uint8)) for i in range(outputs)]
        return self.op(
            "LowBitMatMul", x, *weights, name=name, outputs=outputs, K=WIDTH, N=[WIDTH] * outputs
        )

    def silu(self, x: ir.Value, name: str) -> ir.Value:
        return self.op("Mul", x, self.op("Sigmoid", x, name=f"{name}/sigmoid"), name=name)

    def model(self, *outputs: ir.Value) -> ir.Model:
        graph = ir.Graph(
            self.inputs,
            outputs,
            nodes=self.nodes,
            initializers=self.initializers,
            opset_imports={"": OPSET, "edgespec": 1},
            name="made",
        )
        return ir.Model(graph, ir_version=10)


FLOAT = ir.TensorType(ir.DataType.FLOAT)


def joined(model: ir.Model) -> dict[str, ir.Node]:
    """The nodes after the rewrite, by name; each value is made before it is read."""
    fuse_norms(model)
    made = set(model.graph.inputs) | set(model.graph.initializers.values())
    for node in model.graph:
        assert {value for value in node.inputs if value is not None} <= made
        made |= set(node.outputs)
    return {str(node.name): node for node in model.graph}


def names(values: object) -> list[str | None]:
    return [None if value is None else value.name for value in values]  # type: ignore[attr-defined]


def operators(nodes: dict[str, ir.Node]) -> Counter[str]:
    return Counter(node.op_type for node in nodes.values())


def test_a_layer_becomes_its_products() -> None:
    b = Made()
    x, mixed = b.given("x"), b.given("mixed")
    total = b.op("Add", x, mixed, name="residual")
    gate, up = b.product(b.norm(total, "norm", 1e-5), "gate_up", outputs=2)
    down = b.product(b.op("Mul", b.silu(gate, "silu"), up, name="mul"), "down")
    nodes = joined(b.model(b.op("Add", total, down, name="end")))
    assert list(nodes) == ["gate_up", "down", "end"]
    first, second, end = nodes.values()
    assert first.op_type == "NormLowBitMatMul"
    wanted = ["mixed", None, "x", "norm/weight", None, "gate_up/w0", "gate_up/w1"]
    assert names(first.inputs) == wanted
    assert names(first.outputs) == ["residual:0", "gate_up:0", "gate_up:1"]
    assert first.attributes["epsilon"].as_float() == pytest.approx(1e-5)
    assert first.attributes["N"].as_ints() == (WIDTH, WIDTH)
    assert second.op_type == "GatedLowBitMatMul"
    assert names(second.inputs) == ["gate_up:0", "gate_up:1", None, "down/w0"]
    assert second.attributes["activation"].as_int() == 0
    assert names(end.inputs) == ["residual:0", "down:0"]


def test_a_norm_of_what_is_added_is_a_part_too() -> None:
    b = Made()
    x, mixed = b.given("x"), b.given("mixed")
    total = b.op("Add", x, b.norm(mixed, "inner"), name="residual")
    y = b.product(b.norm(total, "norm"), "product")
    nodes = joined(b.model(y, b.op("Neg", total, name="also")))
    assert operators(nodes) == {"NormLowBitMatMul": 1, "Neg": 1}
    wanted = ["mixed", "inner/weight", "x", "norm/weight", None, "product/w0"]
    assert names(nodes["product"].inputs) == wanted


def test_a_norm_without_a_sum_has_no_output_for_it() -> None:
    b = Made()
    nodes = joined(b.model(b.product(b.norm(b.given("x"), "norm"), "product")))
    (node,) = nodes.values()
    assert names(node.inputs) == ["x", None, None, "norm/weight", None, "product/w0"]
    assert names(node.outputs) == ["", "product:0"]


def test_halves_of_one_product_are_gated_as_they_stand() -> None:
    b = Made()
    sizes = b.constant("sizes", np.array([WIDTH, WIDTH]))
    gate, up = b.op("Split", b.given("both"), sizes, name="split", outputs=2, axis=-1)
    gelu = b.op("Gelu", gate, name="gelu", approximate="tanh")
    nodes = joined(b.model(b.product(b.op("Mul", gelu, up, name="mul"), "down")))
    (node,) = nodes.values()
    assert names(node.inputs) == ["both", None, None, "down/w0"]
    assert node.attributes["activation"].as_int() == 1


def test_a_sigmoid_gates_the_rows_of_a_product() -> None:
    b = Made()
    gate = b.op("Sigmoid", b.given("gate"), name="sigmoid")
    nodes = joined(b.model(b.product(b.op("Mul", b.given("flat"), gate, name="mul"), "o_proj")))
    (node,) = nodes.values()
    assert names(node.inputs) == ["gate", "flat", None, "o_proj/w0"]
    assert node.attributes["activation"].as_int() == 2


def two_readers(b: Made) -> list[ir.Value]:
    normed = b.norm(b.op("Add", b.given("x"), b.given("mixed"), name="residual"), "norm")
    return [b.product(normed, "product"), b.op("Neg", normed, name="also")]


def normed_output(b: Made) -> list[ir.Value]:
    normed = b.norm(b.op("Add", b.given("x"), b.given("mixed"), name="residual"), "norm")
    return [b.product(normed, "product"), normed]


@pytest.mark.parametrize("make", [two_readers, normed_output])
def test_rows_that_others_read_are_written(make: Callable[[Made], list[ir.Value]]) -> None:
    b = Made()
    nodes = joined(b.model(*make(b)))
    assert (operators(nodes)["RmsNorm"], operators(nodes)["LowBitMatMul"]) == (1, 1)
    assert names(nodes["norm"].inputs) == ["mixed", None, "x", "norm/weight"]
    assert names(nodes["norm"].outputs) == ["norm:0", "residual:0"]
    assert names(nodes["product"].inputs) == ["norm:0", "product/w0"]


def test_a_gate_in_front_of_another_product_is_written() -> None:
    b = Made()
    silu = b.silu(b.given("gate"), "silu")
    made = b.op("Mul", silu, b.given("up"), name="mul")
    nodes = joined(b.model(b.op("MatMul", made, b.given("w"), name="down")))
    assert operators(nodes) == {"Gate": 1, "MatMul": 1}
    assert names(nodes["mul"].inputs) == ["gate", "up"]


def test_what_is_no_residual_or_no_norm_of_rows_stays() -> None:
    b = Made()
    bias = b.constant("bias", np.ones(WIDTH, np.float32))
    biased = b.op("Add", b.given("x"), bias, name="biased")
    state = b.op("Add", b.given("y"), b.given("z"), name="state")  # an output: no part of a node
    columns = b.norm(b.given("columns"), "columns", axis=0)
    outputs = [b.product(b.norm(biased, "a"), "first"), b.product(b.norm(state, "b"), "second")]
    nodes = joined(b.model(*outputs, state, b.product(columns, "third")))
    assert operators(nodes) == {
        "Add": 2,
        "NormLowBitMatMul": 2,
        "RMSNormalization": 1,
        "LowBitMatMul": 1,
    }
    assert names(nodes["first"].inputs)[0] == "biased:0"
    assert names(nodes["second"].inputs)[0] == "state:0"


def test_norms_that_differ_in_more_than_their_weights_are_two() -> None:
    b = Made()
    inner = b.norm(b.given("mixed"), "inner", epsilon=1e-5)
    total = b.op("Add", b.given("x"), inner, name="residual")
    nodes = joined(b.model(b.product(b.norm(total, "norm"), "product")))
    assert operators(nodes) == {"RmsNorm": 1, "NormLowBitMatMul": 1}


def biased(b: Made, size: int = WIDTH, constant: bool = True) -> ir.Model:
    """Three products of a norm, each with a bias."""
    outputs = b.product(b.norm(b.given("x"), "norm"), "qkv", outputs=3)
    biases = [b.constant(f"bias{i}", np.zeros(size, np.float32)) for i in range(3)]
    if not constant:
        biases[2] = b.given("more")
    sums = [
        b.op("Add", *pair, name=f"biased{i}")
        for i, pair in enumerate(zip(outputs, biases, strict=True))
    ]
    return b.model(*[b.op("Neg", one, name=f"end{i}") for i, one in enumerate(sums)])


def test_biases_are_added_by_the_product() -> None:
    nodes = joined(biased(Made()))
    assert operators(nodes) == {"NormLowBitMatMul": 1, "Concat": 1, "Neg": 3}
    assert names(nodes["qkv"].inputs)[4] == "qkv/bias:0"
    assert names(nodes["qkv/bias"].inputs) == ["bias0", "bias1", "bias2"]
    assert names(nodes["qkv"].outputs) == ["", "biased0:0", "biased1:0", "biased2:0"]


def test_what_is_no_bias_is_added_behind_the_product() -> None:
    for model in (biased(Made(), size=1), biased(Made(), constant=False)):
        nodes = joined(model)
        assert operators(nodes) == {"NormLowBitMatMul": 1, "Add": 3, "Neg": 3}
        assert names(nodes["qkv"].inputs)[4] is None


def test_a_product_that_the_graph_gives_too_has_its_bias_added_behind_it() -> None:
    b = Made()
    y = b.product(b.norm(b.given("x"), "norm"), "product")
    total = b.op("Add", y, b.constant("bias", np.zeros(WIDTH, np.float32)), name="biased")
    assert operators(joined(b.model(y, total))) == {"NormLowBitMatMul": 1, "Add": 1}
