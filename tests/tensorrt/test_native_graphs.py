"""NVIDIA's parser takes every native graph, and its compiler builds those of half types with fused
attention.

Nothing is run on a GPU: that an engine is compiled says nothing about what it computes.
"""

from __future__ import annotations

import pytest

from edgespec.backends.tensorrt.target import Compute, Dialect
from tests.parity.tensorrt_graphs import BASES, DRAFTS, canonical
from tests.tensorrt import rtx
from tests.tensorrt_on_ort import as_bytes

pytestmark = pytest.mark.tensorrt
GRAPHS = BASES | DRAFTS  # hybrids: `test_hybrid_graphs`
SLOTS = 256  # holds twice the rows of rtx.ROWS, which a block draft writes in one call


def native(name: str, compute: Compute, slots: int = SLOTS) -> bytes:
    rtx.bindings()  # before anything is exported
    return as_bytes(canonical(name).lowered(Dialect.NATIVE, compute, capacity=slots))


@pytest.mark.parametrize("name", GRAPHS)
def test_the_parser_takes_every_graph_in_float32(name: str) -> None:
    answer = rtx.ask(native(name, "float32"), build=False)
    assert answer.step == "", answer.lines


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_compiler_builds_every_graph_in_half_types(name: str, compute: Compute) -> None:
    """Without leave to build attention of basic operators: it has a fused kernel."""
    for sm in (89, 120):
        answer = rtx.ask(native(name, compute), build=True, sm=sm)
        assert answer.step == "", (sm, answer.lines)


def test_float32_attention_has_no_fused_kernel() -> None:
    """Why a build has to allow that it is decomposed; the one above would pass otherwise."""
    answer = rtx.ask(native("eagle3", "float32"), build=True)
    assert answer.step == "build"
    assert any("decomposable" in line for line in answer.lines), answer.lines


def test_a_canonical_graph_is_refused() -> None:
    """What the tests above would not notice if everything were taken."""
    assert rtx.ask(as_bytes(canonical("qwen2").model()), build=False).step == "parse"
