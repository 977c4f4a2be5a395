"""If becomes Where: the same values, and both branches in the graph itself."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from edgespec.backends.tensorrt.lowering import conditionals
from edgespec.backends.tensorrt.target import Dialect, Target
from edgespec.errors import ContractError

TARGET = Target(dialect=Dialect.NATIVE, compute="float32", capacity=8, max_rows=2)
HEAD = '<ir_version: 11, opset_import: ["" : 24]> g '
INPUTS = "(bool flag, float[S,4] a, float[S,4] b)"
THEN = "then_branch = one () => (float[S,4] p) { p = Neg (a) }"
ELSE = "else_branch = other () => (float[S,4] q) { q = Identity (b) }"


def model(inner: str, output: str = "float[S,4] y") -> ir.Model:
    return ir.from_onnx_text(f"{HEAD} {INPUTS} => ({output}) {{ {inner} }}")


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize(
    "inner",
    [
        f"y = If (flag) <{THEN}, {ELSE}>",
        f"c = If (flag) <{THEN}, {ELSE}> y = Exp (c)",
        f"c = If (flag) <{THEN}, {ELSE}> d = If (flag) <{THEN}, {ELSE}> y = Add (c, d)",
    ],
    ids=["output", "inside", "two"],
)
def test_the_flag_chooses_as_before(inner: str, flag: bool) -> None:
    feeds = {
        "flag": np.array(flag),
        "a": np.arange(8, dtype=np.float32).reshape(2, 4) / 8,
        "b": np.ones((2, 4), np.float32),
    }
    changed = model(inner)
    conditionals.apply(changed, TARGET)
    kinds = {node.op_type for node in changed.graph.all_nodes()}
    assert "Where" in kinds
    assert not kinds & {"If", "Identity"}
    (wanted,) = ReferenceEvaluator(ir.to_proto(model(inner))).run(None, feeds)
    (found,) = ReferenceEvaluator(ir.to_proto(changed)).run(None, feeds)
    np.testing.assert_array_equal(found, wanted)


TWO_RESULTS = (
    "y, z = If (flag) <then_branch = one () => (float[S,4] p, float[S,4] r)"
    " { p = Neg (a) r = Exp (a) }, else_branch = other () => (float[S,4] q, float[S,4] s)"
    " { q = Neg (b) s = Exp (b) }>"
)
NESTED = f"else_branch = other () => (float[S,4] q) {{ q = If (flag) <{THEN}, {ELSE}> }}"


@pytest.mark.parametrize(
    ("inner", "why"),
    [
        (f"y = If (flag) <{THEN}, {NESTED}>", "no If within an If"),
        (TWO_RESULTS, "one output"),
    ],
    ids=["nested", "two-results"],
)
def test_another_form_is_refused(inner: str, why: str) -> None:
    with pytest.raises(ContractError, match=why):
        conditionals.apply(model(inner), TARGET)
