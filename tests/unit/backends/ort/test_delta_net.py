"""Recurrent layers of an exported graph become one node each, and no other form is taken for
one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx_ir as ir
import pytest

from edgespec.backends.ort.delta_net import OPERATOR
from edgespec.backends.ort.lowering import lower
from edgespec.errors import ContractError
from edgespec.export.components import ExportOptions
from tests import made, toys

RECURRENT = 3  # of four layers
HEADS = {"key_heads": 2, "value_heads": 4}


@pytest.fixture(scope="module")
def onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = toys.make_qwen3_5(tmp_path_factory.mktemp("hybrid") / "base", **HEADS)
    return made.exported(base, ExportOptions()) / "llm" / "model.onnx"


def test_nothing_of_a_recurrent_layer_is_left_beside_its_node(onnx: Path) -> None:
    model = ir.load(onnx)
    lower(model, "data", tree_cache="float32")
    found = Counter(node.op_type for node in model.graph)
    assert found[OPERATOR] == RECURRENT
    assert not found.keys() & {"Loop", "Sum", "Softplus", "TopK", "EyeLike"}
    assert found["Exp"] == RECURRENT  # of a constant, A_log
    (node, *_) = [node for node in model.graph if node.op_type == OPERATOR]
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    assert attributes["num_key_heads"] == HEADS["key_heads"]
    assert attributes["num_value_heads"] == HEADS["value_heads"]
    # the norm of keys, and once more for the scale of queries
    assert attributes["q_scale"] == pytest.approx(attributes["k_scale"] ** 2)


def test_other_kernels_keep_the_layers_as_they_are(onnx: Path) -> None:
    model = ir.load(onnx)
    lower(model, "data")
    found = Counter(node.op_type for node in model.graph)
    assert found["Loop"] == RECURRENT
    assert OPERATOR not in found


@pytest.mark.parametrize(
    "name",
    ["decay/step", "conv", "conv/sigmoid", "gate/sigmoid", "delta/beta", "norm", "k/unit"],
)
def test_another_form_is_refused(onnx: Path, name: str) -> None:
    model = ir.load(onnx)
    (node,) = [node for node in model.graph if node.name == f"layers.0/linear_attn/{name}"]
    node.op_type = "Relu"
    with pytest.raises(ContractError, match="lowering needs"):
        lower(model, "data", tree_cache="float32")


def test_taps_in_another_order_are_refused(onnx: Path) -> None:
    model = ir.load(onnx)
    (total,) = [node for node in model.graph if node.name == "layers.0/linear_attn/conv"]
    products = [value.producer() for value in total.inputs if value is not None]
    first, second = (node.inputs[1] for node in products[:2] if node is not None)
    assert products[0] is not None
    assert products[1] is not None
    products[0].replace_input_with(1, second)
    products[1].replace_input_with(1, first)
    with pytest.raises(ContractError, match="a tap for each row"):
        lower(model, "data", tree_cache="float32")
