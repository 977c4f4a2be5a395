"""The queue in front of the lanes: it idles, admits while others run, cancels at any time, and no
prompt holds up those that run for more than one chunk.

The model is `hash_model`'s, and so is what is right: each request gets what it gets alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.backends.base import Interrupted
from edgespec.backends.call import Call, Logits, Result
from edgespec.errors import EdgeSpecError, EnvironmentProblem, LimitError, QueueFull
from edgespec.prompts import CANCELLED, ERROR, MAX_LENGTH, TIMEOUT, SamplingParams
from edgespec.runtime.costs.cost_model import CostModel
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.loop.generation import Chunk, Generation, GenerationRequest, Response
from edgespec.runtime.loop.prefix import PrefixCache
from edgespec.runtime.loop.prompt_turns import MIN_ROWS, UNMEASURED_ROWS, PromptTurns
from edgespec.runtime.loop.scheduler import Scheduler
from edgespec.runtime.loop.sequence import SequenceState, StepSize
from edgespec.runtime.loop.session import Session
from edgespec.runtime.loop.waiting import SPARE, WaitingQueue
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.trees.tree import DraftPlan
from tests.costs import profile
from tests.lossless.drafters import ScriptedDrafter, Stateless
from tests.unit.runtime.hash_model import VOCAB, decoder_of, plainly

PLAN = DraftPlan(3, 4, 9)
CHUNK = 4
CAPACITY = 64
# what a text needs of a tokenizer, where no token has any
WORDLESS = SimpleNamespace(
    split_stops=lambda stop: (frozenset(), ()),
    token=lambda token_id: None,
    is_special=lambda token_id: False,
    decode=lambda ids, **flags: "",
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachedDecoder, "prefill_chunk", CHUNK)


def request(
    length: int, max_new: int, plan: DraftPlan | None = PLAN, seed: int = 0, **more: Any
) -> GenerationRequest:
    prompt = np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist()
    sampling = SamplingParams(temperature=1.0, seed=seed, max_generate_length=max_new)
    return GenerationRequest(prompt, sampling, plan, **more)


def alone(asked: GenerationRequest) -> list[int]:
    sampler = Sampler.of(asked.sampling)
    return plainly(
        asked.prompt_ids, sampler, asked.sampling.max_generate_length, capacity=CAPACITY
    )[0]


def scheduler_for(
    *requests: GenerationRequest,
    lanes: int = 2,
    capacity: int = CAPACITY,
    kind: type[ScriptedDrafter] = ScriptedDrafter,
    budget: int = 0,
) -> Scheduler:
    scripts = [
        (r.prompt_ids, plainly(r.prompt_ids, Sampler.of(r.sampling), 40)[0]) for r in requests
    ]
    drafter = kind(scripts, VOCAB, 0.7)
    session = Session(decoder_of(capacity, lanes=lanes), drafter, PrefixCache(budget))
    return Scheduler(session, lambda r: Generation(r, WORDLESS, frozenset()), lanes)


class Received:
    """What came of each handle, step by step."""

    def __init__(self) -> None:
        self.chunks: dict[Generation, list[Chunk]] = defaultdict(list)
        self.ends: dict[Generation, Response | EdgeSpecError] = {}

    def step(self, scheduler: Scheduler) -> list[Generation]:
        """Whom a step gave a token."""
        assert_first_lanes_run(scheduler)
        given = []
        for handle, event in scheduler.step():
            assert handle not in self.ends, "an end comes once, and last"
            if isinstance(event, Chunk):
                self.chunks[handle].append(event)
                given += [handle] if event.token_ids else []
            else:
                self.ends[handle] = event
        return given

    def run(self, scheduler: Scheduler) -> Received:
        while scheduler.has_work:
            self.step(scheduler)
        return self

    def tokens(self, handle: Generation) -> list[int]:
        return [token for chunk in self.chunks[handle] for token in chunk.token_ids]


def assert_first_lanes_run(scheduler: Scheduler) -> None:
    """Each sequence has a lane of its own; those that run have the first ones, unless all are taken
    and one that is read stands between."""
    session = scheduler.session
    running, reading = ({seq.lane for seq in seqs} for seqs in (session.running, session.reading))
    assert len(running | reading) == len(scheduler.active) == len(session.sequences)
    assert set(scheduler.active) == set(session.sequences)
    if session.free_lanes:
        assert running == set(range(len(running)))
    assert set(range(max(running, default=0))) <= running | reading


def assert_as_alone(received: Received, handles: Sequence[Generation]) -> None:
    for handle in handles:
        end = received.ends[handle]
        assert isinstance(end, Response)
        assert (end.token_ids, end.finish_reason) == (alone(handle.request), MAX_LENGTH)
        assert received.tokens(handle) == end.token_ids


def test_scheduler_with_nothing_to_do_may_be_called() -> None:
    scheduler = scheduler_for()
    assert not scheduler.has_work
    assert scheduler.step() == []
    asked = request(5, 6)
    scheduler = scheduler_for(asked)
    assert scheduler.step() == []
    handle = scheduler.add(asked)
    received = Received().run(scheduler)
    assert scheduler.step() == []
    assert_as_alone(received, [handle])


def test_request_that_comes_while_others_run_gets_what_it_gets_alone() -> None:
    asked = [request(5, 20), request(11, 9), request(3, 12, None), request(14, 4)]
    scheduler, received = scheduler_for(*asked, lanes=3), Received()
    handles = []
    for one in asked:
        handles.append(scheduler.add(one))
        received.step(scheduler)
    received.run(scheduler)
    assert_as_alone(received, handles)


arrivals = st.lists(
    st.tuples(
        st.integers(1, 20),  # tokens of the prompt
        st.integers(1, 12),  # tokens of the answer
        st.booleans(),  # with drafts
        st.integers(0, 4),  # steps before the next one comes
        st.none() | st.integers(0, 6),  # cancelled after so many steps
        st.sampled_from([0, 3, 7]),  # tokens kept
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arrivals, st.integers(1, 3), st.sampled_from([ScriptedDrafter, Stateless]), st.booleans())
def test_whoever_comes_and_goes_each_gets_what_it_gets_alone(
    arrivals: list[tuple[int, int, bool, int, int | None, int]],
    lanes: int,
    kind: type[ScriptedDrafter],
    keeping: bool,
) -> None:
    asked = [
        request(length, new, PLAN if drafts else None, seed, keep=keep)
        for seed, (length, new, drafts, *_, keep) in enumerate(arrivals)
    ]
    with mock.patch.object(CachedDecoder, "prefill_chunk", CHUNK):
        scheduler = scheduler_for(*asked, lanes=lanes, kind=kind, budget=10**6 * keeping)
        received, handles, due = Received(), [], {}
        for one, (*_, steps, cancelled, _) in zip(asked, arrivals, strict=True):
            handles.append(scheduler.add(one))
            if cancelled is not None:
                due[handles[-1]] = cancelled
            for _ in range(steps):
                step_and_cancel(scheduler, received, due)
        while scheduler.has_work:
            step_and_cancel(scheduler, received, due)
    assert set(received.ends) == set(handles)
    for handle in handles:
        end, expected = received.ends[handle], alone(handle.request)
        assert isinstance(end, Response)
        assert end.token_ids == expected[: len(end.token_ids)]
        assert end.finish_reason == CANCELLED or end.token_ids == expected
        assert end.finish_reason == MAX_LENGTH or handle.cancelled


def step_and_cancel(scheduler: Scheduler, received: Received, due: dict[Generation, int]) -> None:
    for handle in [handle for handle, steps in due.items() if steps == 0]:
        handle.cancel()
        del due[handle]
    for handle in due:
        due[handle] -= 1
    received.step(scheduler)


# Who holds up whom


def calls_between_tokens(scheduler: Scheduler, handle: Generation, received: Received) -> list[int]:
    """Base passes between two steps that gave `handle` a token."""
    runner, counts, before = scheduler.session.base.runner, [], None
    while handle not in received.ends:
        if handle in received.step(scheduler):
            counts += [] if before is None else [len(runner.rows) - before]
            before = len(runner.rows)
    return counts


@pytest.mark.parametrize("length", [1000, 60])
def test_long_prompt_holds_up_a_mate_for_one_chunk_at_a_time(length: int) -> None:
    short, long = request(3, 40, None), request(length, 3, None)
    scheduler, received = scheduler_for(short, long, capacity=1200), Received()
    handle = scheduler.add(short)
    received.step(scheduler)
    other = scheduler.add(long)
    counts = calls_between_tokens(scheduler, handle, received)
    # a chunk and a decode step, as long as there is something to read
    num_chunks = min(length // CHUNK - 1, len(counts))
    assert counts == [2] * num_chunks + [1] * (len(counts) - num_chunks)
    assert max(scheduler.session.base.runner.rows) == CHUNK
    received.run(scheduler)
    assert received.tokens(handle) == alone(short)
    assert len(received.tokens(other)) == 3


def test_several_prompts_hold_up_a_mate_for_no_more_than_one_of_them() -> None:
    asked = [request(3, 30), *(request(3, 4, seed=seed) for seed in range(1, 4))]
    scheduler, received = scheduler_for(*asked, lanes=4), Received()
    handle = scheduler.add(asked[0])
    received.step(scheduler)
    received.step(scheduler)
    handles = [handle, *map(scheduler.add, asked[1:])]
    assert max(calls_between_tokens(scheduler, handle, received)) == 2
    assert_as_alone(received.run(scheduler), handles)


def test_requests_that_come_together_decode_together() -> None:
    """As long as nobody has decoded and prompts are no longer than a chunk."""
    asked = [request(length, 5, None, seed) for seed, length in enumerate((2, CHUNK, 3))]
    scheduler, received = scheduler_for(*asked, lanes=3), Received()
    handles = [scheduler.add(one) for one in asked]
    assert [received.step(scheduler) for _ in handles] == [[handle] for handle in handles]
    received.run(scheduler)
    assert scheduler.session.base.runner.batches == [1, 1, 1, 3, 3, 3, 3]
    assert_as_alone(received, handles)


def test_long_prompt_behind_short_ones_keeps_nobody_from_decoding() -> None:
    asked = [request(2, 9, None), request(2 * CHUNK, 5, None), request(3, 5, None)]
    scheduler, received = scheduler_for(*asked, lanes=3), Received()
    first, second, third = (scheduler.add(one) for one in asked)
    given = [received.step(scheduler) for _ in range(4)]
    assert given == [[first], [third], [first, third], [second, *[first, second, third]]]


def test_short_prompt_is_read_before_the_rest_of_a_long_one_which_has_each_fourth_turn() -> None:
    long, shorts = request(60, 2, None), [request(3, 1, None, seed) for seed in range(9)]
    scheduler, received = scheduler_for(long, *shorts, lanes=2), Received()
    first = scheduler.add(long)
    received.step(scheduler)
    handles = [scheduler.add(one) for one in shorts]
    read = list[int]()
    for _ in range(12):
        before = first.num_read
        received.step(scheduler)
        read.append(first.num_read - before)
    assert read == [0, 0, 0, CHUNK] * 3
    assert_as_alone(received.run(scheduler), [first, *handles])
    assert scheduler.session.base.runner.moved == 0


def test_shorter_prompt_ends_the_chunk_that_is_read_alone_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long, asked = request(60, 2, None), [request(length, 1, None, length) for length in (3, 2, 50)]
    scheduler, received = scheduler_for(long, *asked, lanes=2), Received()
    base, waiting, ended, handles = scheduler.session.base, [*asked], list[bool](), []
    run = base.runner.run

    def run_while_one_comes(call: Call) -> list[Result]:
        ended.clear()
        if call.rows == CHUNK and waiting:
            handles.append(scheduler.add(waiting.pop(0)))
        if ended:
            raise Interrupted
        return run(call)

    monkeypatch.setattr(base.runner, "run", run_while_one_comes)
    monkeypatch.setattr(base, "interruptible", lambda: nullcontext(lambda: ended.append(True)))
    first, read = scheduler.add(long), list[int]()
    for _ in range(5):
        received.step(scheduler)
        read.append(first.num_read)
    assert read == [0, 0, CHUNK, CHUNK, 2 * CHUNK]
    assert_as_alone(received.run(scheduler), [first, *handles])


def test_equal_prompts_that_come_together_are_read_once_and_apart_by_salt() -> None:
    asked = [request(40, 3, None, cache_salt=salt) for salt in ("", "", "b", "b", "")]
    scheduler, received = scheduler_for(*asked, lanes=4, budget=10**6), Received()
    handles = [scheduler.add(one) for one in asked]
    assert_as_alone(received.run(scheduler), handles)
    reused = [received.ends[handle].metrics.reused_tokens for handle in handles]
    assert reused == [0, 39, 0, 39, 39]
    assert len(scheduler.session.prefixes.entries) == 2


def test_one_that_is_read_makes_room_for_those_that_run_as_far_as_lanes_are_free() -> None:
    long, short = request(40, 3, None), request(3, 9, None)
    for lanes, expected in ((2, [1, 0]), (3, [0, 2])):
        scheduler, received = scheduler_for(long, short, lanes=lanes), Received()
        first = scheduler.add(long)
        received.step(scheduler)
        second = scheduler.add(short)
        received.step(scheduler)
        assert [second.lane, first.lane] == expected
        assert_as_alone(received.run(scheduler), [first, second])


def test_rows_of_a_chunk_beside_those_that_run_follow_from_stored_costs() -> None:
    costs = CostModel(profile(row=0.1))
    turns = PromptTurns(costs, lambda: 256)
    reading, running = (SequenceState(range(n), Sampler(), 9) for n in (900, 40))
    assert turns.rows(reading, [running]) == MIN_ROWS  # 6 rows would cost a step and a half
    assert PromptTurns(None, lambda: 256).rows(reading, [running]) == UNMEASURED_ROWS
    running.last_step = StepSize(nodes=21)  # 3 plain steps long
    assert turns.rows(reading, [running]) == 36
    assert PromptTurns(costs, lambda: 20).rows(reading, [running]) == 20
    cheap = CostModel(profile(row=0.001))
    assert PromptTurns(cheap, lambda: 256).rows(reading, [running]) == 256
    passes = tuple(replace(time, seconds=time.seconds / 1000) for time in profile().base)
    fast = CostModel(replace(profile(), base=passes))
    running.last_step = StepSize()
    assert PromptTurns(fast, lambda: 256).rows(reading, [running]) == 41  # five milliseconds


def test_chunks_where_nothing_runs_are_as_small_as_rows_are_as_cheap_as_in_any() -> None:
    reading = SequenceState(range(900), Sampler(), 9)
    for row, wanted in ((0.5, 64), (0.05, 128), (0.005, 256)):
        costs = CostModel(profile(row))
        assert PromptTurns(costs, lambda: 256).rows(reading, []) == wanted
    assert PromptTurns(None, lambda: 256).rows(reading, []) == 256


def test_first_token_is_not_held_back_by_a_decode_step() -> None:
    asked = request(3, 5)
    scheduler, received = scheduler_for(asked), Received()
    handle = scheduler.add(asked)
    assert received.step(scheduler) == [handle]
    assert len(scheduler.session.base.runner.rows) == 1


def test_requests_are_answered_in_the_order_in_which_they_came() -> None:
    asked = [request(3, 6, None, seed) for seed in range(3)]
    scheduler, order = scheduler_for(*asked, lanes=1), []
    handles = [scheduler.add(one) for one in asked]
    while scheduler.has_work:
        order += [handle for handle, event in scheduler.step() if isinstance(event, Response)]
    assert order == handles


def test_lower_priority_runs_first_and_equal_ones_as_they_came() -> None:
    asked = [request(3, 3, None, i, priority=p) for i, p in enumerate((0, 5, 1, -1, 1))]
    scheduler, received = scheduler_for(*asked, lanes=1), Received()
    handles = [scheduler.add(asked[0])]
    received.step(scheduler)
    handles += map(scheduler.add, asked[1:])
    assert_as_alone(received.run(scheduler), handles)
    assert [handles.index(handle) for handle in received.ends] == [0, 3, 2, 4, 1]


def test_no_more_wait_than_may() -> None:
    asked = [request(3, 3, None, seed) for seed in range(5)]
    scheduler = scheduler_for(*asked, lanes=2)
    scheduler.max_queue = 1
    handles = [scheduler.add(one) for one in asked[:3]]
    with pytest.raises(QueueFull, match="3 requests wait for the engine, of 1 that may"):
        scheduler.add(asked[3])
    Received().run(scheduler)
    handles[-1].cancel()  # once it has ended nothing is held for it
    assert not scheduler.cancels
    scheduler.add(asked[4])


def test_steps_look_at_nobody_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(3, 9, None)
    scheduler, received = scheduler_for(asked, lanes=1), Received()
    first = scheduler.add(asked)
    handles = [scheduler.add(asked) for _ in range(300)]
    received.step(scheduler)
    looked = mock.Mock(return_value=False)
    monkeypatch.setattr(Generation, "cancelled", property(lambda self: looked()), raising=False)
    while first not in received.ends:
        received.step(scheduler)
    assert not looked.called
    monkeypatch.undo()
    for handle in handles[1:]:
        handle.cancel()
    received.run(scheduler)
    assert all(received.ends[handle].finish_reason == CANCELLED for handle in handles[1:])
    assert_as_alone(received, [first, handles[0]])


# Who ends


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_cancelled_while_its_prompt_is_read_it_leaves_its_lane(steps: int) -> None:
    mate, long, third = request(3, 30), request(40, 5), request(6, 7)
    scheduler, received = scheduler_for(mate, long, third, lanes=2), Received()
    handles = [scheduler.add(one) for one in (mate, long, third)]
    for _ in range(1 + steps):
        received.step(scheduler)
    assert scheduler.session.reading[0] is handles[1]
    assert handles[1].num_read == steps * CHUNK
    handles[1].cancel()
    received.run(scheduler)
    end = received.ends[handles[1]]
    assert isinstance(end, Response)
    assert (end.finish_reason, end.token_ids) == (CANCELLED, [])
    assert_as_alone(received, [handles[0], handles[2]])


def test_cancelled_while_it_waits_it_never_runs() -> None:
    asked = [request(3, 9), request(4, 9)]
    scheduler, received = scheduler_for(*asked, lanes=1), Received()
    first, second = (scheduler.add(one) for one in asked)
    second.cancel()
    received.step(scheduler)
    end = received.ends[second]
    assert isinstance(end, Response)
    assert (end.finish_reason, end.token_ids) == (CANCELLED, [])
    assert_as_alone(received.run(scheduler), [first])


def test_one_that_begins_to_run_moves_behind_the_others_once_a_mate_has_ended() -> None:
    short, mate, long = request(3, 4, None), request(4, 20), request(40, 9)
    scheduler, received = scheduler_for(short, mate, long, lanes=3), Received()
    handles = [scheduler.add(one) for one in (short, mate, long)]
    moved: list[tuple[int, int]] = []
    real = CachedDecoder.move

    def move(self: CachedDecoder, source: int, target: int) -> None:
        moved.append((source, target))
        real(self, source, target)

    with mock.patch.object(CachedDecoder, "move", move):
        received.run(scheduler)
    assert moved[:2] == [(1, 0), (2, 0)]
    assert_as_alone(received, handles)


def test_prompt_that_fails_harms_nobody_and_the_engine_s_own_fault_all_that_have_a_lane() -> None:
    asked = [request(3, 9, seed=1), request(12, 9, seed=2), request(5, 9, seed=3)]
    real = Session.read

    def read(self: Session, seq: Any, start: int, end: int) -> Any:
        if [*seq.prompt] == [*asked[1].prompt_ids] and start:
            raise MemoryError
        return real(self, seq, start, end)

    scheduler = scheduler_for(*asked, lanes=2)
    handles = [scheduler.add(one) for one in asked]
    with mock.patch.object(Session, "read", read):
        received = Received().run(scheduler)
    assert isinstance(received.ends[handles[1]], EnvironmentProblem)
    assert_as_alone(received, [handles[0], handles[2]])

    scheduler, received = scheduler_for(*asked, lanes=2), Received()
    handles = [scheduler.add(one) for one in asked]
    received.step(scheduler)
    with mock.patch.object(Session, "step", side_effect=MemoryError):
        received.step(scheduler)
    assert all(isinstance(received.ends[handle], EnvironmentProblem) for handle in handles[:2])
    assert_as_alone(received.run(scheduler), handles[2:])


def test_a_request_that_cannot_get_its_lane_leaves_it_to_the_next() -> None:
    asked = [request(3, 9, seed=1), request(5, 9, seed=2)]
    real, failed = Session.give_drafter, list[object]()

    def give_drafter(self: Session, seq: Any) -> None:
        if not failed:
            failed.append(seq)
            raise MemoryError
        real(self, seq)

    scheduler = scheduler_for(*asked, lanes=1)
    handles = [scheduler.add(one) for one in asked]
    with mock.patch.object(Session, "give_drafter", give_drafter):
        received = Received().run(scheduler)
    assert isinstance(received.ends[handles[0]], EnvironmentProblem)
    assert_as_alone(received, handles[1:])


def test_prompt_that_fails_in_a_later_chunk_leaves_no_prefix_behind() -> None:
    """Its rows may hold NaN although the error shows only with the last chunk's logits."""
    asked = request(12, 5, keep=3)
    scheduler = scheduler_for(asked, budget=10**6)
    real = Session.read

    def read(self: Session, seq: Any, start: int, end: int) -> Any:
        if end == 12:
            raise EnvironmentProblem("the engine computed nan as a logit")
        return real(self, seq, start, end)

    with mock.patch.object(Session, "read", read):
        scheduler.add(asked)
        Received().run(scheduler)
    assert scheduler.session.base.runner.zeroed == [0]
    assert (scheduler.session.prefixes.entries, scheduler.session.kept) == ([], {})
    scheduler.add(asked)
    Received().run(scheduler)
    assert [len(entry.cache_key) for entry in scheduler.session.prefixes.entries] == [3]


