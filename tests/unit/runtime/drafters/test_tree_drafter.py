"""Trees that grow level by level are those of EAGLE-2's definition, node by node; what is damaged
or full drafts no more, and disturbs no other lane.

The draft is `hash_drafts`'s, so that a node with another ancestor, or with another row's hidden
state, has other children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from edgespec.backends.host import HostStates
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.tree_drafter import TreeDrafter
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.trees.static_tree import StaticPlan, num_non_leaves, parents_of
from edgespec.runtime.trees.tree import DraftPlan, DraftTree
from tests.unit.runtime.hash_drafts import (
    EMPTY,
    VOCAB,
    WIDTH,
    Broken,
    Said,
    Slot,
    levels_of,
    row_slot,
    said_of,
)

OFFSETS = np.array([0, 3, 3, 5, 9, 9, 20])  # base id = draft id + offset
PLAN = DraftPlan(3, 4, 16)
PENDING = 5
Path = tuple[int, ...]  # of base ids


@dataclass(frozen=True)
class Node:
    """A candidate, from the definition: its path of base ids, its score, and what its row says."""

    path: tuple[int, ...]
    score: float
    seen: tuple[Slot, ...]  # its own row included
    said: Said


def committed(pairs: Sequence[Observation]) -> tuple[Slot, ...]:
    """The rows of observed pairs, in a row from position 0 on."""
    tokens = [int(token) for item in pairs for token in item.tokens]
    states = [state for item in pairs for state in item.hidden_states.numpy().tolist()]
    rows = enumerate(zip(tokens, states, strict=True))
    return tuple(row_slot(position, token, state) for position, (token, state) in rows)


def beginning(pairs: Sequence[Observation], forced: Sequence[int] = ()) -> Node:
    """Where a tree begins: behind what is forced, whose rows all go on with the last state."""
    seen = committed(pairs)
    state = said_of(seen).hidden.tolist()
    for token in forced:
        seen = (*seen, row_slot(len(seen), token, state))
    return Node((*forced,), 0.0, seen, said_of(seen))


def paths_of(
    pairs: Sequence[Observation], plan: DraftPlan, forced: Sequence[int] = ()
) -> set[tuple[int, ...]]:
    """The paths of base ids below the root that the definition keeps (arXiv 2406.16858): K
    children of each node of a level, the K best of them the next level, the best of all."""
    level, everyone = [beginning(pairs, forced)], []
    for _ in range(plan.steps):
        born = [child for node in level for child in children(node, plan.top_k)]
        everyone += born
        level = sorted(born, key=lambda node: -node.score)[: plan.top_k]
    best = sorted(everyone, key=lambda node: (-node.score, len(node.path)))
    before = {(*forced[: end + 1],) for end in range(len(forced))}
    return before | {node.path for node in best[: plan.verify_size - 1]}


def children(node: Node, top_k: int) -> list[Node]:
    logits = node.said.logits.astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum())
    born = []
    for draft_id in np.argsort(-log_probs, kind="stable")[:top_k].tolist():
        token = draft_id + int(OFFSETS[draft_id])
        seen = (*node.seen, row_slot(len(node.seen), token, node.said.hidden.tolist()))
        score = node.score + float(log_probs[draft_id])
        born.append(Node((*node.path, token), score, seen, said_of(seen)))
    return born


def static_paths_of(
    pairs: Sequence[Observation], choices: Sequence[Sequence[int]], forced: Sequence[int] = ()
) -> list[Path]:
    """The paths of base ids of choices, in their order: step by step from the root, each rank among
    the children of the node before."""
    paths = [(*forced[: end + 1],) for end in range(len(forced))]
    for ranks in choices:
        node = beginning(pairs, forced)
        for rank in ranks:
            node = children(node, VOCAB)[rank]
        paths.append(node.path)
    return paths


def ordered_paths_in(tree: DraftTree) -> list[Path]:
    """The path of each node of a tree but the root, in its order."""
    paths: list[Path] = [()]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def paths_in(tree: DraftTree) -> set[tuple[int, ...]]:
    """The same of a tree that was drafted; its nodes must be as many as its paths."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    assert len(set(paths)) == len(tree)
    return set(paths[1:])


