"""The portable dialect against the canonical graph, both run by ONNX Runtime on the CPU.

Every kind of graph takes the same calls twice: a prompt, a chain, a tree of which a path is
committed, and what follows. The portable graph gives new rows alone; the runner copies them into
the cache, as that of a device will.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from edgespec.backends.tensorrt.lowering import lower, portable
from edgespec.backends.tensorrt.target import Compute, Dialect, Target
from edgespec.contract import present_names
from edgespec.errors import ContractError
from tests.calls import outputs_of
from tests.parity.other_forms import TAMPERED
from tests.parity.tensorrt_calls import (
    LANES,
    difference,
    lowered_runner,
    outputs,
    rounded_runner,
    wanted,
)
from tests.parity.tensorrt_graphs import (
    CAPACITY,
    KINDS_AND_DEEP,
    MAX_ROWS,
    ROWS,
    Canonical,
    canonical,
)
from tests.tensorrt_on_ort import as_bytes

# ---- graphs


def target(compute: Compute) -> Target:
    return Target(dialect=Dialect.PORTABLE, compute=compute, capacity=CAPACITY, max_rows=MAX_ROWS)


@pytest.fixture(scope="module", params=ROWS)
def graph(request: pytest.FixtureRequest) -> Canonical:
    return canonical(request.param)


# ---- equal to the canonical graph


@pytest.mark.parametrize(
    ("lanes", "apart"), [pytest.param(1, 0, marks=pytest.mark.deep), (LANES, 3)], ids=["one", "two"]
)
def test_a_portable_graph_equals_its_canonical_one(
    graph: Canonical, lanes: int, apart: int
) -> None:
    shape = graph.contract.shape
    apart = 0 if shape.recurrent else apart  # their lanes begin with their first rows
    steps, expected = wanted(graph, lanes, apart)
    found = outputs(lowered_runner(graph, Dialect.PORTABLE, "float32", lanes), steps)
    assert difference(found, expected) < 1e-5


# Largest relative difference of an output or of a row of the cache that a half type may make on
# these random weights; measured: 3.2e-3 and 3.2e-2, and 1.2e-2 and 8.4e-2 where states sum up all
# rows. Rounding is the only difference: the same in float32 is 2e-6.
HALVES: dict[Compute, float] = {"float16": 6e-3, "bfloat16": 6e-2}
RECURRENT_HALVES: dict[Compute, float] = {"float16": 2.5e-2, "bfloat16": 1.5e-1}


@pytest.mark.parametrize("graph", KINDS_AND_DEEP, indirect=True)
@pytest.mark.parametrize("compute", HALVES)
def test_in_half_precision_it_is_within_roundings(graph: Canonical, compute: Compute) -> None:
    steps, expected = wanted(graph)
    found = outputs(rounded_runner(graph, Dialect.PORTABLE, compute), steps)
    assert 1e-5 < difference(found, expected) < bound(graph, compute)


def bound(graph: Canonical, compute: Compute) -> float:
    return (RECURRENT_HALVES if graph.contract.shape.recurrent else HALVES)[compute]


def test_caches_and_states_may_be_float16(graph: Canonical) -> None:
    """The types of inputs and outputs are those of the lowered contract."""
    steps, expected = wanted(graph)
    found = outputs(lowered_runner(graph, Dialect.PORTABLE, "float16"), steps)
    assert difference(found, expected) < bound(graph, "float16")


# ---- what a parser of 10.13 reads

BASIC = {
    *("Add", "Cast", "Concat", "Div", "Expand", "GatherElements", "GatherND", "Gelu", "Less"),
    *("MatMul", "Mul", "Neg", "Range", "ReduceMean", "Reshape", "Shape", "Sigmoid", "Slice"),
    *("Softmax", "Split", "Sqrt", "Squeeze", "Transpose", "Unsqueeze", "Where"),
}
OF_EXPERTS = {"Equal", "Gather", "ReduceSum", "Sum", "TopK"}
OF_RECURRENT_LAYERS = {
    *("And", "Clip", "Equal", "Exp", "Gather", "Greater", "Pad", "ReduceMin", "Softplus", "Sub"),
    *("Sum", "TopK"),
}


@pytest.mark.parametrize("compute", [pytest.param("float32", marks=pytest.mark.deep), *HALVES])
def test_it_is_valid_onnx_of_basic_operators_of_opset_20(
    graph: Canonical, compute: Compute
) -> None:
    model = graph.lowered(Dialect.PORTABLE, compute)
    allowed = BASIC | OF_RECURRENT_LAYERS if graph.contract.shape.recurrent else BASIC
    if any("experts" in str(node.name) for node in model.graph):
        allowed = allowed | OF_EXPERTS
    assert {node.op_type for node in model.graph.all_nodes()} <= allowed
    assert dict(model.graph.opset_imports) == {"": 20}
    onnx.checker.check_model(as_bytes(model), full_check=True)


def test_its_presents_are_the_rows_of_the_call_alone(graph: Canonical) -> None:
    shape, model = graph.contract.shape, graph.lowered(Dialect.PORTABLE, "float16")
    given = {value.name: value for value in model.graph.outputs}
    rows = "R" if shape.block else "S"
    for name in (name for i in shape.attention_layers for name in present_names(i)):
        dims = ["B", shape.num_kv_heads, rows, shape.head_dim]
        assert [str(dim) for dim in given[name].shape or ()] == [str(dim) for dim in dims]
        assert given[name].dtype == ir.DataType.FLOAT16
    assert not {"TensorScatter", "Attention"} & {node.op_type for node in model.graph}


def test_rows_behind_write_indices_are_not_read(graph: Canonical) -> None:
    """What stands in the slots that a call is given, and behind them, is of rejected rows."""
    (steps, _), found = wanted(graph), []
    for garbage in (0.0, 50.0):
        runner, kept = lowered_runner(graph, Dialect.PORTABLE, "float32"), []
        for step in steps:
            start = int(step.call.write_indices[0])
            for rows in runner.cache.values():
                rows[:, :, start:] = garbage
            result = outputs_of(runner.run(step.call))
            kept.append(result.logits)
            path = np.arange(step.call.written) if step.path is None else step.path
            runner.keep_rows(0, start + path, start)
        found.append(kept)
    for clean, dirty in zip(*found, strict=True):
        np.testing.assert_array_equal(clean, dirty)


def test_weights_stay_where_export_wrote_them(graph: Canonical) -> None:
    """A lowered graph refers to the same bytes of the same files."""

    def external(model: ir.Model) -> set[tuple[str, int | None]]:
        tensors = (value.const_value for value in model.graph.initializers.values())
        return {(t.location, t.offset) for t in tensors if isinstance(t, ir.ExternalTensor)}

    assert external(graph.lowered(Dialect.PORTABLE, "float16")) == external(graph.model())


# ---- graphs of another form

OF_BASIC_OPERATORS = ("rope-beyond-its-tables", "norm-of-rows", "norm-in-float16")


@pytest.mark.parametrize(
    ("dialect", "name"),
    [
        (dialect, name)
        for dialect, name in product(Dialect, TAMPERED)
        if dialect is Dialect.PORTABLE or name not in OF_BASIC_OPERATORS
    ],
)
def test_a_graph_of_another_form_is_refused(dialect: Dialect, name: str) -> None:
    graph = canonical("llama-biases")
    model, (tamper, why) = graph.model(), TAMPERED[name]
    tamper(model)
    wanted = replace(target("bfloat16"), dialect=dialect)
    with pytest.raises(ContractError, match=rf"layers\.0/.*{why}"):
        lower(model, graph.contract, wanted)


def test_a_mask_that_is_not_additive_is_refused() -> None:
    model = canonical("llama-biases").model()
    with pytest.raises(ContractError, match="made by Where"):
        portable.apply(model, target("float32"))
