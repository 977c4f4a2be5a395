"""Adaptive drafting in the loop, without an engine: it changes no token, what waits for a drafter
comes to it whole and in order, and no clock decides.

The model is `hash_model`'s; a ScriptedDrafter holds its memory to what it is asked behind.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import pytest

from edgespec.backends.call import Result
from edgespec.errors import EdgeSpecError
from edgespec.prompts import ERROR
from edgespec.runtime.costs.cost_model import CostModel
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.loop import session as session_module
from edgespec.runtime.loop.metrics import RequestMetrics
from edgespec.runtime.loop.prefix import PrefixCache
from edgespec.runtime.loop.sequence import SequenceState, StepOutput
from edgespec.runtime.loop.session import Session
from edgespec.runtime.plans.draft_budget import Budgeted
from edgespec.runtime.plans.policy import AdaptivePolicy, AdaptiveState
from edgespec.runtime.plans.schedules import AcceptanceGate, Gates, Schedule
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.trees.tree import DraftPlan, DraftTree
from tests.costs import profile
from tests.lossless.drafters import ScriptedDrafter, Stateless
from tests.unit.runtime.hash_model import GREEDY, VOCAB, begin, decoder_of, plainly

CAPACITY = 160
CHAIN, TREE = DraftPlan(1, 4, 5, adaptive=True), DraftPlan(3, 4, 9, adaptive=True)
SAMPLERS = [GREEDY, Sampler(0.7, 0, 1.0, 1), Sampler(1.0, 4, 0.9, 2)]
FREE, FAIR, DEAR = (0.0, 0.0), (0.05, 0.1), (0.5, 0.6)


class Sure(ScriptedDrafter, Budgeted):
    """One that says how sure it is: more often of what is right, and never by much."""

    def proposed(self, request: DraftRequest) -> DraftTree:
        tree = super().proposed(request)
        if request.budget is None or len(tree) == 1:
            return tree
        sure = 0.2 + 0.7 * np.random.default_rng(tree.tokens).random(len(tree) - 1)
        return request.budget.cut(tree, sure.tolist())


class Blank(Stateless, Budgeted):
    """One that reads tokens alone, as a draft model does."""


@dataclass
class Told:
    """What a sequence was given, step by step."""

    seq: SequenceState
    steps: list[StepOutput]

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step.tokens]

    @property
    def figures(self) -> list[tuple[int, int, bool]]:
        """Of each step: drafted, accepted, and whether the policy paused."""
        return [(step.drafted, step.accepted, step.paused) for step in self.steps]


def task(
    number: int,
    length: int,
    plan: DraftPlan = CHAIN,
    sampler: Sampler = GREEDY,
    *,
    gates: Gates | None = None,
    keep_all: bool = False,
) -> SequenceState:
    prompt = [number % VOCAB, 2, (3 + number) % VOCAB, 5]
    state = AdaptiveState() if plan.adaptive else None
    return SequenceState(
        prompt, sampler, length, plan=plan, gates=gates, keep_all=keep_all, adaptive=state
    )


def fresh(tasks: Sequence[SequenceState]) -> list[SequenceState]:
    return [replace(one, adaptive=AdaptiveState() if one.adaptive else None) for one in tasks]


def session_of(
    tasks: Sequence[SequenceState],
    lanes: int = 1,
    right: float = 0.6,
    prices: tuple[float, float] = FAIR,
    kind: type[ScriptedDrafter] = ScriptedDrafter,
    *,
    budget: int = 0,
) -> Session:
    scripts = [(t.prompt, plainly(t.prompt, t.sampler, t.max_new_tokens + 8)[0]) for t in tasks]
    drafter = kind(scripts, VOCAB, right, 0)
    policy = AdaptivePolicy(CostModel(profile(*prices)))
    base = decoder_of(CAPACITY, None, lanes)
    return Session(base, drafter, PrefixCache(budget), policy)


def serve(session: Session, tasks: Sequence[SequenceState], lanes: int = 1) -> list[Told]:
    """All tasks; whoever waits takes the place of whoever ends."""
    told = [Told(one, []) for one in tasks]
    queue = [*told]
    running: list[Told] = []
    while queue or running:
        while queue and len(session.running) < lanes:
            one = queue.pop(0)
            one.steps.append(begin(session, one.seq))
            running.append(one)
        steps = dict(session.step()) if session.running else {}
        for one in running:
            if one.seq in steps:
                one.steps.append(steps[one.seq])
        running = [one for one in running if one.steps[-1].finish_reason is None]
    return told


def assert_plain(told: Sequence[Told]) -> None:
    for one in told:
        seq = one.seq
        assert one.tokens == plainly(seq.prompt, seq.sampler, seq.max_new_tokens)[0]


# What is emitted


@pytest.mark.parametrize("sampler", SAMPLERS[::2])
@pytest.mark.parametrize("right", [0, 0.6, 1])
@pytest.mark.parametrize("prices", [FREE, DEAR])
@pytest.mark.parametrize("kind", [ScriptedDrafter, Sure, Stateless, Blank])
@pytest.mark.parametrize("plan", [CHAIN, TREE])
def test_adaptive_drafts_leave_every_token_as_it_was(
    sampler: Sampler,
    right: float,
    prices: tuple[float, float],
    kind: type[ScriptedDrafter],
    plan: DraftPlan,
) -> None:
    tasks = [task(3, 60, plan, sampler)]
    assert_plain(serve(session_of(tasks, 1, right, prices, kind), tasks))


@pytest.mark.parametrize("right", [0, 0.6, 1])
@pytest.mark.parametrize("prices", [FREE, FAIR, DEAR])
@pytest.mark.parametrize("kind", [ScriptedDrafter, Sure, Stateless, Blank])
def test_batches_with_early_ends_and_lane_moves_leave_every_token_as_it_was(
    right: float, prices: tuple[float, float], kind: type[ScriptedDrafter]
) -> None:
    fixed = DraftPlan(1, 2, 3)
    tasks = [
        task(0, 9, CHAIN),
        task(1, 70, TREE),
        task(2, 31, CHAIN, SAMPLERS[1]),
        task(3, 3, TREE),
        task(4, 44, fixed),
        task(5, 26, TREE, SAMPLERS[2]),
        task(6, 50, CHAIN),
    ]
    assert_plain(serve(session_of(tasks, 3, right, prices, kind), tasks, 3))


def test_an_answer_drafts_stops_tries_again_and_goes_on() -> None:
    """So that the claims above are about each of these."""
    tasks = [task(1, 120)]
    session = session_of(tasks, 1, 1.0)
    drafter = session.drafter
    assert isinstance(drafter, ScriptedDrafter)
    with mock.patch.object(drafter, "proposed", autospec=True) as proposed:

        def wrong_at_first(request: DraftRequest) -> DraftTree:
            wrong = tasks[0].num_emitted < 30
            drafter.right = 0 if wrong else 1
            return ScriptedDrafter.proposed(drafter, request)

        proposed.side_effect = wrong_at_first
        (told,) = serve(session, tasks)
    assert_plain([told])
    paused = [pauses for _, _, pauses in told.figures[1:]]
    stop = paused.index(True)
    again = paused.index(False, stop)
    assert stop > 0
    assert again - stop >= 8
    assert not any(paused[-4:])
    assert all(drafted for drafted, _, _ in told.figures[-4:-1])


def test_only_steps_that_the_policy_decides_to_decode_plainly_are_counted_as_paused() -> None:
    tasks, metrics = [task(1, 40)], RequestMetrics(4, spec_policy="adaptive")
    session = session_of(tasks, 1, 0.0, DEAR)
    (told,) = serve(session, tasks)
    for step in told.steps:
        metrics.add(step, 1.0)
    out = metrics.to_dict(speculative=True)
    assert isinstance(session.drafter, ScriptedDrafter)
    plain = metrics.steps - len(session.drafter.plans)
    # the last step has one token left, and may not draft
    assert (out["steps_paused"], out["spec_policy"]) == (plain - 1, "adaptive")
    assert plain > 10
    assert "steps_without_drafts" not in out
    fixed = RequestMetrics(4).to_dict(speculative=True)
    assert "steps_paused" not in fixed
    assert fixed["spec_policy"] == "fixed"


# Gates


def test_a_schedule_bounds_the_policy() -> None:
    gates = Gates(Schedule(((1, 2), (2, 1))))
    tasks = [task(i, length, gates=gates) for i, length in enumerate((60, 40, 20))]
    session = session_of(tasks, 3, 1.0, FREE)
    for one in tasks:
        begin(session, one)
    most: dict[int, int] = {}
    held: dict[int, set[bool]] = {}
    while session.running:
        count = len(session.running)
        for _, step in session.step():
            most[count] = max(most.get(count, 0), step.drafted)
            held.setdefault(count, set()).add(step.held_back)
            assert not step.paused
    assert most == {3: 0, 2: 1, 1: 2}
    assert held == {3: {True}, 2: {False}, 1: {False}}


def test_an_acceptance_gate_that_stopped_ends_adaptive_drafts_for_good() -> None:
    gate = AcceptanceGate(1, 2.0)
    gates = Gates(None, gate)
    first, second = task(1, 30, gates=gates), task(2, 30, gates=gates)
    session = session_of([first, second], 1, 0.0, FREE)
    (told,) = serve(session, [first])
    assert any(drafted for drafted, _, _ in told.figures)
    gates.record([d for d, _, _ in told.figures], [a for _, a, _ in told.figures])
    assert gates.stopped
    (told,) = serve(session, [second])
    assert not any(drafted or paused for drafted, _, paused in told.figures)
    assert_plain([told])


def test_steps_that_paused_say_nothing_to_an_acceptance_gate() -> None:
    gate = AcceptanceGate(1, 1.0)
    Gates(None, gate).record([2, 0, 0, 0], [2, 0, 0, 0])
    assert gate.stopped is None


# Without a clock


@pytest.mark.parametrize("kind", [ScriptedDrafter, Sure])
def test_a_busy_machine_changes_no_token_and_no_figure(kind: type[ScriptedDrafter]) -> None:
    def figures(run: str) -> list[list[tuple[int, int, bool]]]:
        tasks = [task(0, 25), task(1, 50, TREE), task(2, 35)]
        session = session_of(tasks, 2, 0.6, FAIR, kind)
        rng, real = np.random.default_rng(5), CachedDecoder.run

        def slow(self: CachedDecoder, *given: object) -> list[Result]:
            time.sleep(float(rng.choice([0, 0.003])))
            return real(self, *given)  # type: ignore[arg-type]

        with mock.patch.object(CachedDecoder, "run", slow if run == "slow" else real):
            return [one.figures for one in serve(session, tasks, 2)]

    first = figures("fast")
    assert len({drafted for one in first for drafted, _, _ in one}) > 2
    assert figures("slow") == first
    assert figures("fast") == first


def test_the_same_request_again_drafts_the_same() -> None:
    tasks = [task(1, 60, TREE)]
    session = session_of(tasks, 1, 1.0)
    (first,), (again,) = serve(session, tasks), serve(session, fresh(tasks))
    assert first.figures == again.figures


# What waits for a drafter


class Counting(ScriptedDrafter):
    """Keeps how many tokens came with each observation."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.counts: list[int] = []

    def observe(self, observations: Sequence[Observation]) -> None:
        self.counts += [len(item.tokens) for item in observations]
        super().observe(observations)