def test_prompt_beyond_the_cache_is_an_error_of_its_own() -> None:
    asked = [request(CAPACITY + 1, 3), request(4, 5)]
    scheduler = scheduler_for(*asked, lanes=1)
    handles = [scheduler.add(one) for one in asked]
    received = Received().run(scheduler)
    assert isinstance(received.ends[handles[0]], LimitError)
    assert_as_alone(received, handles[1:])


def test_draw_that_fails_ends_one_sequence() -> None:
    asked = [request(3, 9, seed=1), request(4, 9, seed=2)]
    real = Sampler.pick_from

    def pick(self: Sampler, logits: Logits, row: int, before: Sequence[int]) -> int:
        if len(before) > 6 and list(before[:4]) == list(asked[1].prompt_ids):
            raise EnvironmentProblem("the engine computed nan as a logit")
        return real(self, logits, row, before)

    scheduler = scheduler_for(*asked)
    handles = [scheduler.add(one) for one in asked]
    with mock.patch.object(Sampler, "pick_from", pick):
        received = Received().run(scheduler)
    assert isinstance(received.ends[handles[1]], EnvironmentProblem)
    assert all(chunk.finish_reason != ERROR for chunk in received.chunks[handles[1]])
    assert scheduler.session.base.runner.zeroed == [handles[1].slot]
    assert_as_alone(received, handles[:1])


