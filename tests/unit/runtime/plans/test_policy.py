"""When a sequence drafts, stops, tries again and goes on, against values computed by hand; and its
speed beside that of the best fixed chain, by simulation."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.runtime.costs.cost_model import CostModel, best_chain
from edgespec.runtime.plans.acceptance_estimate import AcceptanceEstimate
from edgespec.runtime.plans.policy import (
    FIRST_WAIT,
    LONGEST_WAIT,
    MOST,
    TRIAL_LEVELS,
    TRIAL_LEVELS_OF_BATCH,
    TRY_SHARE,
    AdaptivePolicy,
    AdaptiveState,
    Asking,
    Decision,
    is_due,
    longer,
    together,
)
from edgespec.runtime.trees.tree import DraftPlan, DraftTree
from tests.costs import profile

PLAN = DraftPlan(1, 8, 9, adaptive=True)
CHEAP, DEAR, NEVER = (0.02, 0.02), (0.1, 0.2), (1.0, 1.0)


def policy_of(row: float, level: float) -> AdaptivePolicy:
    return AdaptivePolicy(CostModel(profile(row, level)))


def asking(
    state: AdaptiveState, levels: int = 8, *, budgeted: bool = True, plan: DraftPlan = PLAN
) -> Asking:
    return Asking(state, plan, 100, levels, budgeted)


def chain(drafted: int, prob: float = 0.6) -> DraftTree:
    probs = np.array([1.0] + [prob] * drafted, np.float32)
    return DraftTree(np.arange(drafted + 1), np.arange(-1, drafted), probs)


def run(
    policy: AdaptivePolicy,
    state: AdaptiveState,
    accepted: int,
    steps: int,
    *,
    budgeted: bool = True,
) -> list[int]:
    """The levels of each step, where so many drafts of each are accepted, at most."""
    found = []
    for _ in range(steps):
        (decision,) = policy.decide([asking(state, budgeted=budgeted)], 1)
        found.append(decision.levels)
        tree = chain(decision.levels)
        path = [*range(min(accepted, decision.levels) + 1)]
        policy.learn(state, decision, tree, path)
    return found


# One sequence


def test_first_step_drafts_where_a_usual_draft_pays_and_not_where_none_can() -> None:
    (cheap,) = policy_of(*CHEAP).decide([asking(AdaptiveState())], 1)
    (never,) = policy_of(*NEVER).decide([asking(AdaptiveState())], 1)
    assert (cheap.levels, cheap.pauses) == (8, False)
    assert (never.levels, never.pauses) == (0, True)


def test_first_budget_is_at_the_speed_of_the_best_chain_by_the_prior() -> None:
    policy = policy_of(*DEAR)
    (decision,) = policy.decide([asking(AdaptiveState())], 1)
    best = best_chain(decision.costs, [0.6] * 8)
    assert decision.budget is not None
    assert decision.budget.rate == pytest.approx(best.tokens / best.seconds)


def test_a_sequence_that_drafted_beside_others_begins_alone_with_what_it_learnt() -> None:
    policy, state = policy_of(*DEAR), AdaptiveState()
    for _ in range(60):
        state.estimate.learn(chain(2), [0])
    assert policy.decide([asking(state)], 1)[0].levels == 0


@pytest.mark.parametrize("budgeted", [True, False])
def test_drafts_that_fail_end_and_are_tried_again_after_twice_as_long(*, budgeted: bool) -> None:
    found = run(policy_of(*DEAR), AdaptiveState(), 0, 400, budgeted=budgeted)
    tries = [i for i, levels in enumerate(found) if levels]
    stop = next(i for i in tries if not found[i + 1])
    assert stop < 12
    again = [i for i in tries if i > stop]
    assert all(found[i] <= TRIAL_LEVELS for i in again)
    waits = [b - a - 1 for a, b in zip([stop, *again], again, strict=False)]
    assert waits[0] in (FIRST_WAIT, FIRST_WAIT + 1)
    assert all(wait >= LONGEST_WAIT // 2 or later >= 1.8 * wait for wait, later in pairwise(waits))
    assert max(waits) <= LONGEST_WAIT + 1


@pytest.mark.parametrize("budgeted", [True, False])
def test_drafts_that_fit_again_are_found_again(*, budgeted: bool) -> None:
    policy, state = policy_of(*DEAR), AdaptiveState()
    assert run(policy, state, 0, 40, budgeted=budgeted)[-1] == 0
    found = run(policy, state, 8, 200, budgeted=budgeted)
    assert all(found[-20:])
    assert max(found[-20:]) > TRIAL_LEVELS


@pytest.mark.parametrize("prices", [CHEAP, NEVER])
def test_a_step_that_may_not_draft_changes_nothing(prices: tuple[float, float]) -> None:
    """Too many run, or one token is left: that says nothing of the drafts."""
    policy, state = policy_of(*prices), AdaptiveState()
    run(policy, state, 3, 5)
    before = (state.tokens, state.seconds, state.waited, state.patience, state.drafting)
    for budgeted in (True, False):
        for _ in range(50):
            (decision,) = policy.decide([asking(state, 0, budgeted=budgeted)], 1)
            assert (decision.levels, decision.pauses) == (0, False)
            policy.learn(state, decision, DraftTree.root_only(0), [0])
    assert before == (state.tokens, state.seconds, state.waited, state.patience, state.drafting)


def test_levels_that_were_drafted_and_left_out_are_paid_for() -> None:
    policy, kept, cut = policy_of(*DEAR), AdaptiveState(), AdaptiveState()
    for state, levels in ((kept, 1), (cut, 5)):
        (decision,) = policy.decide([asking(state)], 1)
        before = state.seconds
        policy.learn(state, decision, replace(chain(1), levels=levels), [0, 1])
        assert state.seconds - 0.97 * before == pytest.approx(1.1 + 0.2 * levels)


def test_forced_tokens_count_neither_as_tokens_nor_as_cost() -> None:
    policy, own, led = policy_of(*DEAR), AdaptiveState(), AdaptiveState()
    for state, forced in ((own, 0), (led, 3)):
        (decision,) = policy.decide([asking(state)], 1)
        tree = replace(chain(2 + forced), levels=2, num_forced=forced)
        policy.learn(state, decision, tree, [*range(2 + forced)])
    assert (own.tokens, own.seconds) == (led.tokens, led.seconds)


def test_drafting_goes_on_within_the_margin_and_ends_below_it() -> None:
    policy = policy_of(0.0, 0.105)  # a level of one draft costs a tenth of a step
    state = AdaptiveState(tokens=100.0, seconds=100.0)
    (decision,) = policy.decide([asking(state)], 1)
    policy.learn(state, decision, replace(chain(1), levels=1), [0])
    assert state.drafting  # 98 tokens for 98.1 seconds
    for _ in range(20):
        policy.learn(state, decision, replace(chain(1), levels=1), [0])
    assert not state.drafting


def test_the_plan_and_the_gates_bound_what_is_drafted() -> None:
    policy = policy_of(0.0, 0.0)
    for budgeted in (True, False):
        (decision,) = policy.decide([asking(AdaptiveState(), 3, budgeted=budgeted)], 1)
        assert decision.levels == 3
        assert (decision.budget is not None) == budgeted
        if decision.budget is not None:
            assert decision.budget.levels == 3


# Sequences together


def state_of(rate: float) -> AdaptiveState:
    """A sequence whose drafts were accepted at this rate at each depth."""
    state = AdaptiveState()
    state.estimate.hits, state.estimate.tries = [1e6 * rate] * 65, [1e6] * 65
    return state


@pytest.mark.parametrize("rates", [(0.9, 0.9), (0.5, 0.7, 0.2), (0.8, 0.1, 0.1, 0.1)])
@pytest.mark.parametrize("prices", [CHEAP, DEAR, (0.05, 0.1)])
def test_a_batch_drafts_the_number_of_levels_that_brings_most_for_the_time(
    rates: tuple[float, ...], prices: tuple[float, float]
) -> None:
    row, level = prices
    values = []
    for n in range(9):
        tokens = [sum(rate**k for k in range(n + 1)) for rate in rates]
        values.append(sum(tokens) / (1 + (row + level) * n))
    best = values.index(max(values))
    found = policy_of(*prices).decide([asking(state_of(rate)) for rate in rates], len(rates))
    assert [one.levels for one in found] == [best] * len(rates)
    assert all(one.budget is None and not one.alone for one in found)
    assert all(one.pauses == (best == 0) for one in found)


def test_each_of_a_batch_keeps_to_its_own_limit() -> None:
    found = policy_of(*CHEAP).decide([asking(state_of(0.9), n) for n in (8, 2, 0)], 3)
    assert [one.levels for one in found][1:] == [2, 0]
    assert found[0].levels > 2
    assert not found[2].pauses


def test_a_batch_tries_drafts_again_together() -> None:
    policy, states = policy_of(*DEAR), [state_of(0.05), state_of(0.05)]
    for state in states:
        state.drafting = False
    found = [
        [one.levels for one in policy.decide([asking(state) for state in states], 2)]
        for _ in range(FIRST_WAIT + 2)
    ]
    assert found[:FIRST_WAIT] == [[0, 0]] * FIRST_WAIT
    assert [TRIAL_LEVELS_OF_BATCH] * 2 in found


# Without a clock


def test_the_same_steps_give_the_same_decisions() -> None:
    accepted = np.random.default_rng(1).integers(0, 4, 200).tolist()

    def levels() -> list[int]:
        policy, state = policy_of(*DEAR), AdaptiveState()
        return [run(policy, state, count, 1)[0] for count in accepted]

    found = levels()
    assert len(set(found)) > 1
    assert levels() == found


def test_one_sequence_s_steps_say_nothing_of_another_s() -> None:
    policy, kept = policy_of(*DEAR), AdaptiveState()
    alone = run(policy_of(*DEAR), AdaptiveState(), 3, 30)
    found = []
    for _ in range(30):
        found += run(policy, kept, 3, 1)
        run(policy, AdaptiveState(), 0, 3)
    assert found == alone


def test_a_new_sequence_knows_nothing_of_earlier_ones() -> None:
    one, two = AdaptiveState(), AdaptiveState()
    one.estimate.learn(chain(2), [0])
    assert two.estimate.rates(2) == AcceptanceEstimate().rates(2)


# Beside the best fixed chain


@pytest.fixture(scope="module")
def simulation() -> object:
    sys.path.insert(0, str(Path(__file__).parents[4] / "scripts"))
    import simulate_policy

    return simulate_policy


@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9])
def test_simulated_speed_is_within_5_percent_of_the_best_fixed_chain(
    simulation: object, rate: float, batch: int
) -> None:
    """By exact figures of the seeds, with the costs of a 0.6 B model; a draft that says nothing of
    how sure it is. The estimates are learnt on the way, so that the first steps are among them."""
    made = CostModel(simulation.made_profile())  # type: ignore[attr-defined]
    best = best_chain(made.at(128 + 128, batch), [rate] * MOST.steps).over_plain
    speeds = [
        simulation.simulated(made, rate, batch, 128, 256, sure=False, seed=seed)  # type: ignore[attr-defined]
        for seed in range(-(-8 // batch) * 2)
    ]
    assert float(np.mean(speeds)) >= 0.95 * best


def test_a_draft_that_knows_how_sure_it_is_decodes_faster(simulation: object) -> None:
    made = CostModel(simulation.made_profile())  # type: ignore[attr-defined]
    sure, blind = (
        np.mean(
            [
                simulation.simulated(made, 0.5, 1, 128, 256, sure=how, seed=seed)  # type: ignore[attr-defined]
                for seed in range(8)
            ]
        )
        for how in (True, False)
    )
    assert sure > 1.02 * blind


def test_decisions_without_levels_have_no_budget() -> None:
    (decision,) = policy_of(*NEVER).decide([asking(AdaptiveState())], 1)
    assert decision == Decision(0, decision.costs, pauses=True)


# At the ends of its constants


def test_no_budget_asks_for_less_than_plain_decoding_brings() -> None:
    policy, state = policy_of(*DEAR), AdaptiveState()
    policy.decide([asking(state)], 1)
    state.tokens, state.seconds = 0.995, 1.0  # within the margin below plain decoding
    (decision,) = policy.decide([asking(state)], 1)
    assert decision.budget is not None
    assert decision.budget.rate == pytest.approx(1 / decision.costs.plain)


def test_after_a_try_that_succeeds_the_next_wait_is_half_as_long() -> None:
    policy = policy_of(*CHEAP)
    state = AdaptiveState(drafting=False, seconds=1.0, patience=LONGEST_WAIT, waited=LONGEST_WAIT)
    (decision,) = policy.decide([asking(state)], 1)
    policy.learn(state, decision, chain(decision.levels), [0, 1])
    assert state.patience == LONGEST_WAIT // 2


def test_a_wait_doubles_up_to_the_longest() -> None:
    assert longer(FIRST_WAIT) == 2 * FIRST_WAIT
    assert longer(LONGEST_WAIT) == LONGEST_WAIT


@dataclass(frozen=True)
class FlatCosts:
    """A step with drafts takes `factor` plain steps, which take 1 second."""

    factor: float
    plain: float = 1.0
    passes: tuple[float, ...] = (0.0,) * 65

    def step(self, nodes: int, levels: int, observed: float) -> float:
        return self.factor


@pytest.mark.parametrize(("gain", "levels"), [(1.005, 0), (1.02, 1)])
def test_a_batch_begins_to_draft_beyond_the_margin_alone(gain: float, levels: int) -> None:
    states = [AdaptiveState(drafting=False) for _ in range(2)]
    for state in states:
        state.estimate.learn(chain(1), [0, 1])  # it has drafted before
    rate = states[0].estimate.rates(1)[0]
    costs: Any = FlatCosts((1 + rate) / gain)
    decisions = together([asking(state, levels=1) for state in states], costs, 2)
    assert [one.levels for one in decisions] == [levels, levels]


def test_a_try_of_a_batch_waits_until_plain_steps_have_paid_for_it() -> None:
    state = AdaptiveState(drafting=False)
    state.estimate.learn(chain(1), [0])
    costs: Any = FlatCosts(3.0)  # a try costs 2 plain steps more
    paid = round(2 / TRY_SHARE)
    state.waited = paid
    assert not is_due([state], costs, 2)
    state.waited = paid + 1
    assert is_due([state], costs, 2)


def test_a_batch_is_costed_by_its_widest_plan() -> None:
    asked: list[int] = []

    class Model(CostModel):
        def at(self, context: int, batch: int = 1, top_k: int = 1) -> Any:
            asked.append(top_k)
            return super().at(context, batch, top_k)

    wide = DraftPlan(8, 2, 9, adaptive=True)
    both = [asking(AdaptiveState()), asking(AdaptiveState(), plan=wide)]
    AdaptivePolicy(Model(profile(*DEAR))).decide(both, 2)
    assert asked == [8]
