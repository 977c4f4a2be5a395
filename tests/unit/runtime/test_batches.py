"""Sequences side by side: each gets what it would get alone, in one base pass a step for all of
them.

The model is `hash_model`'s, so that a row of one lane that another one saw would change everything
after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.backends.call import Logits
from edgespec.errors import EnvironmentProblem
from edgespec.prompts import CAPACITY as FULL
from edgespec.prompts import ERROR, MAX_LENGTH
from edgespec.runtime.drafters.base import DraftRequest
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.loop.metrics import RequestMetrics
from edgespec.runtime.loop.prefix import Prefix, PrefixCache
from edgespec.runtime.loop.sequence import SequenceState, StepOutput
from edgespec.runtime.loop.session import Session
from edgespec.runtime.plans.schedules import AcceptanceGate, Gates, Schedule
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.trees.tree import DraftPlan, DraftTree
from tests.lossless.drafters import ScriptedDrafter, Stateless
from tests.unit.runtime.hash_model import GREEDY, VOCAB, begin, decoder_of, plainly

PLAN = DraftPlan(3, 4, 9)
CAPACITY = 40


@dataclass
class Given:
    """What one sequence was given."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    reused: int = 0
    steps: int = 0

    def add(self, seq: SequenceState, step: StepOutput) -> None:
        assert self.reason is None
        self.tokens += step.tokens
        self.reason, self.reused = step.finish_reason, seq.num_reused
        self.steps += 1


def serve(session: Session, tasks: Sequence[SequenceState], lanes: int) -> list[Given]:
    """All tasks, as many at a time as there are lanes; whoever waits takes the place of whoever
    ends."""
    session.restart()
    given: dict[SequenceState, Given] = {replace(task): Given() for task in tasks}
    queue = deque(given)
    while queue or session.running:
        while queue and len(session.running) < lanes:
            seq = queue.popleft()
            given[seq].add(seq, begin(session, seq))
        for seq, step in session.step() if session.running else ():
            given[seq].add(seq, step)
    return [*given.values()]


def session_for(
    tasks: Sequence[SequenceState],
    lanes: int,
    right: float = 0.7,
    *,
    window: int | None = None,
    budget: int = 0,
    seed: int = 0,
    kind: type[ScriptedDrafter] = ScriptedDrafter,
    recurrent: bool = False,
) -> Session:
    scripts = [
        (t.prompt, plainly(t.prompt, t.sampler, t.max_new_tokens + 8, window=window or 10**6)[0])
        for t in tasks
    ]
    drafter = kind(scripts, VOCAB, right, seed)
    base = decoder_of(CAPACITY, window, lanes, recurrent=recurrent)
    return Session(base, drafter, PrefixCache(budget))


