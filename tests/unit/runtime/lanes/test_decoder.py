"""A decoder's lanes are apart: what one forgets, moves or takes up is no other's.

The model is `hash_model`'s; the loop over it is in `test_session` and `test_batches`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from edgespec.contract import canonical_contract
from edgespec.runtime.lanes.decoder import CachedDecoder, DecoderRows
from edgespec.runtime.trees.tree import DraftTree
from tests.unit.runtime.hash_model import (
    CONTRACT,
    HashRunner,
    PositionRows,
    TokenRows,
    decoder_of,
    logits_after,
)

UNWRITTEN = {(-1, -1)}


def read(decoder: CachedDecoder, lane: int, tokens: Sequence[int]) -> np.ndarray:
    """Logits of the last of some tokens, which are committed."""
    gather = np.array([len(tokens) - 1])
    (result,) = decoder.extend([decoder.causal(lane, np.array(tokens), gather)])
    return result.logits.row(0).copy()


def wanted(*tokens: int) -> np.ndarray:
    return logits_after(list(enumerate(tokens)))


def test_a_moved_lane_is_forgotten_where_it_was() -> None:
    """Both lanes go on for themselves afterwards."""
    decoder = decoder_of(16, lanes=2)
    read(decoder, 1, [4, 2, 7])
    decoder.move(1, 0)
    assert set(decoder.runner.slots[1]) == UNWRITTEN
    np.testing.assert_array_equal(read(decoder, 0, [5]), wanted(4, 2, 7, 5))
    np.testing.assert_array_equal(read(decoder, 1, [3, 1]), wanted(3, 1))
    np.testing.assert_array_equal(read(decoder, 0, [6]), wanted(4, 2, 7, 5, 6))
    assert [lane.length for lane in decoder.lanes] == [5, 2]


@pytest.mark.parametrize("way", ["reset", "zero"])
def test_a_lane_that_is_given_up_is_given_up_by_the_engine_too(way: str) -> None:
    """Its rows would be paid for by every call."""
    decoder = decoder_of(16)
    read(decoder, 0, [4, 2, 7])
    getattr(decoder, way)(0)
    assert set(decoder.runner.slots[0]) == UNWRITTEN
    assert decoder.runner.zeroed == ([0] if way == "zero" else [])
    np.testing.assert_array_equal(read(decoder, 0, [5]), wanted(5))


def test_a_restored_lane_has_no_row_of_the_sequence_before() -> None:
    decoder = decoder_of(16, lanes=2)
    read(decoder, 0, [4, 2, 7, 1, 1, 1])
    kept = decoder.snapshot(0, 3)
    read(decoder, 1, [8, 8, 8, 8, 8])
    decoder.restore(1, kept)
    np.testing.assert_array_equal(read(decoder, 1, [5]), wanted(4, 2, 7, 5))


def test_a_lane_between_others_that_takes_no_part_stays_as_it_was() -> None:
    decoder = decoder_of(16, lanes=3)
    for lane in range(3):
        read(decoder, lane, [lane, 2, 7])
    before = decoder.runner.slots[1][:3]
    parts = [decoder.causal(lane, np.array([5, 6]), np.array([1])) for lane in (0, 2)]
    for lane, result in zip((0, 2), decoder.extend(parts), strict=True):
        np.testing.assert_array_equal(result.logits.row(0), wanted(lane, 2, 7, 5, 6))
    assert decoder.runner.slots[1][:3] == before
    np.testing.assert_array_equal(read(decoder, 1, [8]), wanted(1, 2, 7, 8))


def test_a_window_counts_positions_where_slots_of_a_tree_share_them() -> None:
    """Siblings stand in more slots than there are positions, and a path is longer than the
    window."""
    decoder = decoder_of(16, window=2)
    read(decoder, 0, [1, 2])
    tree = DraftTree(np.array([3, 4, 5, 6, 7, 8]), np.array([-1, 0, 0, 0, 3, 4]))
    rows = DecoderRows(0, tree.tokens, 2 + tree.depths, tree.mask, np.arange(6))
    found = decoder.run([rows])[0].logits.rows()
    seen = [
        [(1, 2), (2, 3)],
        [(2, 3), (3, 4)],
        [(2, 3), (3, 5)],
        [(2, 3), (3, 6)],
        [(3, 6), (4, 7)],
        [(4, 7), (5, 8)],
    ]
    np.testing.assert_array_equal(found, [logits_after(slots) for slots in seen])


def test_rows_that_are_asked_for_and_no_others_go_through_the_head() -> None:
    decoder = decoder_of(16, lanes=2)
    parts = [
        decoder.causal(0, np.array([1, 2, 3]), np.array([0, 2])),
        decoder.causal(1, np.array([4]), np.array([0])),
    ]
    first, second = decoder.run(parts)
    np.testing.assert_array_equal(first.logits.rows(), [wanted(1), wanted(1, 2, 3)])
    np.testing.assert_array_equal(second.logits.rows(), [wanted(4)])
    assert first.hidden_states is not None
    assert second.hidden_states is not None
    assert (len(first.hidden_states), len(second.hidden_states)) == (3, 1)


def test_calls_have_as_many_rows_as_they_must_and_those_that_fill_up_change_nothing() -> None:
    decoder = decoder_of(16)
    decoder.min_rows = 2
    np.testing.assert_array_equal(read(decoder, 0, [4]), wanted(4))
    np.testing.assert_array_equal(read(decoder, 0, [5]), wanted(4, 5))
    np.testing.assert_array_equal(read(decoder, 0, [6, 7, 8]), wanted(4, 5, 6, 7, 8))
    assert decoder.runner.rows == [2, 2, 3]


def test_a_second_rotary_table_has_the_same_positions() -> None:
    contract = canonical_contract(replace(CONTRACT.shape, local_rotary_dim=2))
    table = PositionRows()
    decoder = CachedDecoder(HashRunner(16, 1, contract), TokenRows(), table, local_rope=table)
    read(decoder, 0, [1, 2])
    call = decoder.call([decoder.causal(0, np.array([3, 4]), np.array([0]))], 0)
    local = call.array("local_rope_cos")
    assert local is not None
    assert call.rope_cos.tolist() == local.tolist() == [[[2], [3]]]


def test_a_prompt_is_read_in_calls_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachedDecoder, "prefill_chunk", 4)
    decoder, tokens = decoder_of(16), [1, 2, 3, 4, 5, 6, 7, 8, 0]
    np.testing.assert_array_equal(decoder.read(0, np.array(tokens)).logits.row(0), wanted(*tokens))
    assert decoder.runner.rows == [4, 4, 1]


def test_a_call_asks_for_no_row_beyond_the_capacity() -> None:
    decoder = decoder_of(4)
    read(decoder, 0, [1, 2])
    rows = decoder.causal(0, np.array([3, 4]), np.array([0]))
    decoder.run([rows])
    decoder.drop_scratch(0)
    with pytest.raises(AssertionError):
        decoder.run([decoder.causal(0, np.array([3, 4, 5]), np.array([0]))])
    decoder.run([rows])
    with pytest.raises(AssertionError):
        decoder.run([replace(rows, visible=np.ones((2, 4), bool))])


def test_a_recurrent_base_is_told_which_rows_of_a_call_follow_which() -> None:
    """`hash_model` compares it with the mask in every call."""
    decoder = decoder_of(32, lanes=3, recurrent=True)
    read(decoder, 0, [1, 2])
    read(decoder, 2, [3])
    tree = np.array([[True, False, False], [True, True, False], [True, False, True]])
    parts = [
        DecoderRows(0, np.array([4, 5, 6]), np.array([2, 3, 3]), tree, np.arange(3)),
        decoder.causal(2, np.array([7]), np.array([0])),
    ]
    first, second = decoder.run(parts)
    seen = [[(0, 1), (1, 2), (2, 4)], [(0, 1), (1, 2), (2, 4), (3, 6)]]
    np.testing.assert_array_equal(
        first.logits.rows()[[0, 2]], [logits_after(slots) for slots in seen]
    )
    np.testing.assert_array_equal(second.logits.row(0), wanted(3, 7))
    decoder.commit(0, np.array([0, 2]))
    decoder.commit(2, np.array([0]))
    np.testing.assert_array_equal(read(decoder, 0, [8]), wanted(1, 2, 4, 6, 8))
    with pytest.raises(AssertionError):
        decoder.snapshot(0, 4)
