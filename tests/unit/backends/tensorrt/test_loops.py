"""The loop that inverts a recurrent layer's coupling, unrolled: against the inverse itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from edgespec.backends.tensorrt.lowering import indexing, loops
from edgespec.backends.tensorrt.lowering.loops import num_levels
from edgespec.backends.tensorrt.target import Dialect, Target
from edgespec.contract import TensorSpec
from edgespec.errors import ContractError
from edgespec.graphs.builder import GraphBuilder, WeightPlan
from edgespec.graphs.delta_net import rows_of_call, solve

Array = NDArray[Any]
HEADS, MAX_ROWS = 2, 16


def canonical(layers: int = 1) -> ir.Model:
    """From the tree [B, S, S] and a coupling [B, Hv, S, S] to the inverse of I + coupling, or to
    the inverse of that and so on."""
    b = GraphBuilder("graph", WeightPlan("data"))
    tree = b.input(TensorSpec("tree_mask", "bool", ("B", "S", "S")))
    value = b.input(TensorSpec("coupling", "float32", ("B", HEADS, "S", "S")))
    rows = rows_of_call(b, tree, kernel=2)
    for layer in range(layers):
        coupling = b.op("Mul", value, rows.ancestors, name=f"{layer}/coupling")
        value = solve(b, coupling, rows, f"{layer}/solve")
    value = b.op("Identity", value, name="last")
    b.output(value, TensorSpec("inverse", "float32", ("B", HEADS, "S", "S")))
    return b.model()


def lowered(model: ir.Model, max_rows: int = MAX_ROWS) -> ir.Model:
    target = Target(dialect=Dialect.NATIVE, compute="float32", capacity=32, max_rows=max_rows)
    for apply in (indexing.apply, loops.apply):
        apply(model, target)
    return model


def run(model: ir.Model, tree: Array, coupling: Array) -> Array:
    data = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    found: Array = session.run(None, {"tree_mask": tree[None], "coupling": coupling})[0]
    return found


def some_tree(rows: int) -> tuple[Array, Array]:
    """Each row after any earlier one, and what couples it with its ancestors."""
    rng, tree = np.random.default_rng(rows), np.eye(rows, dtype=bool)
    for row in range(1, rows):
        tree[row] |= tree[int(rng.integers(row))]
    return tree, rng.standard_normal((1, HEADS, rows, rows)).astype(np.float32) / 4


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 15, 16])
def test_calls_of_all_sizes_are_inverted(rows: int) -> None:
    tree, coupling = some_tree(rows)
    below = coupling.astype(np.float64) * np.tril(tree, -1)
    found = run(lowered(canonical()), tree, coupling)
    np.testing.assert_allclose(found, np.linalg.inv(np.eye(rows) + below), rtol=0, atol=1e-5)
    assert (found == run(canonical(), tree, coupling)).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 64, 65])
def test_there_are_as_many_levels_as_the_longest_call_needs(rows: int) -> None:
    """Blocks of 1, 2, 4, ... rows are merged until one holds them all."""
    assert 2 ** num_levels(rows) >= rows > 2 ** num_levels(rows) / 2
    counts = [node.op_type for node in lowered(canonical(), rows).graph]
    assert counts.count("MatMul") == 2 * max(num_levels(rows) - 1, 0)
    assert counts.count("Loop") == 0


def test_layers_share_the_masks_of_levels() -> None:
    counts = [node.op_type for node in lowered(canonical(layers=3)).graph]
    levels = num_levels(MAX_ROWS)
    assert counts.count("Sub") == 3 * levels + 1
    assert counts.count("Gather") == levels + 1  # one is of the tree's


# ---- what is refused


def bodys(model: ir.Model, op_type: str) -> ir.Node:
    (loop,) = [node for node in model.graph if node.op_type == "Loop"]
    return next(n for n in loop.attributes["body"].as_graph() if n.op_type == op_type)


def from_the_start(model: ir.Model) -> None:
    bodys(model, "Sub").replace_input_with(0, bodys(model, "Mul").inputs[0])


def ends_by_itself(model: ir.Model) -> None:
    identity = bodys(model, "Identity")
    last = next(node for node in model.graph if node.op_type == "And")
    identity.replace_input_with(0, last.outputs[0])


def another_count(model: ir.Model) -> None:
    (loop,) = [node for node in model.graph if node.op_type == "Loop"]
    rows = next(n for n in model.graph if str(n.name).endswith("merges/count"))
    loop.replace_input_with(0, rows.outputs[0])


def other_sizes(model: ir.Model) -> None:
    compress = next(node for node in model.graph if node.op_type == "Compress")
    sizes = compress.inputs[0]
    assert sizes is not None
    sizes.const_value = ir.tensor(3 ** np.arange(16, dtype=np.int64), name=sizes.name)


def only_the_lower(model: ir.Model) -> None:
    eye = next(node for node in model.graph if node.op_type == "EyeLike")
    eye.attributes["k"] = ir.AttrInt64("k", 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (from_the_start, "the inverse merged with itself"),
        (ends_by_itself, "rounds that only the count ends"),
        (another_count, "as many rounds as there are masks"),
        (other_sizes, "the powers of two as its sizes"),
        (only_the_lower, "no attribute"),
    ],
)
def test_a_form_that_export_does_not_write_is_refused(
    change: Callable[[ir.Model], None], message: str
) -> None:
    model = canonical()
    change(model)
    with pytest.raises(ContractError, match=message):
        lowered(model)


def test_masks_of_another_call_are_refused() -> None:
    model = canonical()
    short = Target(dialect=Dialect.NATIVE, compute="float32", capacity=32, max_rows=8)
    indexing.apply(model, short)
    longer = Target(dialect=Dialect.NATIVE, compute="float32", capacity=32, max_rows=16)
    with pytest.raises(ContractError, match="masks of 4 levels"):
        loops.apply(model, longer)