def alone(task: SequenceState, window: int | None = None) -> tuple[list[int], str]:
    return plainly(
        task.prompt,
        task.sampler,
        task.max_new_tokens,
        task.stop_ids,
        capacity=CAPACITY,
        window=window or 10**6,
    )


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10)
tasks_of = st.lists(
    st.builds(
        SequenceState,
        prompt=prompts | prompts.map(lambda tail: [1, 2, 3, 4, 5, *tail]),
        sampler=st.builds(
            Sampler,
            st.sampled_from([0.0, 1.0]),
            st.sampled_from([0, 4]),
            st.sampled_from([1.0, 0.9]),
            st.integers(0, 99),
            st.sampled_from([0.0, 0.2]),
            st.sampled_from([1.0, 1.5]),
            st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-2, 2), max_size=2),
        ),
        max_new_tokens=st.integers(1, 30),
        stop_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=1),
        plan=st.none()
        | st.builds(DraftPlan, st.integers(1, 4), st.integers(1, 5), st.integers(1, 16)),
        keep=st.sampled_from([0, 3, 5]),
        keep_all=st.booleans(),
        gates=st.sampled_from([None, Gates(Schedule(((1, 3), (2, 1))))]),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tasks=tasks_of,
    lanes=st.integers(1, 4),
    right=st.sampled_from([0, 0.6, 0.9]),
    window=st.none() | st.integers(1, 6),
    chunk=st.integers(1, 6),
    budget=st.sampled_from([0, 400, 10**6]),
    seed=st.integers(0, 2**16),
    kind=st.sampled_from([ScriptedDrafter, Stateless]),
    another=st.sampled_from([None, ScriptedDrafter, Stateless]),
    recurrent=st.booleans(),
)
def test_any_mixture_gives_each_sequence_what_it_gets_alone(
    tasks: list[SequenceState],
    lanes: int,
    right: float,
    window: int | None,
    chunk: int,
    budget: int,
    seed: int,
    kind: type[ScriptedDrafter],
    another: type[ScriptedDrafter] | None,
    recurrent: bool,
) -> None:
    """Plain and drafted, by one drafter or by two, greedy and sampled, each with its own limits and
    penalties, with prefixes reused or not, from a base that can forget a row and from one that
    cannot."""
    window = None if recurrent else window  # a state has none
    session = session_for(
        tasks,
        lanes,
        right,
        window=window,
        budget=budget,
        seed=seed,
        kind=kind,
        recurrent=recurrent,
    )
    if another is not None:
        own = another(session.drafter.scripts_of, VOCAB, right, seed + 1)
        tasks = [replace(task, drafter=own if i % 2 else None) for i, task in enumerate(tasks)]
    with mock.patch.object(CachedDecoder, "prefill_chunk", chunk):
        told = serve(session, tasks, lanes)
    for task, one in zip(tasks, told, strict=True):
        assert (one.tokens, one.reason) == alone(task, window)
    assert session.prefixes.size_bytes <= budget


