"""Plans of block drafts are what the draft and the engines can do; trees of a block are its most
probable paths; what is damaged or full drafts no more.

The draft engine is `hash_drafts`'s.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.host import HostStates
from edgespec.backends.ort.backend import BACKEND
from edgespec.errors import LimitError
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.block_drafter import BlockLimits, BlockTreeDrafter
from edgespec.runtime.drafters.candidates import best_first
from edgespec.runtime.lanes.block import BlockDecoder, MaskSpec
from edgespec.runtime.trees.tree import BlockPlan, DraftPlan, DraftTree, full_tree_size
from tests.unit.runtime.hash_drafts import EMPTY, WIDTH, Broken, block_said, blocks_of

HINTS = BACKEND.plan_hints
LIMITS = BlockLimits(max_verify_tree_size=60, block_size=16, draft_vocab_size=1000)


@pytest.mark.parametrize(
    ("given_sizes", "plan"),
    [
        ((None, None, None), BlockPlan(1, 7, 8)),
        ((1, 1, 16), BlockPlan(1, 15, 16)),
        ((None, None, 4), BlockPlan(1, 3, 4)),
        ((None, None, 1), BlockPlan(1, 1, 1)),
        ((2, None, None), BlockPlan(2, 15, 60)),
        ((8, 1, 32), BlockPlan(8, 15, 32)),
        ((3, None, 5), BlockPlan(3, 4, 5)),
    ],
)
def test_open_sizes_follow_from_those_given(
    given_sizes: tuple[int | None, ...], plan: BlockPlan
) -> None:
    assert LIMITS.plan(*given_sizes, HINTS) == plan


def test_only_open_sizes_shrink_to_the_engines() -> None:
    small = BlockLimits(max_verify_tree_size=6, block_size=4, draft_vocab_size=1000)
    assert small.plan(None, None, None, HINTS) == BlockPlan(1, 3, 4)
    assert small.plan(4, None, None, HINTS) == BlockPlan(4, 3, 6)
    tiny = BlockLimits(max_verify_tree_size=60, block_size=2, draft_vocab_size=1000)
    assert tiny.plan(3, None, None, HINTS) == BlockPlan(3, 1, 4)


@pytest.mark.parametrize(
    ("limits", "sizes", "said"),
    [
        (LIMITS, (1, 2, None), "one step"),
        (LIMITS, (9, 1, None), "8 children"),
        (LIMITS, (0, None, None), "at least 1"),
        (LIMITS, (1, None, 0), "at least 1"),
        (LIMITS, (1, None, 17), "16 nodes at most"),
        (LIMITS, (2, None, 61), "`max_verify_tree_size` 61"),
        (BlockLimits(400, 16, 1000), (8, None, 129), "128 nodes"),
        (BlockLimits(60, 16, 1000), (8, None, 200), "128 or less"),
        (BlockLimits(60, 3, 1000), (2, None, 8), "7 nodes at most"),
        (BlockLimits(60, 16, 4), (5, None, None), "vocabulary"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    limits: BlockLimits, sizes: tuple[int | None, ...], said: str
) -> None:
    with pytest.raises(LimitError, match=said):
        limits.plan(*sizes, HINTS)


def test_plans_of_a_users_own_are_checked() -> None:
    LIMITS.check(DraftPlan(1, 3, 4))
    with pytest.raises(LimitError, match="15 levels"):
        LIMITS.check(DraftPlan(2, 16, 20))


@pytest.mark.parametrize(
    ("top_k", "levels", "most", "size"),
    [(1, 7, 60, 8), (2, 2, 60, 7), (2, 15, 60, 60), (8, 0, 60, 1), (3, 1, 2, 2)],
)
def test_size_of_the_tree_of_all_paths(top_k: int, levels: int, most: int, size: int) -> None:
    assert full_tree_size(top_k, levels, most) == size


def test_a_plan_shrinks_to_the_room_and_the_length_left() -> None:
    plan = BlockPlan(2, 15, 60)
    assert plan.within(levels=3, nodes=100) == BlockPlan(2, 3, 15)
    assert plan.within(levels=15, nodes=20) == BlockPlan(2, 15, 20)
    assert plan.within(levels=0, nodes=20) == BlockPlan(2, 0, 1)
    assert BlockPlan(1, 7, 8).within(levels=4, nodes=8) == BlockPlan(1, 4, 5)


# Trees


def test_a_chain_has_the_first_rank_of_each_depth() -> None:
    parents, chosen = best_first(np.log(np.array([[0.9], [0.5], [0.1]], np.float32)), 3)
    assert parents.tolist() == [-1, 0, 1]
    assert chosen.tolist() == [[0, 0], [1, 0]]


def test_nodes_of_a_depth_share_their_candidates() -> None:
    parents, chosen = best_first(np.log(np.array([[0.6, 0.4], [0.9, 0.1]], np.float32)), 7)
    assert parents.tolist() == [-1, 0, 1, 0, 3, 1, 3]
    assert chosen.tolist() == [[0, 0], [1, 0], [0, 1], [1, 0], [1, 1], [1, 1]]


def test_ties_go_to_the_earlier_parent_and_then_to_the_better_rank() -> None:
    parents, chosen = best_first(np.full((2, 2), np.log(np.float32(0.5))), 7)
    assert parents.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert chosen.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 0], [1, 1]]


def test_no_depth_is_no_draft() -> None:
    parents, chosen = best_first(np.zeros((0, 3), np.float32), 5)
    assert parents.tolist() == [-1]
    assert chosen.shape == (0, 2)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.integers(0, 10**6))
def test_a_tree_is_the_most_probable_paths_and_their_ancestors(
    depths: int, width: int, size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    log_probs = np.sort(
        np.log(rng.dirichlet(np.ones(width + 1), depths).astype(np.float32))[:, :width]
    )[:, ::-1]
    parents, chosen = best_first(log_probs, size)
    tree = DraftTree(np.arange(len(parents)), parents)
    assert all(parent < node for node, parent in enumerate(parents))
    paths = []
    for node in range(1, len(parents)):
        ancestors = np.flatnonzero(tree.mask[node])[1:]
        assert [int(chosen[a - 1][0]) for a in ancestors] == list(range(len(ancestors)))
        paths.append(tuple(int(chosen[a - 1][1]) for a in ancestors))
    every = [
        ranks
        for depth in range(1, depths + 1)
        for ranks in itertools.product(range(width), repeat=depth)
    ]
    score = {
        ranks: sum(float(log_probs[level, rank]) for level, rank in enumerate(ranks))
        for ranks in every
    }
    assert len(set(paths)) == len(paths) == min(size - 1, len(every))
    if paths:
        cut = sorted(score.values(), reverse=True)[len(paths) - 1]
        assert min(score[path] for path in paths) >= cut - 1e-5


# Drafting


MASK_TOKEN, BLOCK, PENDING = 6, 5, 3
OFFSETS = np.array([0, 3, 3, 5, 9, 9, 20])  # base id = draft id + offset
CHAIN = BlockPlan(1, BLOCK - 1, BLOCK)


def drafter_of(
    capacity: int = 40, lanes: int = 1, broken: Broken = (), *, mapped: bool = True
) -> BlockTreeDrafter:
    decoder = blocks_of(capacity, lanes, broken=broken)
    return BlockTreeDrafter(decoder, MASK_TOKEN, BLOCK, OFFSETS if mapped else None)


def some_states(rng: np.random.Generator, lane: int, count: int) -> Observation:
    states = rng.integers(0, 99, (count, WIDTH)).astype(np.float32)
    return Observation(lane, HostStates(states), rng.integers(0, 20, count))


def block_logits(seen: list[Observation], pending: int, size: int) -> np.ndarray:
    """From the definition: the pending token and masks behind all that was observed."""
    context = np.concatenate([item.hidden_states.numpy() for item in seen])
    return block_said(context, [pending, *[MASK_TOKEN] * (size - 1)], [MaskSpec()])


def chain_of(seen: list[Observation], pending: int = PENDING, size: int = BLOCK) -> list[int]:
    best = block_logits(seen, pending, size).argmax(1)
    return [pending, *(best + OFFSETS[best]).tolist()]


def proposed(drafter: BlockTreeDrafter, lane: int = 0, pending: int = PENDING) -> DraftTree:
    (tree,) = drafter.propose([DraftRequest(lane, pending, CHAIN)])
    return tree


@pytest.mark.parametrize("counts", [(1, 1, 1), (7, 1, 3), (2, 9, 1)], ids=str)
def test_each_slots_best_token_makes_the_chain_block_after_block(counts: tuple[int, ...]) -> None:
    rng, drafter, seen = np.random.default_rng(0), drafter_of(), []
    for count in counts:
        seen.append(some_states(rng, 0, count))
        drafter.observe(seen[-1:])
        tree = proposed(drafter)
        assert tree.tokens.tolist() == chain_of(seen)
        assert tree.parents.tolist() == [-1, 0, 1, 2, 3]


def test_without_a_map_the_draft_speaks_the_bases_ids() -> None:
    drafter, seen = drafter_of(mapped=False), [some_states(np.random.default_rng(0), 0, 4)]
    drafter.observe(seen)
    wanted = block_logits(seen, PENDING, BLOCK).argmax(1).tolist()
    assert proposed(drafter).tokens.tolist() == [PENDING, *wanted]


def test_a_tree_is_made_of_each_slots_candidates() -> None:
    drafter, seen = drafter_of(), [some_states(np.random.default_rng(1), 0, 4)]
    drafter.observe(seen)
    (tree,) = drafter.propose([DraftRequest(0, PENDING, BlockPlan(3, 4, 12))])
    logits = block_logits(seen, PENDING, BLOCK)
    for node in range(1, len(tree)):
        best = np.argsort(-logits[tree.depths[node] - 1], kind="stable")[:3]
        assert tree.tokens[node] in (best + OFFSETS[best]).tolist()
    assert len(tree) == 12


@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_states_are_read_with_the_next_block_or_by_themselves_where_they_are_many(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(BlockDecoder, "prefill_chunk", chunk)
    rng, drafter = np.random.default_rng(2), drafter_of()
    seen = [some_states(rng, 0, count) for count in (7, 2, 1)]
    for item in seen:
        drafter.observe([item])
    read = [call.written for call in drafter.decoder.runner.calls]
    assert max(read, default=0) <= chunk + 1
    assert drafter.decoder.lanes[0].length == (0 if chunk == 256 else 10)
    assert proposed(drafter).tokens.tolist() == chain_of(seen)


def test_lanes_draft_side_by_side_as_alone() -> None:
    """Where one has more new context than a block it is read first, or the others would pad to
    it."""
    rng, drafter = np.random.default_rng(3), drafter_of(lanes=3)
    seen = [some_states(rng, lane, count) for lane, count in ((0, 2), (1, BLOCK + 4), (2, 1))]
    drafter.observe(seen)
    trees = drafter.propose([DraftRequest(lane, lane, CHAIN) for lane in range(3)])
    for lane, tree in enumerate(trees):
        assert tree.tokens.tolist() == chain_of([seen[lane]], pending=lane)
    last = drafter.decoder.runner.calls[-1].states("target_hidden")
    assert last is not None
    assert max(map(len, last)) <= BLOCK


def test_observed_states_are_copies_of_buffers_that_are_overwritten() -> None:
    drafter, seen = drafter_of(), [some_states(np.random.default_rng(4), 0, 4)]
    wanted = chain_of(seen)
    drafter.observe(seen)
    seen[0].hidden_states.numpy()[:] = -1
    assert proposed(drafter).tokens.tolist() == wanted


@pytest.mark.parametrize(("capacity", "size"), [(4, 1), (5, 1), (6, 2), (8, 4), (9, 5), (30, 5)])
def test_a_block_is_no_longer_than_there_is_room_behind_its_context(
    capacity: int, size: int
) -> None:
    drafter, seen = drafter_of(capacity), [some_states(np.random.default_rng(5), 0, 4)]
    drafter.observe(seen)
    assert proposed(drafter).tokens.tolist() == chain_of(seen, size=size)[:size]


def test_a_lane_that_is_full_stays_so_until_it_is_reset() -> None:
    rng, drafter = np.random.default_rng(6), drafter_of(capacity=12)
    drafter.observe([some_states(rng, 0, 9)])
    drafter.observe([some_states(rng, 0, 4)])
    assert len(proposed(drafter)) == 1
    drafter.observe([some_states(rng, 0, 1)])
    assert len(proposed(drafter)) == 1
    drafter.reset(0)
    seen = [some_states(rng, 0, 3)]
    drafter.observe(seen)
    assert proposed(drafter).tokens.tolist() == chain_of(seen)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_hidden_states_that_are_no_numbers_never_reach_the_cache(value: float) -> None:
    rng, drafter = np.random.default_rng(7), drafter_of(lanes=2)
    damaged, sound = some_states(rng, 0, 3), some_states(rng, 1, 3)
    assert damaged.hidden_states is not None
    damaged.hidden_states.numpy()[1, 0] = value
    drafter.observe([damaged, sound])
    drafter.observe([some_states(rng, 0, 2)])
    trees = drafter.propose([DraftRequest(lane, PENDING, CHAIN) for lane in (0, 1)])
    assert len(trees[0]) == 1
    assert trees[1].tokens.tolist() == chain_of([sound])
    given = [call.states("target_hidden") for call in drafter.decoder.runner.calls]
    assert all(lane.finite() for states in given if states is not None for lane in states)


def test_a_block_that_is_no_numbers_is_wiped_and_its_lane_drafts_no_more() -> None:
    """Its rows lie where the next sequence's will be. Another lane's block is taken."""
    rng, bad = np.random.default_rng(8), 2
    drafter = drafter_of(lanes=2, broken=((0, bad),))
    seen = [some_states(rng, lane, 3) for lane in (0, 1)]
    drafter.observe(seen)
    requests = [DraftRequest(0, bad, CHAIN), DraftRequest(1, PENDING, CHAIN)]
    trees = drafter.propose(requests)
    assert trees[0].tokens.tolist() == [bad]
    assert trees[1].tokens.tolist() == chain_of(seen[1:])
    assert drafter.decoder.runner.zeroed == [0]
    assert set(drafter.decoder.runner.slots[0]) == {EMPTY}
    again = drafter.propose([DraftRequest(lane, PENDING, CHAIN) for lane in (0, 1)])
    assert len(again[0]) == 1
    assert again[1].tokens.tolist() == chain_of(seen[1:])


def test_a_moved_sequence_takes_its_pending_states_along() -> None:
    rng, drafter = np.random.default_rng(9), drafter_of(lanes=2)
    seen = [some_states(rng, 1, 3)]
    drafter.observe(seen)
    drafter.move(1, 0)
    assert proposed(drafter).tokens.tolist() == chain_of(seen)
    assert drafter.lanes[1].count == 0
    assert drafter.lanes[1] is not drafter.lanes[0]


def test_a_kept_prefix_has_what_was_pending_too() -> None:
    rng, drafter = np.random.default_rng(10), drafter_of(lanes=2)
    seen = [some_states(rng, 0, 3), some_states(rng, 0, 2)]
    drafter.observe(seen)
    kept = drafter.snapshot(0, 4)
    assert len(kept) == 4
    more = some_states(rng, 1, 2)
    drafter.observe([some_states(rng, 1, 5)])  # of the sequence before
    drafter.restore(1, kept)
    drafter.observe([more])
    states = seen[0].hidden_states.joined([seen[1].hidden_states])
    head = Observation(1, states.take(np.arange(4)), seen[0].tokens)
    assert proposed(drafter, lane=1).tokens.tolist() == chain_of([head, more])
