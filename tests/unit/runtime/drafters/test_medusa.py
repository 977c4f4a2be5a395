"""Medusa's drafter over a runner made of tables: ties, lanes, plans that are cut down, and states
that no head can read."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from edgespec.backends.base import PlanHints, Runner
from edgespec.backends.call import Call, Result
from edgespec.backends.host import HostStates, host_results
from edgespec.backends.masks import attention_mask
from edgespec.errors import LimitError, OptionError
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.medusa import (
    CartesianPlan,
    MedusaDrafter,
    MedusaLimits,
    MedusaOptions,
)
from edgespec.runtime.trees.static_tree import NAMED, StaticPlan
from edgespec.runtime.trees.tree import DraftPlan

HEADS, VOCAB, LANES = 3, 8, 4
ROOTS = [[i] for i in range(8)]
HINTS = PlanHints(steps=3, block_nodes=8)
LIMITS = MedusaLimits(max_verify_tree_size=60, num_heads=HEADS, vocab_size=VOCAB)


class Tables:
    """Head i of a state [s] says s + 1 + i, then the ids before it, each half as likely."""

    lanes = LANES
    engine_s = 0.0

    def __init__(self) -> None:
        self.calls: list[int] = []

    def run(self, call: Call) -> list[Result]:
        given = call.states("base_hidden")
        assert given is not None
        self.calls.append(len(given))
        assert all(states.finite() for states in given)
        states = [int(states.numpy()[0, 0]) for states in given]
        rows = [[self.head(state, i) for i in range(HEADS)] for state in states]
        flat = np.array(rows, np.float32).reshape(len(rows), 1, -1)
        return host_results(call, flat, None, HEADS)

    def head(self, state: int, index: int) -> np.ndarray:
        best = (state + 1 + index) % VOCAB
        return -np.log(2.0) * ((best - np.arange(VOCAB)) % VOCAB)

    def close(self) -> None:
        self.calls.append(-1)


def made() -> tuple[MedusaDrafter, Tables]:
    tables = Tables()
    return MedusaDrafter(cast(Runner, tables), HEADS), tables


def observed(lane: int, *states: float) -> Observation:
    values = np.array(states, np.float32)[:, None]
    return Observation(lane, HostStates(values), np.zeros(len(states), np.int64))


def proposed(drafter: MedusaDrafter, plan: DraftPlan, *lanes: int) -> list[Any]:
    return drafter.propose([DraftRequest(lane, 7, plan) for lane in lanes])


def test_the_last_state_alone_is_read() -> None:
    drafter, _ = made()
    drafter.observe([observed(0, 5, 2)])
    (tree,) = proposed(drafter, CartesianPlan(1, 3, 4), 0)
    assert tree.tokens.tolist() == [7, 3, 4, 5]
    drafter.observe([observed(0, 4)])
    (tree,) = proposed(drafter, CartesianPlan(1, 3, 4), 0)
    assert tree.tokens.tolist() == [7, 5, 6, 7]


def test_children_of_a_node_do_not_depend_on_it() -> None:
    drafter, _ = made()
    drafter.observe([observed(0, 2)])
    plan = StaticPlan.of([[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]])
    (tree,) = proposed(drafter, plan, 0)
    assert tree.tokens.tolist() == [7, 3, 2, 4, 3, 4, 3]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("steps", [1, 2])
def test_tree_is_no_deeper_than_its_plan(steps: int) -> None:
    """Of three heads the first ones draft."""
    drafter, _ = made()
    drafter.observe([observed(0, 2)])
    (tree,) = proposed(drafter, CartesianPlan(2, steps, 3), 0)
    assert len(tree) == 3
    assert tree.depths.max() == steps


def test_equal_candidates_go_by_their_ids() -> None:
    drafter, tables = made()
    tables.head = lambda state, index: np.zeros(VOCAB)  # type: ignore[method-assign]
    drafter.observe([observed(0, 2)])
    (tree,) = proposed(drafter, StaticPlan.of([[0], [1], [2], [2, 0]]), 0)
    assert tree.tokens.tolist() == [7, 0, 1, 2, 0]
    (tree,) = proposed(drafter, CartesianPlan(2, 2, 7), 0)
    assert sorted(tree.tokens[1:].tolist()) == [0, 0, 0, 1, 1, 1]


def test_sequences_draft_in_one_call_and_those_without_a_state_not_at_all() -> None:
    drafter, tables = made()
    drafter.observe([observed(0, 2), observed(3, 5)])
    first, second, third = proposed(drafter, CartesianPlan(1, 2, 3), 3, 1, 0)
    assert (first.tokens.tolist(), third.tokens.tolist()) == ([7, 6, 7], [7, 3, 4])
    assert second.tokens.tolist() == [7]
    assert tables.calls == [2]


@pytest.mark.parametrize("plan", [CartesianPlan(1, 3, 1), CartesianPlan(1, 0, 1)])
def test_a_plan_without_room_runs_nothing(plan: DraftPlan) -> None:
    drafter, tables = made()
    drafter.observe([observed(0, 2)])
    (tree,) = proposed(drafter, plan, 0)
    assert (tree.tokens.tolist(), tables.calls) == ([7], [])


def test_states_and_logits_that_are_not_finite_cost_the_drafts_alone() -> None:
    drafter, tables = made()
    drafter.observe([observed(0, np.inf), observed(1, 2)])
    bad, good = proposed(drafter, CartesianPlan(1, 1, 2), 0, 1)
    assert (bad.tokens.tolist(), good.tokens.tolist()) == ([7], [7, 3])
    tables.head = lambda state, index: np.full(VOCAB, np.nan)  # type: ignore[method-assign]
    (tree,) = proposed(drafter, CartesianPlan(1, 1, 2), 1)
    assert tree.tokens.tolist() == [7]


def test_lanes_move_and_are_forgotten() -> None:
    drafter, _ = made()
    drafter.observe([observed(2, 4)])
    drafter.move(2, 0)
    moved, left = proposed(drafter, CartesianPlan(1, 1, 2), 0, 2)
    assert (moved.tokens.tolist(), left.tokens.tolist()) == ([7, 5], [7])
    drafter.reset(0)
    (tree,) = proposed(drafter, CartesianPlan(1, 1, 2), 0)
    assert tree.tokens.tolist() == [7]


def test_a_prefix_is_remembered_by_its_length() -> None:
    drafter, _ = made()
    drafter.observe([observed(0, 1, 2, 3)])
    kept = drafter.snapshot(0, 2)
    assert (len(kept), len(kept.prefix(1)), kept.nbytes) == (2, 1, 0)
    assert len(drafter.snapshot(0, 9)) == 3
    drafter.restore(1, kept)
    drafter.observe([observed(1, 4)])
    (tree,) = proposed(drafter, CartesianPlan(1, 1, 2), 1)
    assert (tree.tokens.tolist(), len(drafter.snapshot(1, 9))) == ([7, 5], 3)


# ---- plans


def test_a_plan_that_nobody_sized_is_a_chain_of_all_heads() -> None:
    assert LIMITS.plan(None, None, None, HINTS) == CartesianPlan(1, 3, 4)
    few = MedusaLimits(max_verify_tree_size=3, num_heads=3, vocab_size=VOCAB)
    assert few.plan(None, None, None, HINTS).verify_size == 3


@pytest.mark.parametrize(
    ("sizes", "plan"),
    [
        ((2, None, None), CartesianPlan(2, 3, 15)),
        ((None, 2, None), CartesianPlan(1, 2, 3)),
        ((None, None, 3), CartesianPlan(1, 2, 3)),
        ((4, 2, 9), CartesianPlan(4, 2, 9)),
    ],
)
def test_sizes_that_are_open_follow_from_the_others(
    sizes: tuple[int | None, ...], plan: CartesianPlan
) -> None:
    assert LIMITS.plan(*sizes, HINTS) == plan  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (CartesianPlan(1, 4, 5), "3 Medusa heads"),
        (StaticPlan.of([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]), "4 levels deep"),
        (CartesianPlan(9, 1, 5), "8 tokens"),
        (CartesianPlan(2, 2, 8), "only 7 nodes"),
        (CartesianPlan(0, 2, 8), "at least 1"),
        (CartesianPlan(8, 3, 61), "exceeds the 60"),
        (
            StaticPlan.of([[i, j] for i in range(8) for j in range(7)] + [[i] for i in range(8)]),
            "65",
        ),
    ],
)
def test_plans_that_cannot_be_are_refused(plan: DraftPlan, words: str) -> None:
    with pytest.raises(LimitError, match=words):
        LIMITS.check(plan)


def test_a_plan_is_cut_down_to_what_is_left() -> None:
    plan = CartesianPlan(2, 3, 15)
    assert plan.within(2, 60) == CartesianPlan(2, 2, 7)
    assert plan.within(3, 5) == CartesianPlan(2, 3, 5)
    assert plan.within(0, 60) == CartesianPlan(2, 0, 1)


# ---- options


def test_the_default_tree_is_tensorrt_llms_cut_down_to_the_heads() -> None:
    assert MedusaOptions().plan(64).choices == NAMED["mc_sim_7b_63"]
    assert MedusaOptions(num_medusa_heads=2).plan(64).steps == 2
    assert len(MedusaOptions(num_medusa_heads=2).plan(64).choices) == 38


def test_choices_are_a_list_a_text_or_a_name() -> None:
    for given in ([[0], [1]], "[[0], [1]]"):
        assert MedusaOptions(medusa_choices=given).plan(64).verify_size == 3
    assert MedusaOptions(medusa_choices="mc_sim_7b_25").plan(64).verify_size == 26


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"medusa_choices": [[1, 0]]}, OptionError),
        ({"medusa_choices": "/etc/passwd"}, OptionError),  # requests name no files
        ({"num_medusa_heads": 6}, OptionError),
        ({"medusa_choices": [[0], [0, 0]], "num_medusa_heads": 1}, OptionError),
        ({"medusa_choices": [[0], [1]], "max_draft_len": 1}, OptionError),
    ],
)
def test_options_that_cannot_be_are_refused(keys: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        MedusaOptions(**keys).plan(64)


def test_more_heads_than_there_are_are_refused_however_deep_the_choices_are() -> None:
    options = MedusaOptions(medusa_choices=[[0], [0, 0]], num_medusa_heads=4)
    assert options.plan(64, 4).steps == 2
    with pytest.raises(LimitError, match="`num_medusa_heads` 4, and the draft has 3 Medusa heads"):
        options.plan(64, LIMITS.max_levels)


def test_what_a_heads_call_carries_has_no_embeddings() -> None:
    call = Call.of_states([HostStates(np.zeros((1, 5), np.float32))] * 2)
    shapes = call.inputs_embeds.shape, attention_mask(call, call.attention).shape
    assert (*shapes, call.written) == ((2, 1, 0), (2, 1, 1, 1), 1)
