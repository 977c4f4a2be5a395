"""Where weights are placed, and how values are named."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.contract import TensorSpec
from edgespec.graphs.builder import ALIGN_BYTES, GraphBuilder, Weight, WeightPlan
from tests import toys

NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(str(toys.make_base(tmp_path, layers=2)))


def test_weights_are_placed_on_pages_without_overlap(checkpoint: Checkpoint) -> None:
    plan = WeightPlan("data")
    placed = [
        plan.place(name, checkpoint, checkpoint.tensors[name]) for name in (NORM, HEAD, EMBEDDING)
    ]
    assert [weight.offset % ALIGN_BYTES for weight in placed] == [0, 0, 0]
    for before, after in pairwise(placed):
        assert before.offset + before.info.num_bytes <= after.offset
    assert plan.size_bytes == placed[-1].offset + placed[-1].info.num_bytes


def test_a_weight_that_is_asked_for_twice_is_stored_once(checkpoint: Checkpoint) -> None:
    plan = WeightPlan("data")
    first = plan.place(NORM, checkpoint, checkpoint.tensors[NORM])
    size = plan.size_bytes
    assert plan.place(NORM, checkpoint, checkpoint.tensors[NORM]) is first
    assert plan.size_bytes == size
    assert plan.written_here() == [first]


def test_a_weight_of_another_file_takes_no_room_in_the_plan(checkpoint: Checkpoint) -> None:
    plan = WeightPlan("data")
    elsewhere = Weight(checkpoint, checkpoint.tensors[EMBEDDING], "embedding", ALIGN_BYTES)
    plan.point(HEAD, elsewhere)
    assert plan.place(HEAD, checkpoint, checkpoint.tensors[EMBEDDING]) is elsewhere
    assert (plan.size_bytes, plan.written_here()) == (0, [])


def test_a_value_bears_the_name_of_its_node_and_an_output_that_of_its_spec() -> None:
    b = GraphBuilder("graph", WeightPlan("data"))
    x = b.input(TensorSpec("x", "float32", ("B", 2)))
    doubled = b.op("Add", x, x, name="layers.0/double")
    assert doubled.name == "layers.0/double:0"
    b.output(doubled, TensorSpec("y", "float32", ("B", 2)))
    assert [value.name for value in b.model().graph.outputs] == ["y"]


def test_an_input_that_is_also_an_output_keeps_its_name() -> None:
    b = GraphBuilder("graph", WeightPlan("data"))
    x = b.input(TensorSpec("x", "float32", ("B", 2)))
    b.output(x, TensorSpec("y", "float32", ("B", 2)))
    graph = b.model().graph
    assert ([v.name for v in graph.inputs], [v.name for v in graph.outputs]) == (["x"], ["y"])


def test_a_constant_of_one_name_is_stored_once() -> None:
    b = GraphBuilder("graph", WeightPlan("data"))
    one = b.constant("one", np.array([1], np.int64))
    assert b.constant("one", np.array([1], np.int64)) is one
    assert b.shape(0, 0, 4, 16) is b.shape(0, 0, 4, 16)
    assert len(b.initializers) == 2