def test_drafters_side_by_side_draft_for_their_own_sequences_alone() -> None:
    """Each is asked for its own lanes in one call a step, and all share the base's passes."""
    tasks = tasks_with(9, 9, 9, 9)
    session = session_for(tasks, 4, 1.0)
    first = session.drafter
    second, third = (ScriptedDrafter(first.scripts_of, VOCAB, 1.0) for _ in range(2))
    tasks = [
        replace(task, drafter=own)
        for task, own in zip(tasks, (None, second, None, third), strict=True)
    ]
    tasks[2] = replace(tasks[2], plan=None)
    calls: list[tuple[ScriptedDrafter, list[int]]] = []
    real = ScriptedDrafter.propose

    def propose(self: ScriptedDrafter, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        calls.append((self, [request.lane for request in requests]))
        return real(self, requests)

    with mock.patch.object(ScriptedDrafter, "propose", propose):
        told = serve(session, tasks, 4)
    assert [one.tokens for one in told] == [alone(task)[0] for task in tasks]
    assert calls[:3] == [(first, [0]), (second, [1]), (third, [3])]
    assert [one.steps < 9 for one in told] == [True, True, False, True]
    assert session.drafters == []


def test_sequence_drafts_as_deep_as_its_gates_say_while_so_many_run() -> None:
    gates = Gates(Schedule(((1, 3), (2, 1))))
    tasks = [replace(task, gates=gates) for task in tasks_with(6, 12, 18)]
    session = session_for(tasks, 3, 1.0)
    told = serve(session, tasks, 3)
    assert [one.tokens for one in told] == [alone(task)[0] for task in tasks]
    asked = [plan.steps for plan in session.drafter.plans]
    assert set(asked) <= {0, 1, 2, 3}  # nothing while three ran
    assert asked.index(1) < asked.index(3)
    assert session.base.runner.batches[:8] == [1, 1, 1, 3, 3, 3, 3, 3]


def test_drafter_that_comes_back_begins_with_empty_lanes() -> None:
    """Its sequences were forgotten in the middle, and so was it."""
    tasks = tasks_with(9, 9)
    session = session_for(tasks, 2)
    own = ScriptedDrafter(session.drafter.scripts_of, VOCAB, 0.7)
    for task in tasks:
        begin(session, replace(task, drafter=own))
    session.restart()
    assert (session.drafters, own.lanes[1].tokens != []) == ([], True)
    begin(session, replace(tasks[0], drafter=own))
    assert own.lanes[1].tokens == []


def test_prefix_is_not_reused_with_the_memory_of_another_drafter() -> None:
    tasks = [asked(0), asked(3), asked(7)]
    session = session_for(tasks, 1, 1.0, budget=10**6)
    own = ScriptedDrafter(session.drafter.scripts_of, VOCAB, 1.0)
    tasks[1] = replace(tasks[1], drafter=own)
    told = serve(session, tasks, 1)
    assert [one.reused for one in told] == [0, 0, len(SYSTEM) - 1]
    assert [one.tokens for one in told] == [alone(task)[0] for task in tasks]


def test_steps_in_which_too_many_run_for_drafts_are_counted_as_such() -> None:
    gates = Gates(Schedule(((1, 3),)))
    tasks = [replace(task, gates=gates) for task in tasks_with(4, 12)]
    session, both = session_for(tasks, 2), [RequestMetrics(3), RequestMetrics(3)]
    for task, metrics in zip(tasks, both, strict=True):
        metrics.add(begin(session, task), 0.0)
    while session.running:
        for seq, output in session.step():
            both[tasks.index(seq)].add(output, 0.0)
    short, long = both
    assert (short.steps_without_drafts, sum(short.per_step_drafted)) == (short.steps, 0)
    assert long.steps_without_drafts == short.steps < long.steps
    assert short.to_dict(speculative=True)["steps_without_drafts"] == short.steps
    plain = SequenceState([1, 2], GREEDY, 4, gates=gates)
    begin(session, plain)
    assert [output.held_back for _, output in session.step()] == [False]


def test_a_sequence_whose_drafting_has_ended_is_not_held_back_by_how_many_run() -> None:
    gates = Gates(Schedule(((1, 3),)), AcceptanceGate(1, 0.5))
    gates.record([3], [0])
    assert gates.stopped
    session = session_for(tasks_with(4, 4), 2)
    for task in tasks_with(4, 4):
        begin(session, replace(task, gates=gates))
    assert [output.held_back for _, output in session.step()] == [False, False]


def test_seconds_in_engines_are_those_of_base_and_drafters() -> None:
    (task,) = tasks_with(4)
    session = session_for([task], 1)
    begin(session, task)
    before_s = session.engine_s()
    for drafter in session.drafters:
        drafter.engine_s += 2.0
    assert session.engine_s() == before_s + 2.0


def tasks_with(*lengths: int, plan: DraftPlan | None = PLAN) -> list[SequenceState]:
    return [
        SequenceState([i + 1, 2, 3 + i], GREEDY, length, plan=plan)
        for i, length in enumerate(lengths)
    ]


def test_all_lanes_share_one_base_pass_a_step() -> None:
    tasks = tasks_with(8, 8, 8, 8, plan=None)
    session = session_for(tasks, 4)
    serve(session, tasks, 4)
    assert session.base.runner.batches == [1] * 4 + [4] * 7


def test_place_of_a_sequence_that_ended_is_taken_by_the_last_one_and_then_by_one_that_waits() -> (
    None
):
    tasks = tasks_with(3, 9, 9, 2, plan=None)
    session = session_for(tasks, 3)
    told = serve(session, tasks, 3)
    # Three together for two steps; the fourth moves in for one; then two.
    assert session.base.runner.batches == [1, 1, 1, 3, 3, 1, 3, 2, 2, 2, 2, 2]
    assert [one.tokens for one in told] == [alone(task)[0] for task in tasks]


def test_plain_sequence_that_moves_leaves_nothing_of_the_drafts_in_its_new_lane() -> None:
    """All that have a lane would pay for those rows."""
    tasks = [tasks_with(2)[0], replace(tasks_with(9, 9)[1], plan=None)]
    session = session_for(tasks, 2)
    for task in tasks:
        begin(session, task)
    while len(session.running) > 1:
        session.step()
    assert (session.running[0].plan, session.running[0].lane) == (None, 0)
    assert session.drafter.lanes[0].tokens == []


def test_moved_sequence_keeps_its_slot_number_for_the_output() -> None:
    tasks = tasks_with(2, 9)
    session = session_for(tasks, 2)
    for task in tasks:
        begin(session, task)
    session.step()
    assert [(seq.slot, seq.lane) for seq in session.running] == [(1, 0)] or session.running == tasks


def test_lane_near_its_capacity_is_not_disturbed_by_a_neighbour_s_tree() -> None:
    """Its own tree shrinks to the rows left, and filling rows lie behind them."""
    long, short = (
        SequenceState(list(range(9)) * 4, GREEDY, 50, plan=PLAN),
        SequenceState([3, 1], GREEDY, 30, plan=PLAN),
    )
    session = session_for([long, short], 2, 0.9)
    told = serve(session, [long, short], 2)
    assert [(one.tokens, one.reason) for one in told] == [alone(long), alone(short)]
    assert (len(told[0].tokens), told[0].reason) == (CAPACITY - 36 + 1, FULL)


# One sequence's fault


def test_sequence_whose_draw_fails_leaves_its_batch_mates_unharmed() -> None:
    """Its rows may hold NaN: they are zeroed before another sequence has the lane."""
    tasks = tasks_with(9, 9, 9)
    session = session_for(tasks, 3)
    real, calls = Sampler.pick_from, []

    def pick(self: Sampler, logits: Logits, row: int, before: Sequence[int]) -> int:
        if before[0] == 2 and len(before) > 5:
            calls.append(before)
            raise EnvironmentProblem("the engine computed nan as a logit")
        return real(self, logits, row, before)

    with mock.patch.object(Sampler, "pick_from", pick):
        told = serve(session, tasks, 3)
    assert [one.reason for one in told] == [MAX_LENGTH, ERROR, MAX_LENGTH]
    assert [told[i].tokens for i in (0, 2)] == [alone(tasks[i])[0] for i in (0, 2)]
    assert len(calls) == 1
    assert session.base.runner.zeroed == [1]


# Prefixes


SYSTEM = [5, 6, 7, 8, 1, 2]


def asked(tail: int, plan: DraftPlan | None = PLAN, **more: object) -> SequenceState:
    return replace(
        SequenceState([*SYSTEM, tail, 4], GREEDY, 9, plan=plan, keep=len(SYSTEM)), **more
    )


@pytest.mark.parametrize("plan", [None, PLAN])
def test_second_prompt_computes_only_what_the_first_one_did_not(plan: DraftPlan | None) -> None:
    tasks = [asked(0, plan), asked(3, plan)]
    session = session_for(tasks, 1, budget=10**6)
    told = serve(session, tasks, 1)
    # A draft's row pairs a position with the token after it, which is another one at the edge.
    assert [one.reused for one in told] == [0, len(SYSTEM) - (1 if plan else 0)]
    assert [one.tokens for one in told] == [alone(task)[0] for task in tasks]
    assert sum(session.base.runner.rows[:1]) == 8


def test_drafter_that_begins_with_kept_rows_is_told_all_that_follows_them() -> None:
    tasks = [asked(0), asked(3)]
    session = session_for(tasks, 1, 1.0, budget=10**6)
    told = serve(session, tasks, 1)
    path = [*tasks[1].prompt, *told[1].tokens]
    assert session.drafter.tokens == path[1 : 1 + len(session.drafter.tokens)]
    assert told[1].steps < 9  # it drafted, and rightly


def test_drafter_without_a_state_needs_none_kept() -> None:
    tasks = [asked(0, None), asked(3), asked(7)]
    session = session_for(tasks, 1, 1.0, budget=10**6, kind=Stateless)
    given = serve(session, tasks, 1)
    assert [one.reused for one in given] == [0, len(SYSTEM), len(SYSTEM)]
    assert [one.tokens for one in given] == [alone(task)[0] for task in tasks]
    assert given[1].steps < 9  # it drafted, and rightly
    assert all(entry.draft is None for entry in session.prefixes.entries)


def test_rows_kept_by_a_plain_request_serve_no_drafting_one_and_the_other_way_round_they_do() -> (
    None
):
    session = session_for([asked(0), asked(3)], 1, budget=10**6)
    assert [one.reused for one in serve(session, [asked(0, None), asked(3)], 1)] == [0, 0]
    assert [one.reused for one in serve(session, [asked(7, None)], 1)] == [len(SYSTEM)]


def test_whole_conversation_is_reused_by_the_next_turn() -> None:
    first = asked(0, keep=0, keep_all=True)
    answer = alone(first)[0]
    second = replace(first, prompt=[*first.prompt, *answer, 3, 3])
    session = session_for([first, second], 1, budget=10**6)
    told = serve(session, [first, second], 1)
    assert told[1].reused >= len(first.prompt)
    assert (told[1].tokens, told[1].reason) == alone(second)


def test_same_prompt_again_still_computes_its_last_token() -> None:
    task = asked(0, keep=8)
    session = session_for([task], 1, budget=10**6)
    told = serve(session, [task, task, task], 1)
    assert [one.reused for one in told] == [0, 7, 7]
    assert [one.tokens for one in told] == [alone(task)[0]] * 3
    assert len(session.prefixes.entries) == 1


@pytest.mark.parametrize("budget", [0, 10])
def test_nothing_is_kept_beyond_the_budget(budget: int) -> None:
    session = session_for([asked(0), asked(3)], 1, budget=budget)
    assert [one.reused for one in serve(session, [asked(0), asked(3)], 1)] == [0, 0]
    assert session.prefixes.entries == []


# The comparison can see


def no_move(decoder: CachedDecoder, source: int, target: int) -> None:
    decoder.lanes[target] = decoder.lanes[source]


PLANTED = {
    "eviction moves no rows": mock.patch.object(CachedDecoder, "move", no_move),
    "reuse takes a row too many": mock.patch.object(
        Prefix,
        "reusable",
        lambda self, prompt, drafter: min(len(self.cache_key) + 1, len(prompt) - 1),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_caught(name: str) -> None:
    tasks = [asked(0, None, max_new_tokens=3), asked(3, None), asked(7, None), asked(2, None)]
    session = session_for(tasks, 2, budget=10**6)
    with PLANTED[name]:
        told = serve(session, tasks, 2)
    assert [one.tokens for one in told] != [alone(task)[0] for task in tasks]


# What is kept is a convenience, and costs no request


@pytest.mark.parametrize("where", ["keep", "keep_all"])
def test_memory_that_is_short_for_keeping_rows_harms_nobody(where: str) -> None:
    tasks = [
        replace(asked(tail), keep=6 if where == "keep" else 0, keep_all=where == "keep_all")
        for tail in (0, 3, 7)
    ]
    session = session_for(tasks, 2, budget=10**6)
    with mock.patch.object(
        CachedDecoder, "snapshot", lambda self, lane, count: short_of_memory(count)
    ):
        told = serve(session, tasks, 2)
    assert [(one.tokens, one.reason) for one in told] == [alone(task) for task in tasks]
    assert session.prefixes.entries == []


def test_where_memory_is_short_what_was_kept_before_goes_too() -> None:
    tasks = [asked(0), asked(3)]
    session = session_for(tasks, 1, budget=10**6)
    serve(session, tasks[:1], 1)
    assert session.prefixes.entries
    with mock.patch.object(
        CachedDecoder, "snapshot", lambda self, lane, count: short_of_memory(count)
    ):
        serve(session, [replace(tasks[1], keep_all=True)], 1)
    assert session.prefixes.entries == []


def short_of_memory(count: int) -> np.ndarray:
    if count > 1:
        raise MemoryError
    return np.zeros((1, 1, 1, 2), np.float32)


def test_head_that_fits_is_kept_of_a_prompt_that_does_not() -> None:
    one = asked(0, keep=8)
    session = session_for(
        [one], 1, budget=5 * (8 + 4)
    )  # of eight tokens five: base rows of 8 bytes, the draft's of 4
    told = serve(session, [one, one], 1)
    assert 0 < told[1].reused < 7
    assert told[1].tokens == alone(one)[0]