def test_text_that_fails_ends_one_sequence_whose_rows_are_zeroed() -> None:
    """Whatever was raised, it is this request's own."""
    asked = [request(3, 9, seed=1), request(4, 9, seed=2)]
    scheduler = scheduler_for(*asked)
    handles = [scheduler.add(one) for one in asked]
    real = Generation.chunk

    def chunk(self: Generation, output: Any) -> Chunk:
        if self is handles[0] and self.num_emitted > 3:
            raise ValueError("no text")
        return real(self, output)

    with mock.patch.object(Generation, "chunk", chunk):
        received = Received().run(scheduler)
    assert isinstance(received.ends[handles[0]], EdgeSpecError)
    assert scheduler.session.base.runner.zeroed == [handles[0].slot]
    assert_as_alone(received, handles[1:])


def test_step_that_is_interrupted_leaves_nothing_of_its_requests_and_those_that_wait() -> None:
    asked = [request(3, 9), request(20, 9), request(5, 9)]
    scheduler, received = scheduler_for(*asked), Received()
    *_, waiting = [scheduler.add(one) for one in asked]
    received.step(scheduler)
    received.step(scheduler)
    with (
        mock.patch.object(CachedDecoder, "commit", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        received.step(scheduler)
    assert not scheduler.active
    assert scheduler.queued() == {waiting}
    again = scheduler.add(asked[0])
    assert_as_alone(Received().run(scheduler), [waiting, again])


def test_deadline_ends_one_that_runs_one_that_is_read_and_one_that_waits() -> None:
    asked = [request(n, 30, None, seed=n, timeout_s=100.0) for n in (3, 40, 5)] + [request(4, 3)]
    scheduler, received = scheduler_for(*asked, lanes=2), Received()
    handles = [scheduler.add(one) for one in asked]
    for _ in range(4):
        received.step(scheduler)
    late = handles[0].arrived_s + 101
    with mock.patch("time.perf_counter", return_value=late):
        received.step(scheduler)
    ends = [received.ends[handle] for handle in handles[:3]]
    assert [end.finish_reason for end in ends] == [TIMEOUT] * 3
    assert ends[0].token_ids == alone(asked[0])[: len(ends[0].token_ids)] != []
    assert_as_alone(received.run(scheduler), handles[3:])


# What it takes


def test_those_that_are_gone_leave_the_queue_and_its_order() -> None:
    @dataclass(eq=False)
    class Handle:
        priority: int = 0

    queue, handles = WaitingQueue(), [Handle() for _ in range(1000)]
    for handle in cast(list[Generation], handles):
        queue.add(handle)
        assert queue.remove(handle)
    assert not queue
    assert len(queue.order.heap) <= SPARE + 1


def test_stats_count_what_was_done() -> None:
    asked = [request(40, 9), request(40, 9), request(6, 9, None)]
    scheduler, received = scheduler_for(*asked, lanes=2, budget=10**6), Received()
    handles = [scheduler.add(one) for one in asked]
    assert (scheduler.stats().running, scheduler.stats().waiting) == (0, 3)
    received.step(scheduler)
    assert (scheduler.stats().running, scheduler.stats().waiting) == (2, 1)
    received.run(scheduler)
    found, metrics = scheduler.stats(), [received.ends[handle].metrics for handle in handles]
    assert (found.running, found.waiting) == (0, 0)
    assert found.prompt_tokens == found.prefix_cache_queries == 86
    assert found.prefix_cache_hits == sum(one.reused_tokens for one in metrics) > 0
    assert found.prefix_cache_bytes == scheduler.session.prefixes.size_bytes > 0
    assert found.generation_tokens == 27
    assert 0 < found.steps < sum(one.steps for one in metrics)
    assert found.accepted_tokens == sum(one.num_accepted for one in metrics)
    assert found.draft_tokens == sum(one.num_drafted for one in metrics)
    assert found.drafts == sum(drafted > 0 for one in metrics for drafted in one.per_step_drafted)
    per_step = [count for one in metrics for count in one.per_step_accepted]
    positions = range(max(per_step))
    expected = [sum(count > i for count in per_step) for i in positions]
    assert list(found.accepted_per_position) == expected
    assert found.iteration_tokens == 86 - found.prefix_cache_hits + 27
    assert sum(found.iterations) >= found.steps
    assert found.iterations[0] == 8  # of the last one, which decodes alone and plainly


def test_time_that_a_request_waits_for_a_lane_is_its_queue_time() -> None:
    asked = [request(3, 9), request(4, 2)]
    scheduler = scheduler_for(*asked, lanes=1)
    handles = [scheduler.add(one) for one in asked]
    received = Received().run(scheduler)
    first, second = (received.ends[handle].metrics for handle in handles)
    assert second.queue_time >= first.request_latency - first.queue_time > 0
    for metrics in (first, second):
        with_queue, without = (
            metrics.time_to_first_token,
            metrics.time_to_first_token_without_queue,
        )
        assert 0 < without == with_queue - metrics.queue_time
        assert with_queue <= metrics.request_latency


def test_request_that_came_before_it_was_added_has_waited_since() -> None:
    asked = request(3, 2)
    scheduler = scheduler_for(asked)
    now = scheduler.add(asked).arrived_s
    early = scheduler.add(request(3, 2, arrived_s=now - 5))
    Received().run(scheduler)
    assert early.metrics.queue_time > 5


# The comparison can see


def test_planted_bug_in_moving_is_caught() -> None:
    short, mate, long = request(3, 4, None), request(4, 20), request(40, 9)
    scheduler = scheduler_for(short, mate, long, lanes=3)
    handles = [scheduler.add(one) for one in (short, mate, long)]

    def stay(self: CachedDecoder, source: int, target: int) -> None:
        self.lanes[target] = self.lanes[source]

    with mock.patch.object(CachedDecoder, "move", stay):
        received = Received().run(scheduler)
    assert [received.tokens(handle) for handle in handles] != [alone(h.request) for h in handles]
