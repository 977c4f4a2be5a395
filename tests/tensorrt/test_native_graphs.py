"""NVIDIA's parser takes every graph of the native dialect and every quantized product.

Nothing here runs an engine.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from edgespec.backends.tensorrt.target import Compute, Dialect
from tests.parity.tensorrt_graphs import ROWS, canonical
from tests.parity.test_tensorrt_quantized import WEIGHTS, Product
from tests.tensorrt import rtx
from tests.tensorrt_on_ort import as_bytes

pytestmark = pytest.mark.tensorrt
COMPUTES = ["float16", "bfloat16"]


@pytest.mark.parametrize("compute", [*COMPUTES, "float32"])
@pytest.mark.parametrize("name", ROWS)
def test_a_native_graph_is_parsed(name: str, compute: Compute) -> None:
    model = canonical(name).lowered(Dialect.NATIVE, compute)
    answer = rtx.ask(as_bytes(model), build=False)
    assert answer.step == "", answer.lines


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_quantized_product_is_parsed(name: str, compute: Compute, tmp_path: Path) -> None:
    product = Product.of(WEIGHTS[name], tmp_path).lower(compute)
    ir.save(product.model, tmp_path / "model.onnx")
    answer = rtx.ask(tmp_path / "model.onnx", build=False)
    assert answer.step == "", answer.lines


def test_a_canonical_graph_is_refused() -> None:
    """What the tests above would not notice if everything were taken."""
    assert rtx.ask(as_bytes(canonical("qwen2").model()), build=False).step == "parse"
