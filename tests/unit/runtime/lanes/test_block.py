"""A block sees the context of its own lane, by position, and itself; lanes do not disturb one
another.

The draft is `hash_drafts`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from edgespec.backends.host import HostStates
from edgespec.runtime.lanes.block import NO_TOKENS, BlockDecoder, BlockRows, MaskSpec
from tests.unit.runtime.hash_drafts import (
    EMPTY,
    VOCAB,
    WIDTH,
    block_rows_said,
    block_said,
    blocks_of,
)

CAPACITY, LANES = 40, 3
MASKS = {
    "all": (MaskSpec(),),
    "window": (MaskSpec(window=5),),
    "causal": (MaskSpec(causal=True),),
    "mixed": (MaskSpec(), MaskSpec(window=4)),
    "mixed causal": (MaskSpec(causal=True), MaskSpec(window=3, causal=True)),
}


def some_context(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 99, (count, WIDTH)).astype(np.float32)


def fill(decoder: BlockDecoder, lane: int, context: np.ndarray) -> None:
    decoder.run([BlockRows(lane, HostStates(context), NO_TOKENS)])


def ask(decoder: BlockDecoder, lane: int, tokens: Sequence[int]) -> np.ndarray:
    none = HostStates(np.zeros((0, WIDTH), np.float32))
    return decoder.run([BlockRows(lane, none, np.array(tokens))])[0].logits.rows().copy()


@pytest.mark.parametrize("first_slot", [1, 0])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("seed", range(4))
def test_blocks_side_by_side_say_what_each_says_alone(
    name: str, seed: int, first_slot: int
) -> None:
    """Calls over any lanes, with any context and blocks of any length, or none; lanes move."""
    rng, masks = np.random.default_rng([seed, len(name)]), MASKS[name]
    decoder = blocks_of(CAPACITY, LANES, masks, first_slot=first_slot)
    contexts = [some_context(rng, 0) for _ in range(LANES)]
    for _ in range(12):
        lanes = [lane for lane in range(LANES) if rng.random() < 0.7] or [0]
        parts = []
        for lane in lanes:
            if decoder.room(lane) < 12:
                decoder.reset(lane)
                contexts[lane] = some_context(rng, 0)
            new = some_context(rng, int(rng.integers(0, 7)))
            contexts[lane] = np.concatenate([contexts[lane], new])
            tokens = rng.integers(0, VOCAB, int(rng.integers(0, 6)))
            parts.append(BlockRows(lane, HostStates(new), tokens))
        for part, found in zip(parts, decoder.run(parts), strict=True):
            said = block_rows_said(contexts[part.lane], part.tokens.tolist(), masks)[first_slot:]
            np.testing.assert_array_equal(
                found.logits.rows(), np.array([row.logits for row in said]).reshape(-1, VOCAB)
            )
            assert (found.states is None) == (first_slot == 1)
            if found.states is not None:  # of drafts whose first slot drafts, by `blocks_of`
                wanted = np.array([row.hidden for row in said]).reshape(-1, WIDTH)
                np.testing.assert_array_equal(found.states.numpy(), wanted)
        if rng.random() < 0.3:
            source, target = rng.permutation(LANES)[:2].tolist()
            decoder.move(source, target)
            contexts[target], contexts[source] = contexts[source], some_context(rng, 0)
        assert [lane.length for lane in decoder.lanes] == list(map(len, contexts))


def test_a_block_is_not_committed_and_its_context_is() -> None:
    decoder, context = blocks_of(9), some_context(np.random.default_rng(0), 4)
    decoder.run([BlockRows(0, HostStates(context), np.array([1, 2, 3]))])
    assert (decoder.lanes[0].length, decoder.room(0)) == (4, 5)
    np.testing.assert_array_equal(
        ask(decoder, 0, [5, 6]), block_said(context, [5, 6], MASKS["all"])
    )


def test_no_more_rows_are_asked_for_than_there_is_room() -> None:
    decoder = blocks_of(6)
    fill(decoder, 0, some_context(np.random.default_rng(0), 4))
    ask(decoder, 0, [1, 2])
    with pytest.raises(AssertionError):
        ask(decoder, 0, [1, 2, 3])


def test_a_moved_lane_is_forgotten_where_it_was() -> None:
    """Both lanes go on for themselves afterwards."""
    rng = np.random.default_rng(1)
    decoder, context = blocks_of(20, lanes=2), some_context(rng, 5)
    fill(decoder, 1, context)
    decoder.move(1, 0)
    assert set(decoder.runner.slots[1]) == {EMPTY}
    more = some_context(rng, 2)
    fill(decoder, 1, more)
    assert [lane.length for lane in decoder.lanes] == [5, 2]
    for lane, known in ((0, context), (1, more)):
        wanted = block_said(known, [3, 4], MASKS["all"])
        np.testing.assert_array_equal(ask(decoder, lane, [3, 4]), wanted)


@pytest.mark.parametrize("way", ["reset", "zero"])
def test_a_lane_that_is_given_up_is_given_up_by_the_engine_too(way: str) -> None:
    decoder = blocks_of(20)
    fill(decoder, 0, some_context(np.random.default_rng(2), 5))
    getattr(decoder, way)(0)
    assert decoder.lanes[0].length == 0
    assert set(decoder.runner.slots[0]) == {EMPTY}
    assert decoder.runner.zeroed == ([0] if way == "zero" else [])


def test_a_kept_context_goes_on_where_it_is_put() -> None:
    rng = np.random.default_rng(3)
    decoder, context = blocks_of(20, lanes=2), some_context(rng, 6)
    fill(decoder, 0, context)
    kept = decoder.snapshot(0, 9)  # more than there are
    assert len(kept) == 6
    decoder.restore(1, kept.prefix(4))
    wanted = block_said(context[:4], [1, 2], MASKS["all"])
    np.testing.assert_array_equal(ask(decoder, 1, [1, 2]), wanted)
