"""Logits and hidden states in host memory: what is asked of them is what numpy says, views stay
views, and copies outlive the buffer that they came in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgespec.backends.call import Attention, Call, LaneAttention
from edgespec.backends.host import HostLogits, HostStates, gather_idx, host_results, stacked_states


def numbers(rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 4, (rows, width)).astype(np.float32)


def call_of(rows: tuple[int, ...], gathered: tuple[tuple[int, ...], ...]) -> Call:
    """Lanes of so many rows, the shorter ones filled up."""
    none = np.zeros((len(rows), max(rows), 0), np.float32)
    seen = [LaneAttention(0, np.tri(count, dtype=bool), np.arange(count)) for count in rows]
    gather = [np.array(lane, np.int64) for lane in gathered]
    return Call(none, none, none, Attention(seen), np.zeros(len(rows), np.int64), gather)


def test_each_lane_has_its_own_rows_and_no_others() -> None:
    call = call_of((3, 1), ((0, 2), ()))
    assert gather_idx(call).tolist() == [[0, 2], [0, 0]]
    logits, states = numbers(4, 5).reshape(2, 2, 5), numbers(6, 2).reshape(2, 3, 2)
    first, second = host_results(call, logits, states)
    np.testing.assert_array_equal(first.logits.rows(), logits[0])
    assert (len(second.logits), second.logits.vocab_size) == (0, 5)
    assert first.hidden_states is not None
    assert second.hidden_states is not None
    np.testing.assert_array_equal(first.hidden_states.numpy(), states[0])
    np.testing.assert_array_equal(second.hidden_states.numpy(), states[1, :1])
    assert host_results(call, logits, None)[0].hidden_states is None


def test_several_heads_of_a_row_are_rows_of_their_own() -> None:
    logits = numbers(2, 6).reshape(2, 1, 6)
    first, second = host_results(call_of((1, 1), ((0,), (0,))), logits, None, heads=3)
    np.testing.assert_array_equal(first.logits.rows(), logits[0].reshape(3, 2))
    np.testing.assert_array_equal(second.logits.row(2), logits[1, 0, 4:])


def test_a_lane_that_gathers_nothing_fills_up_the_graph_s_input() -> None:
    call = replace(call_of((2,), ((),)), first_lane=1)
    assert gather_idx(call).tolist() == [[0]]


@pytest.mark.parametrize("count", [1, 3, 7, 99])
def test_top_is_the_largest_logits_with_the_sum_of_the_whole_row(count: int) -> None:
    array = numbers(4, 7)
    top = HostLogits(array).top(count)
    order = np.argsort(-array, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(top.ids, order)
    np.testing.assert_array_equal(top.values, np.take_along_axis(array, order, 1))
    total = np.log(np.exp(array.astype(np.float64)).sum(1))
    np.testing.assert_allclose(top.logsumexp, total, rtol=1e-6)


@pytest.mark.parametrize(("count", "wanted"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4, 0])])
def test_of_equal_logits_the_lowest_ids_come_first(count: int, wanted: list[int]) -> None:
    logits = HostLogits(np.array([[1.0, 3.0, 3.0, 0.0, 3.0]], np.float32))
    assert logits.top(count).ids.tolist() == [wanted]
    assert logits.best(0) == (1, 3.0)


def test_the_best_of_a_row_is_its_first_nan_where_there_is_one() -> None:
    array = np.array([[1.0, 3.0, 3.0], [1.0, np.nan, np.inf]], np.float32)
    logits = HostLogits(array)
    assert logits.best(0) == (1, 3.0)
    assert logits.best(1)[0] == 1
    assert np.isnan(logits.best(1)[1])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_is_not_finite(value: float) -> None:
    for kind in (HostLogits, HostStates):
        array = numbers(2, 3)
        assert kind(array).finite()
        array[1, 2] = value
        assert not kind(array).finite()
        assert kind(array).take(np.array([0])).finite()


def test_rows_and_ids_that_are_cut_off_are_views_and_rows_that_are_taken_are_not() -> None:
    array = numbers(3, 4)
    logits = HostLogits(array)
    views = logits.first_rows(2), logits.first_ids(2)
    assert [(len(view), view.vocab_size) for view in views] == [(2, 4), (3, 2)]
    taken, states = logits.take(np.array([2, 0])), HostStates(array).take(np.array([0, 1]))
    both = HostStates(array[:1]).joined([HostStates(array[2:])])
    wanted = array.copy()
    array[:] = -1
    assert all((view.rows() == -1).all() for view in views)
    np.testing.assert_array_equal(taken.rows(), wanted[[2, 0]])
    np.testing.assert_array_equal(states.numpy(), wanted[:2])
    np.testing.assert_array_equal(both.numpy(), wanted[[0, 2]])
    assert both.nbytes == 2 * 4 * 4


def test_lanes_with_fewer_states_are_filled_up_with_zeros() -> None:
    states = [HostStates(numbers(2, 3)), HostStates(numbers(0, 3))]
    found = stacked_states(states, 4)
    assert found.shape == (2, 4, 3)
    np.testing.assert_array_equal(found[0, :2], states[0].array)
    assert not found[0, 2:].any()
    assert not found[1].any()
    assert stacked_states(states[1:], 0).shape == (1, 0, 3)


@pytest.mark.parametrize(("count", "wanted"), [(1, [2]), (2, [2, 5]), (4, [2, 5, 1, 0])])
def test_a_nan_counts_as_largest(count: int, wanted: list[int]) -> None:
    row = [1.0, np.inf, np.nan, -np.inf, 0.0, np.nan]
    logits = HostLogits(np.array([row], np.float32))
    with np.errstate(invalid="ignore"):
        assert logits.top(count).ids.tolist() == [wanted]
    assert logits.best(0)[0] == wanted[0]
