"""What is bound is the memory that the next run is to read and write, whatever was bound before."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from edgespec.backends.ort.bindings import MOST_SHAPES, Bindings
from tests.unit.backends.ort.bindings import Binding


@pytest.fixture
def bindings() -> Bindings:
    binding = Binding()
    return Bindings(SimpleNamespace(io_binding=lambda: binding))  # type: ignore[arg-type]


def read(bindings: Bindings, name: str) -> np.ndarray:
    """What a session would read: the memory that is bound, by its address."""
    return bindings.binding.inputs[name].array()  # type: ignore[attr-defined, no-any-return]


def test_a_run_reads_what_was_written_last_in_whatever_shape_it_came(bindings: Bindings) -> None:
    """Larger, smaller, as large again: the buffer grows, and shapes come back."""
    rng = np.random.default_rng(0)
    for shape in [(1, 2), (3, 4), (1, 2), (4, 3), (2, 9), (3, 4), (1, 2), (2, 0), (), (1, 2)]:
        given = rng.standard_normal(shape).astype(np.float32)
        bindings.write("x", given)
        np.testing.assert_array_equal(read(bindings, "x"), given)


def test_what_the_caller_does_to_its_array_later_is_not_read(bindings: Bindings) -> None:
    given = np.ones((1, 2), np.float32)
    bindings.write("x", given)
    given[:] = 7
    assert read(bindings, "x").tolist() == [[1, 1]]


def test_an_array_that_was_asked_for_is_read_as_it_was_filled(bindings: Bindings) -> None:
    mask = bindings.input("mask", (2, 3), np.bool_)
    mask[:] = [[True, False, True], [False, False, True]]
    bindings.write("mask", mask)
    np.testing.assert_array_equal(read(bindings, "mask"), mask)


def test_a_run_writes_where_the_caller_looks_also_after_the_buffer_grew(
    bindings: Bindings,
) -> None:
    for shape in [(1, 2), (5, 2), (1, 2), (5, 2)]:
        found = bindings.output("logits", shape)
        bindings.binding.outputs["logits"].array()[:] = np.arange(found.size).reshape(shape)
        assert found.ravel().tolist() == [*range(found.size)]


def test_values_of_a_buffer_that_grew_are_forgotten_and_those_in_use_hold_their_memory(
    bindings: Bindings,
) -> None:
    """A stale one would be bound again in its shape, and read memory that nobody writes."""
    small = bindings.output("logits", (1, 2))
    bindings.output("logits", (64, 2))
    again = bindings.output("logits", (1, 2))
    assert again.base is bindings.buffers["logits"]
    assert small.base is not again.base
    for bound in bindings.known["logits"].values():
        assert bound.array.base is bindings.buffers["logits"]
        assert bound.value.data_ptr() == bindings.buffers["logits"].ctypes.data


def test_the_same_shape_is_bound_once(bindings: Bindings) -> None:
    for value in range(3):
        bindings.write("x", np.full((1, 2), value, np.float32))
        bindings.output("y", (1, 2))
    assert bindings.binding.names == ["x", "y"]


def test_a_shape_that_comes_back_is_the_same_memory(bindings: Bindings) -> None:
    arrays = [bindings.output("y", shape) for shape in [(2, 2), (1, 2), (2, 2)]]
    assert arrays[0] is arrays[2]
    assert bindings.binding.names == ["y"] * 3


def test_only_so_many_shapes_are_kept(bindings: Bindings) -> None:
    """A mask may have another width in every call."""
    for width in range(1, 5 * MOST_SHAPES):
        given = np.full((1, width), width % 2, np.bool_)
        bindings.write("mask", given)
        np.testing.assert_array_equal(read(bindings, "mask"), given)
        assert len(bindings.known["mask"]) <= MOST_SHAPES