def counting(session: Session) -> Counting:
    assert isinstance(session.drafter, Counting)
    return session.drafter


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_UNOBSERVED", 5)
    tasks = [task(1, 40)]
    session = session_of(tasks, 1, 0.0, DEAR, Counting)
    most = 0
    begin(session, tasks[0])
    while session.running:
        session.step()
        most = max(most, sum(len(item.tokens) for item in tasks[0].unobserved))
        assert tasks[0].num_unobserved == sum(len(item.tokens) for item in tasks[0].unobserved)
    assert most == 4
    assert max(counting(session).counts[1:]) == 5


def test_what_waits_comes_in_one_observation_and_in_order() -> None:
    """A ScriptedDrafter itself asserts that the last it was told is the pending token."""
    tasks = [task(1, 60)]
    session = session_of(tasks, 1, 0.0, DEAR, Counting)
    shown = []
    begin(session, tasks[0])
    while session.running:
        drafter = counting(session)
        before = len(drafter.counts)
        tokens = [*tasks[0].tokens]
        session.step()
        if len(drafter.counts) > before:
            shown.append(drafter.counts[-1])
            told = drafter.last
            assert told.tokens == tokens[1:]
            # the position of each hidden state, as the hash model tells it
            assert [int(row[0]) for row in told.hidden_states] == [*range(len(told.tokens))]
    assert max(shown) > 8