def some_pairs(rng: np.random.Generator, lane: int, count: int) -> Observation:
    states = rng.integers(0, 99, (count, WIDTH)).astype(np.float32)
    return Observation(lane, HostStates(states), rng.integers(0, 20, count))


def drafter_of(capacity: int = 64, lanes: int = 1, broken: Broken = ()) -> TreeDrafter:
    return TreeDrafter(levels_of(capacity, lanes, broken), OFFSETS)


def proposed(drafter: TreeDrafter, lane: int = 0, plan: DraftPlan = PLAN) -> DraftTree:
    (tree,) = drafter.propose([DraftRequest(lane, PENDING, plan)])
    assert tree.tokens[0] == PENDING
    return tree


# Trees


PLANS = [
    DraftPlan(1, 4, 5),
    DraftPlan(2, 3, 8),
    DraftPlan(3, 2, 13),
    DraftPlan(3, 5, 20),
    DraftPlan(4, 4, 60),
    DraftPlan(7, 3, 24),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_every_tree_of_a_sequence_is_the_definitions(plan: DraftPlan, seed: int) -> None:
    """Tree after tree, whose rows must leave no trace in the next one."""
    rng, drafter, pairs = np.random.default_rng(seed), drafter_of(), []
    for count in (5, 1, 3, 1):
        pairs.append(some_pairs(rng, 0, count))
        drafter.observe(pairs[-1:])
        assert paths_in(proposed(drafter, plan=plan)) == paths_of(pairs, plan)


def test_a_tree_has_several_parents_a_level_so_that_the_comparison_sees_whose_they_are() -> None:
    drafter = drafter_of()
    drafter.observe([some_pairs(np.random.default_rng(0), 0, 5)])
    tree = proposed(drafter, plan=DraftPlan(3, 5, 40))
    for depth in (3, 4, 5):
        beam = tree.parents[tree.depths == depth]
        assert len(set(tree.parents[beam].tolist())) > 1


@pytest.mark.parametrize("seed", range(4))
def test_trees_of_lanes_that_grow_together_are_each_the_definitions(seed: int) -> None:
    """Lanes with plans of their own, of which some take no part; sequences end and move."""
    rng, lanes = np.random.default_rng(seed), 3
    drafter = drafter_of(lanes=lanes)
    pairs: list[list[Observation]] = [[] for _ in range(lanes)]
    for _ in range(8):
        members = sorted(rng.permutation(lanes)[: int(rng.integers(1, lanes + 1))].tolist())
        new = [some_pairs(rng, lane, int(rng.integers(1, 4))) for lane in members]
        drafter.observe(new)
        for item in new:
            pairs[item.lane].append(item)
        plans = [PLANS[int(rng.integers(len(PLANS)))] for _ in members]
        requests = [DraftRequest(*item) for item in zip(members, members, plans, strict=True)]
        for request, tree in zip(requests, drafter.propose(requests), strict=True):
            assert tree.tokens[0] == request.pending
            assert paths_in(tree) == paths_of(pairs[request.lane], request.plan)
        source, target = rng.permutation(lanes)[:2].tolist()
        if rng.random() < 0.3 and pairs[source]:
            drafter.move(source, target)
            pairs[target], pairs[source] = pairs[source], []
        elif rng.random() < 0.2:
            drafter.reset(source)
            pairs[source] = []


def test_ids_of_the_tree_are_the_bases() -> None:
    drafter = drafter_of()
    drafter.observe([some_pairs(np.random.default_rng(0), 0, 5)])
    assert set(proposed(drafter).tokens[1:].tolist()) <= {i + int(OFFSETS[i]) for i in range(VOCAB)}


@pytest.mark.parametrize(("room", "steps"), [(0, 1), (2, 1), (3, 2), (5, 2), (6, 3), (60, 4)])
def test_a_tree_is_no_deeper_than_its_rows_have_room(room: int, steps: int) -> None:
    """Each level but the first writes three rows."""
    pairs = [some_pairs(np.random.default_rng(room), 0, 4)]
    drafter = drafter_of(capacity=4 + room)
    drafter.observe(pairs)
    tree = proposed(drafter)
    assert tree.depths.max() <= steps
    assert paths_in(tree) == paths_of(pairs, DraftPlan(3, steps, min(16, 4 + (steps - 1) * 9)))


@pytest.mark.parametrize("plan", [DraftPlan(3, 0, 16), DraftPlan(3, 4, 1)], ids=str)
def test_no_levels_or_no_nodes_are_no_draft(plan: DraftPlan) -> None:
    drafter = drafter_of()
    drafter.observe([some_pairs(np.random.default_rng(0), 0, 4)])
    calls = len(drafter.decoder.runner.calls)
    assert len(proposed(drafter, plan=plan)) == 1
    assert len(drafter.decoder.runner.calls) == calls


# Where drafting ends


def test_a_lane_that_is_full_stays_so_until_it_is_reset() -> None:
    """Pairs that would fit again stand at other positions than the draft would take them for."""
    rng, drafter = np.random.default_rng(0), drafter_of(capacity=12)
    drafter.observe([some_pairs(rng, 0, 9)])
    drafter.observe([some_pairs(rng, 0, 4)])
    assert len(proposed(drafter)) == 1
    drafter.observe([some_pairs(rng, 0, 1)])
    assert len(proposed(drafter)) == 1
    assert drafter.decoder.lanes[0].length == 9
    drafter.reset(0)
    pairs = [some_pairs(rng, 0, 5)]
    drafter.observe(pairs)
    plan = DraftPlan(3, 3, 16)  # what there is room for
    assert paths_in(proposed(drafter)) == paths_of(pairs, plan)


def test_pairs_that_just_fit_are_taken() -> None:
    drafter, pairs = drafter_of(capacity=9), [some_pairs(np.random.default_rng(0), 0, 9)]
    drafter.observe(pairs)
    assert paths_in(proposed(drafter)) == paths_of(pairs, DraftPlan(3, 1, 4))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_hidden_states_that_are_no_numbers_never_reach_the_cache(value: float) -> None:
    rng, drafter = np.random.default_rng(0), drafter_of(lanes=2)
    drafter.observe([some_pairs(rng, 0, 4)])
    damaged, sound = some_pairs(rng, 0, 3), some_pairs(rng, 1, 3)
    assert damaged.hidden_states is not None
    damaged.hidden_states.numpy()[1, 0] = value
    drafter.observe([damaged, sound])
    drafter.observe([some_pairs(rng, 0, 1)])
    given = [call.states("base_hidden") for call in drafter.decoder.runner.calls]
    assert all(lane.finite() for states in given if states is not None for lane in states)
    trees = drafter.propose([DraftRequest(lane, PENDING, PLAN) for lane in (0, 1)])
    assert len(trees[0]) == 1
    assert paths_in(trees[1]) == paths_of([sound], PLAN)


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_pairs_of_a_long_prompt_are_read_in_calls_of_a_bounded_size(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Another lane's go along with the first of them."""
    monkeypatch.setattr(CachedDecoder, "prefill_chunk", chunk)
    rng, drafter = np.random.default_rng(0), drafter_of(lanes=2)
    pairs = [some_pairs(rng, 0, 8), some_pairs(rng, 1, 2)]
    drafter.observe(pairs)
    sizes = [call.rows for call in drafter.decoder.runner.calls]
    assert sizes == [chunk] * (8 // chunk) + [8 % chunk] * (8 % chunk > 0)
    for lane in (0, 1):
        assert paths_in(proposed(drafter, lane=lane)) == paths_of([pairs[lane]], PLAN)


def test_logits_that_are_no_numbers_in_a_piece_of_a_prompt_end_its_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CachedDecoder, "prefill_chunk", 2)
    drafter, pairs = drafter_of(broken=((0, 19),)), some_pairs(np.random.default_rng(0), 0, 6)
    pairs.tokens[:] = [1, 2, 3, 19, 4, 5]
    drafter.observe([pairs])
    assert len(drafter.decoder.runner.calls) == 2
    assert len(proposed(drafter)) == 1


def test_logits_that_are_no_numbers_end_a_lanes_drafts_and_its_rows_are_zeroed() -> None:
    """By the last pair, before any tree."""
    rng, drafter = np.random.default_rng(0), drafter_of(broken=((0, 19),))
    pairs = some_pairs(rng, 0, 4)
    pairs.tokens[:] = [1, 2, 3, 19]
    drafter.observe([pairs])
    assert drafter.decoder.runner.zeroed == [0]
    assert len(proposed(drafter)) == 1
    drafter.reset(0)
    sound = some_pairs(rng, 0, 4)
    sound.tokens[:] = [1, 2, 3, 4]
    drafter.observe([sound])
    assert drafter.lanes[0].full is False
    assert drafter.lanes[0].last_logits.finite()


def test_logits_that_are_no_numbers_in_a_level_end_the_lanes_tree_there() -> None:
    """Node after node below it would be drawn from them. Another lane's tree goes on."""
    rng = np.random.default_rng(2)
    pairs = [some_pairs(rng, lane, 4) for lane in (0, 1)]
    first = {path[0] for path in paths_of(pairs[:1], DraftPlan(3, 1, 4))}
    deeper = [path[1] for path in paths_of(pairs[:1], PLAN) if len(path) == 3]
    bad = next(token for token in deeper if token not in {*first, *pairs[0].tokens.tolist()})
    drafter = drafter_of(lanes=2, broken=((0, bad),))
    drafter.observe(pairs)
    trees = drafter.propose([DraftRequest(lane, PENDING, PLAN) for lane in (0, 1)])
    assert trees[0].depths.max() == 2
    assert paths_in(trees[1]) == paths_of(pairs[1:], PLAN)
    assert drafter.decoder.runner.zeroed == [0]
    assert set(drafter.decoder.runner.slots[0]) == {EMPTY}
    again = drafter.propose([DraftRequest(lane, PENDING, PLAN) for lane in (0, 1)])
    assert len(again[0]) == 1
    assert paths_in(again[1]) == paths_of(pairs[1:], PLAN)


def test_logits_that_are_no_numbers_in_the_only_tree_end_it_early() -> None:
    """The levels below have nothing to run."""
    pairs = some_pairs(np.random.default_rng(2), 0, 4)
    first = {path[0] for path in paths_of([pairs], DraftPlan(3, 1, 4))}
    bad = next(token for token in first if token not in pairs.tokens.tolist())
    drafter = drafter_of(broken=((0, bad),))
    drafter.observe([pairs])
    assert proposed(drafter).depths.max() == 1
    assert len(proposed(drafter)) == 1


# Lanes


def test_a_lane_that_is_reset_begins_anew() -> None:
    """Nothing is drafted from what the sequence before it observed."""
    rng, drafter = np.random.default_rng(0), drafter_of()
    drafter.observe([some_pairs(rng, 0, 6)])
    drafter.reset(0)
    assert drafter.lanes[0].last_logits is None
    assert drafter.lanes[0].last_hidden is None
    pairs = [some_pairs(rng, 0, 2)]
    drafter.observe(pairs)
    assert paths_in(proposed(drafter)) == paths_of(pairs, PLAN)


def test_a_moved_sequence_takes_where_its_drafts_begin_along() -> None:
    rng, drafter = np.random.default_rng(0), drafter_of(lanes=2)
    pairs = [some_pairs(rng, 1, 6)]
    drafter.observe(pairs)
    drafter.move(1, 0)
    assert paths_in(proposed(drafter)) == paths_of(pairs, PLAN)
    assert drafter.lanes[1].last_logits is None
    assert drafter.lanes[1] is not drafter.lanes[0]


def test_where_drafts_begin_outlives_other_calls() -> None:
    """Results are views that the next call overwrites."""
    rng, drafter = np.random.default_rng(0), drafter_of(lanes=2)
    pairs = [some_pairs(rng, 0, 6)]
    drafter.observe(pairs)
    drafter.observe([some_pairs(rng, 1, 3)])
    assert paths_in(proposed(drafter)) == paths_of(pairs, PLAN)


def test_a_kept_prefix_goes_on_where_it_is_put() -> None:
    rng, drafter = np.random.default_rng(0), drafter_of(lanes=2)
    pairs = [some_pairs(rng, 0, 6)]
    drafter.observe(pairs)
    kept = drafter.snapshot(0, 9)  # more than there are
    assert len(kept) == 6
    drafter.observe([some_pairs(rng, 1, 3)])
    drafter.restore(1, kept.prefix(4))
    assert drafter.lanes[1].last_logits is None
    head = Observation(1, pairs[0].hidden_states.take(np.arange(4)), pairs[0].tokens[:4])
    more = some_pairs(rng, 1, 2)
    drafter.observe([more])
    assert paths_in(proposed(drafter, lane=1)) == paths_of([head, more], PLAN)


# Static trees

WIDE = [[a] for a in range(6)] + [[a, b] for a in range(3) for b in range(4)]
STATIC = [
    StaticPlan.of([[0], [0, 0], [0, 0, 0]]),
    StaticPlan.of([[0], [1], [2], [1, 0], [2, 1], [2, 1, 0]]),  # the first child has no children
    StaticPlan.of([[3], [3, 2], [3, 2, 6], [1]]),  # without the best ranks
    StaticPlan.of([*WIDE, [0, 0, 0], [0, 3, 1], [2, 3, 0], [2, 3, 0, 5], [0, 3, 1, 0]]),
]


@pytest.mark.parametrize("plan", STATIC, ids=lambda plan: str(len(plan.choices)))
@pytest.mark.parametrize("seed", range(3))
def test_every_static_tree_is_exactly_that_of_its_choices(plan: StaticPlan, seed: int) -> None:
    rng, drafter, pairs = np.random.default_rng(seed), drafter_of(), []
    for count in (5, 1, 3):
        pairs.append(some_pairs(rng, 0, count))
        drafter.observe(pairs[-1:])
        tree = proposed(drafter, plan=plan)
        assert ordered_paths_in(tree) == static_paths_of(pairs, plan.choices)
        assert tree.parents.tolist() == list(parents_of(plan.choices))


def test_only_nodes_with_children_run() -> None:
    """A row for each, and nothing for leaves."""
    drafter = drafter_of()
    drafter.observe([some_pairs(np.random.default_rng(0), 0, 5)])
    before = len(drafter.decoder.runner.calls)
    proposed(drafter, plan=STATIC[3])
    widths = [call.inputs_embeds.shape[1] for call in drafter.decoder.runner.calls[before:]]
    assert widths == [3, 3, 2] == list(num_non_leaves(STATIC[3].choices)[1:])


FORCED = [[], [7, 2, 7], [4], []]  # of lanes 0, 1, 2 and 3


@pytest.mark.parametrize("forced", [[[]] * 4, FORCED, FORCED[::-1]], ids=["free", "12", "21"])
@pytest.mark.parametrize("seed", range(4))
def test_static_and_dynamic_trees_grow_together(seed: int, forced: list[list[int]]) -> None:
    """Also behind what is forced, which one call runs for all of them."""
    rng, lanes = np.random.default_rng(seed), 4
    drafter = drafter_of(lanes=lanes)
    pairs = [some_pairs(rng, lane, int(rng.integers(1, 6))) for lane in range(lanes)]
    drafter.observe(pairs)
    plans = [STATIC[3], PLANS[4], STATIC[1], STATIC[0]]
    order = rng.permutation(lanes).tolist()
    requests = [DraftRequest(lane, lane, plans[lane], forced=forced[lane]) for lane in order]
    before = len(drafter.decoder.runner.calls)
    trees = drafter.propose(requests)
    assert len(drafter.decoder.runner.calls) - before == any(forced) + PLANS[4].steps - 1
    for request, tree in zip(requests, trees, strict=True):
        lane, plan = request.lane, request.plan
        if isinstance(plan, StaticPlan):
            wanted = static_paths_of([pairs[lane]], plan.choices, forced[lane])
            assert ordered_paths_in(tree) == wanted
        else:
            assert paths_in(tree) == paths_of([pairs[lane]], plan, forced[lane])


@pytest.mark.parametrize(("room", "steps"), [(0, 1), (2, 1), (3, 2), (5, 2), (6, 3), (8, 4)])
def test_a_static_tree_is_no_deeper_than_its_rows_have_room(room: int, steps: int) -> None:
    """Its levels run 3, 3 and 2 nodes."""
    pairs = [some_pairs(np.random.default_rng(room), 0, 4)]
    drafter = drafter_of(capacity=4 + room)
    drafter.observe(pairs)
    tree = proposed(drafter, plan=STATIC[3])
    kept = [node for node in STATIC[3].choices if len(node) <= steps]
    assert ordered_paths_in(tree) == static_paths_of(pairs, kept)
