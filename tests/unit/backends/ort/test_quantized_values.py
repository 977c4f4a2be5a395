"""Weights of a canonical graph are read back as they were written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from edgespec.artifacts import file_names
from edgespec.backends.canonical_graph import OPERATORS
from edgespec.backends.ort.quantized_values import quantized_values
from edgespec.errors import ContractError
from edgespec.quantization.quantized_weight import dequantize_stored
from tests.one_weight import weights_of_forms
from tests.quantized_products import WEIGHTS, Product

FORMS = weights_of_forms((24, 160))  # the last super-block has two blocks of three


@pytest.mark.parametrize("name", [*FORMS, *WEIGHTS])
def test_a_weight_is_read_with_its_bits_and_types(tmp_path: Path, name: str) -> None:
    stored = {**FORMS, **WEIGHTS}[name]
    model = Product.of(stored, tmp_path).model
    node = next(node for node in model.graph if node.op_type == "MatMul")
    source = quantized_values(node)
    assert source is not None
    assert (source.shape, source.scheme) == (stored.shape, stored.scheme)
    found = source.read(tmp_path)
    assert np.array_equal(dequantize_stored(found), dequantize_stored(stored))
    form = source.form()
    assert form.values.dtype == stored.values.dtype
    if name in FORMS:
        for key in ("scales", "zero_points", "minimums", "super_scales", "super_minimums"):
            one, other = getattr(form, key), getattr(stored, key)
            assert one is other or (one.dtype == other.dtype and np.array_equal(one, other))


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_valid_onnx_of_operators_that_an_export_has(tmp_path: Path, name: str) -> None:
    Product.of(FORMS[name], tmp_path)
    model = onnx.load(tmp_path / file_names.MODEL, load_external_data=False)
    assert {node.op_type for node in model.graph.node} <= OPERATORS
    onnx.checker.check_model(str(tmp_path / file_names.MODEL), full_check=True)


def another_operator(model: ir.Model) -> None:
    (less,) = (node for node in model.graph if node.op_type == "Sub")
    less.op_type = "Add"


def another_group(model: ir.Model) -> None:
    inner = next(node for node in model.graph if node.op_type == "DequantizeLinear")
    inner.attributes.add(ir.AttrInt64("block_size", 1))


def another_type(model: ir.Model) -> None:
    value = next(value for name, value in model.graph.initializers.items() if "minimum" in name)
    value.const_value = ir.tensor(np.zeros((5, 24), np.int32))


@pytest.mark.parametrize("change", [another_operator, another_group, another_type])
def test_another_form_is_refused_by_the_products_name(
    tmp_path: Path, change: Callable[[ir.Model], None]
) -> None:
    model = Product.of(FORMS["super-blocks less minimums"], tmp_path).model
    change(model)
    node = next(node for node in model.graph if node.op_type == "MatMul")
    with pytest.raises(ContractError, match="up: a quantized weight of the scheme 'q4_k' in a"):
        quantized_values(node)