def test_what_waits_moves_with_its_lane() -> None:
    tasks = [task(0, 12), task(1, 12), task(2, 60)]
    session = session_of(tasks, 3, 0.0, DEAR, Counting)
    for one in tasks:
        begin(session, one)
    while len(session.running) == 3:
        session.step()
    last = tasks[2]
    assert last.lane == 0
    assert last.num_unobserved > 2
    assert {item.lane for item in last.unobserved} == {0}
    before = len(counting(session).counts)
    while len(counting(session).counts) == before:
        tokens = [*last.tokens]
        session.step()
    assert counting(session).lanes[0].tokens == tokens[1:]


def test_what_waits_at_the_end_is_dropped_and_the_lane_serves_the_next() -> None:
    tasks = [task(1, 12), task(2, 40)]
    session = session_of(tasks, 1, 0.0, DEAR, Counting)
    (first,) = serve(session, tasks[:1])
    assert tasks[0].num_unobserved > 0
    told_before = sum(counting(session).counts)
    assert told_before < len(first.seq.tokens) - 1
    assert_plain(serve(session, tasks[1:]))


def test_what_waits_is_shown_where_the_whole_sequence_is_kept() -> None:
    reused = []
    for plan in (CHAIN, replace(CHAIN, adaptive=False)):
        tasks = [task(1, 12, plan, keep_all=True)]
        session = session_of(tasks, 1, 0.0, DEAR, Counting, budget=10**6)
        (told,) = serve(session, tasks)
        drafter = counting(session)
        assert tasks[0].num_unobserved == 0
        prompt = [*told.seq.tokens, 4]
        longer = replace(fresh(tasks)[0], prompt=prompt, max_new_tokens=30)
        drafter.scripts.append([*prompt, *plainly(prompt, GREEDY, 40)[0]])
        (second,) = serve(session, [longer])
        reused.append(longer.num_reused)
        assert_plain([second])
        assert any(drafted for drafted, _, _ in second.figures)
    assert reused[0] == reused[1] > len(tasks[0].prompt)


def test_a_restart_forgets_what_waits() -> None:
    tasks = [task(1, 60), task(2, 30)]
    session = session_of(tasks, 1, 0.0, DEAR, Counting)
    begin(session, tasks[0])
    for _ in range(7):
        session.step()
    assert tasks[0].num_unobserved > 2
    session.restart()
    assert_plain(serve(session, tasks[1:]))


def test_a_sequence_that_fails_while_rows_wait_leaves_the_others_as_they_are() -> None:
    tasks = [task(0, 40), task(1, 40)]
    session = session_of(tasks, 2, 0.0, DEAR, Counting)
    told = [Told(one, [begin(session, one)]) for one in tasks]
    real, failed = session_module.accept, []

    def failing(draft: session_module.Draft, result: Result) -> object:
        if draft.seq is tasks[0] and draft.seq.num_unobserved > 5:
            failed.append(draft.seq)
            return EdgeSpecError("planted", "None.")
        return real(draft, result)

    with mock.patch.object(session_module, "accept", failing):
        while session.running:
            for seq, step in session.step():
                told[tasks.index(seq)].steps.append(step)
    assert len(failed) == 1
    assert told[0].steps[-1].finish_reason == ERROR
    assert_plain(told[1:])
