"""NVIDIA's parser takes every graph of the portable dialect, and its compiler builds each kind.

TensorRT-RTX reads newer operators too; that TensorRT 10.13 has all of these is what the linter's
rules say. Nothing here runs an engine.
"""

from __future__ import annotations

import onnx_ir as ir
import pytest

from edgespec.backends.tensorrt.target import Compute, Dialect
from tests.parity.tensorrt_graphs import ROWS, canonical
from tests.tensorrt import rtx
from tests.tensorrt_on_ort import as_bytes

pytestmark = pytest.mark.tensorrt


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ROWS)
def test_a_portable_graph_is_parsed(name: str, compute: Compute) -> None:
    model = canonical(name).lowered(Dialect.PORTABLE, compute)
    answer = rtx.ask(as_bytes(model), build=False)
    assert answer.step == "", answer.lines


@pytest.mark.parametrize("name", ROWS)
def test_a_portable_graph_is_compiled_in_float16(name: str) -> None:
    model = canonical(name).lowered(Dialect.PORTABLE, "float16")
    answer = rtx.ask(as_bytes(model), build=True)
    assert answer.step == "", answer.lines


def test_a_graph_of_two_types_is_refused() -> None:
    """What the tests above would not notice if everything were taken."""
    model = canonical("qwen2").lowered(Dialect.PORTABLE, "float16")
    cast = next(node for node in model.graph if node.op_type == "Cast" and node.inputs[0])
    cast.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.BOOL))
    assert rtx.ask(as_bytes(model), build=True).step != ""
