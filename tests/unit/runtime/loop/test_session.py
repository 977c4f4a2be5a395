"""The loop is lossless, without an engine: whatever a drafter proposes, it emits what plain
decoding emits.

The model is `hash_model`'s; sequences that run side by side are in `test_batches`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.backends.call import Logits
from edgespec.backends.host import HostLogits
from edgespec.errors import LimitError
from edgespec.prompts import CAPACITY, END_OF_SEQUENCE, MAX_LENGTH
from edgespec.runtime.acceptance.verify import ACCEPT_RULES, AcceptOptions, AcceptResult, walk
from edgespec.runtime.drafters.base import DraftRequest
from edgespec.runtime.lanes.decoder import CachedDecoder, DecoderRows
from edgespec.runtime.loop.sequence import SequenceState, StepOutput
from edgespec.runtime.loop.session import Session
from edgespec.runtime.sampling.sampler import Sampler, top_log_probs
from edgespec.runtime.trees.tree import DraftPlan, DraftTree
from tests.lossless.drafters import ScriptedDrafter, Stateless, accept_one_more, rule_row
from tests.unit.runtime.hash_model import GREEDY, VOCAB, begin, decoder_of, logits_after, plainly


def tokens_of(steps: Sequence[StepOutput]) -> tuple[list[int], str | None]:
    assert all(step.finish_reason is None for step in steps[:-1])
    return [token for step in steps for token in step.tokens], steps[-1].finish_reason


PROMPT = [6, 1, 8, 0, 3]
PLAN = DraftPlan(3, 4, 9)


def drafted(
    right: float,
    *,
    prompt: Sequence[int] = PROMPT,
    sampler: Sampler = GREEDY,
    max_new: int = 24,
    stop_ids: frozenset[int] = frozenset(),
    capacity: int = 64,
    plan: DraftPlan = PLAN,
    seed: int = 0,
    window: int | None = None,
) -> tuple[list[StepOutput], Session]:
    """A speculative run; its drafter knows what plain decoding would say without any limit."""
    truth = plainly(prompt, sampler, max_new + plan.steps + 1, window=window or 10**6)[0]
    session = Session(
        decoder_of(capacity, window), ScriptedDrafter([(prompt, truth)], VOCAB, right, seed)
    )
    return list(generate(session, SequenceState(prompt, sampler, max_new, stop_ids, plan))), session


def generate(session: Session, seq: SequenceState) -> Iterator[StepOutput]:
    """One sequence alone."""
    session.restart()
    yield begin(session, seq)
    while session.running:
        ((_, step),) = session.step()
        yield step


def undrafted(
    prompt: Sequence[int], sampler: Sampler, max_new: int, stop_ids: frozenset[int], capacity: int
) -> list[StepOutput]:
    return list(
        generate(Session(decoder_of(capacity)), SequenceState(prompt, sampler, max_new, stop_ids))
    )


# Lossless

SAMPLERS = [GREEDY, Sampler(0.7, 0, 1.0, 1), Sampler(1.0, 4, 0.9, 2), Sampler(3.0, 0, 1.0, 3)]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_session_without_a_drafter_decodes_plainly(sampler: Sampler) -> None:
    assert tokens_of(undrafted(PROMPT, sampler, 24, frozenset(), 64)) == plainly(
        PROMPT, sampler, 24
    )


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("right", [0, 0.5, 0.9, 1])
@pytest.mark.parametrize("plan", [DraftPlan(1, 3, 4), DraftPlan(4, 3, 16), DraftPlan(3, 6, 24)])
def test_drafted_tokens_equal_plain_ones(sampler: Sampler, right: float, plan: DraftPlan) -> None:
    for seed in range(3):
        steps, _ = drafted(right, sampler=sampler, plan=plan, seed=seed)
        assert tokens_of(steps) == plainly(PROMPT, sampler, 24)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14),
    room=st.integers(0, 20),
    max_new=st.integers(1, 20),
    stop_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
    plan=st.builds(DraftPlan, st.integers(1, 4), st.integers(1, 6), st.integers(1, 20)),
    right=st.sampled_from([0, 0.5, 0.8, 1]),
    temperature=st.sampled_from([0.0, 1.0]),
    window=st.none() | st.integers(1, 6),
    chunk=st.integers(1, 6),
    seed=st.integers(0, 2**16),
)
def test_any_drafter_within_any_limits_leaves_tokens_and_reason_as_they_were(
    prompt: list[int],
    room: int,
    max_new: int,
    stop_ids: frozenset[int],
    plan: DraftPlan,
    right: float,
    temperature: float,
    window: int | None,
    chunk: int,
    seed: int,
) -> None:
    capacity, sampler = len(prompt) + room, Sampler(temperature, seed=seed)
    with mock.patch.object(CachedDecoder, "prefill_chunk", chunk):
        steps, session = drafted(
            right,
            prompt=prompt,
            sampler=sampler,
            max_new=max_new,
            stop_ids=stop_ids,
            capacity=capacity,
            plan=plan,
            seed=seed,
            window=window,
        )
    wanted = plainly(prompt, sampler, max_new, stop_ids, capacity=capacity, window=window or 10**6)
    assert tokens_of(steps) == wanted
    assert session.base.runner.widest <= capacity


@pytest.mark.parametrize("right", [0, 0.5, 1])
def test_tree_deeper_than_the_sliding_window_sees_no_further_than_plain_decoding(
    right: float,
) -> None:
    plan = DraftPlan(3, 6, 24)
    steps, _ = drafted(right, plan=plan, window=3)
    assert tokens_of(steps) == plainly(PROMPT, GREEDY, 24, window=3)
    assert tokens_of(steps) != plainly(PROMPT, GREEDY, 24)


# What speculation is for


def test_drafter_that_is_always_right_saves_passes() -> None:
    steps, _ = drafted(1, max_new=25, plan=DraftPlan(1, 3, 4))
    assert [len(step.tokens) for step in steps] == [1] + [4] * 6
    assert [(step.drafted, step.accepted) for step in steps[1:]] == [(3, 3)] * 6


def test_drafter_that_always_lies_costs_no_token() -> None:
    steps, _ = drafted(0, max_new=10)
    assert [len(step.tokens) for step in steps] == [1] * 10
    assert [step.accepted for step in steps] == [0] * 10
    assert any(step.drafted for step in steps)


def test_accepted_nodes_lie_scattered_so_that_the_comparisons_do_move_rows() -> None:
    _, session = drafted(0.8, max_new=60, capacity=99)
    assert session.base.runner.moved > 5


def test_prefill_step_is_no_verify_step() -> None:
    steps, _ = drafted(0.5)
    assert [step.verified for step in steps] == [False] + [True] * (len(steps) - 1)
    assert (len(steps[0].tokens), steps[0].drafted, steps[0].accepted) == (1, 0, 0)


def test_each_uncut_step_emits_one_token_more_than_it_accepted() -> None:
    steps, session = drafted(0.8, max_new=40)
    assert all(len(step.tokens) == step.accepted + 1 for step in steps)
    assert [step.drafted for step in steps[1:]] == [len(tree) - 1 for tree in session.drafter.trees]
    assert len({step.accepted for step in steps}) > 2


# What a step says beside its tokens


@pytest.mark.parametrize("sampler", [GREEDY, Sampler(1.0, seed=2)])
def test_log_probabilities_are_those_of_the_row_that_each_token_was_drawn_from(
    sampler: Sampler,
) -> None:
    """Accepted rows lie scattered over the tree."""
    truth = plainly(PROMPT, sampler, 50)[0]
    session = Session(decoder_of(99), ScriptedDrafter([(PROMPT, truth)], VOCAB, 0.8))
    steps = list(generate(session, SequenceState(PROMPT, sampler, 40, plan=PLAN, num_logprobs=3)))
    assert session.base.runner.moved
    found = [candidates for step in steps for candidates in step.logprobs]
    assert len(found) == 40
    for i, (token, candidates) in enumerate(zip(truth, found, strict=False)):
        before = list(enumerate([*PROMPT, *truth[:i]]))
        logits = HostLogits(logits_after(before)[None])
        assert [candidates] == top_log_probs(logits, 3, [token])


def test_log_probabilities_end_with_the_text() -> None:
    session = Session(decoder_of(64), ScriptedDrafter([(PROMPT, TRUTH)], VOCAB, 1))
    seq = SequenceState(
        PROMPT, GREEDY, 24, frozenset({TRUTH[INSIDE]}), DraftPlan(1, 3, 4), num_logprobs=2
    )
    steps = list(generate(session, seq))
    assert [len(step.logprobs) for step in steps] == [len(step.tokens) for step in steps]
    assert len(steps[-1].tokens) == INSIDE < 4


# What the drafter is told


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 512])
def test_drafter_observes_each_committed_position_once_with_the_token_after_it(chunk: int) -> None:
    """Over chunks of prefill and over steps: hidden state i (position, token, tokens seen) goes
    with token i+1."""
    with mock.patch.object(CachedDecoder, "prefill_chunk", chunk):
        steps, session = drafted(0.8, max_new=20)
    path = PROMPT + tokens_of(steps)[0]
    # nothing is drafted after the last step, so it is not observed
    count = len(path) - len(steps[-1].tokens)
    assert [state.tolist() for state in session.drafter.hidden_states] == [
        [i, t, i + 1] for i, t in enumerate(path[: count - 1])
    ]
    assert session.drafter.tokens == path[1:count]


def test_hidden_state_of_the_last_committed_position_is_at_hand_after_every_step() -> None:
    truth = plainly(PROMPT, GREEDY, 50)[0]
    session = Session(decoder_of(99), ScriptedDrafter([(PROMPT, truth)], VOCAB, 0.8))
    seq, path = SequenceState(PROMPT, GREEDY, 40, plan=PLAN), [*PROMPT, *truth]
    for _ in generate(session, seq):
        last = session.base.lanes[0].length - 1
        assert seq.hidden_state is not None
        assert seq.hidden_state.numpy().tolist() == [[last, path[last], last + 1]]
    assert session.base.runner.moved


def test_hidden_state_at_hand_outlives_the_calls_of_others() -> None:
    """The engine's next call overwrites the buffer that it came in."""
    session = Session(decoder_of(64, lanes=2), ScriptedDrafter([], VOCAB, 0))
    one, other = (SequenceState(prompt, GREEDY, 9, plan=PLAN) for prompt in (PROMPT, [8, 8]))
    begin(session, one)
    begin(session, other)
    assert one.hidden_state is not None
    assert one.hidden_state.numpy().tolist() == [[len(PROMPT) - 1, PROMPT[-1], len(PROMPT)]]


def test_drafter_is_asked_for_no_more_than_can_be_emitted_or_held() -> None:
    _, session = drafted(0, max_new=6, capacity=len(PROMPT) + 4, plan=DraftPlan(3, 4, 9))
    asked = [(plan.steps, plan.verify_size) for plan in session.drafter.plans]
    assert asked == [(4, 4), (3, 3), (2, 2), (1, 1)]
    assert session.base.lanes[0].length == session.base.capacity


def test_plan_of_none_asks_no_drafter() -> None:
    drafter = ScriptedDrafter([], VOCAB, 0)
    session = Session(decoder_of(64), drafter)
    assert tokens_of(list(generate(session, SequenceState(PROMPT, GREEDY, 8)))) == plainly(
        PROMPT, GREEDY, 8
    )
    assert (drafter.trees, drafter.lanes) == ([], {})


@pytest.mark.parametrize("right", [0, 0.8, 1])
@pytest.mark.parametrize("chunk", [2, 512])
def test_drafter_that_needs_no_hidden_states_gets_the_prompt_and_what_was_generated(
    chunk: int, right: float
) -> None:
    """`Stateless` itself refuses hidden states, and tokens that it has already would break its
    path."""
    truth = plainly(PROMPT, GREEDY, 40)[0]
    session = Session(decoder_of(64), Stateless([(PROMPT, truth)], VOCAB, right))
    with mock.patch.object(CachedDecoder, "prefill_chunk", chunk):
        steps = list(generate(session, SequenceState(PROMPT, GREEDY, 24, plan=PLAN)))
    assert tokens_of(steps) == plainly(PROMPT, GREEDY, 24)
    told = [*PROMPT, *tokens_of(steps[:-1])[0]]
    assert session.drafter.tokens == told[1:]
    assert (sum(step.accepted for step in steps) > 0) == (right > 0)


def test_sequence_s_accept_rule_is_the_one_of_the_table_that_it_names() -> None:
    """A rule sees the tree with the draft's probabilities, logits of each node, and all tokens."""
    seen: list[tuple[int, int, int]] = []

    def nothing_accepted(
        tree: DraftTree, logits: Logits, sampler: Sampler, before: Sequence[int]
    ) -> AcceptResult:
        seen.append((len(tree), len(logits), len(before)))
        assert tree.probs is not None or len(before) == len(PROMPT)  # prefill drafts nothing
        return AcceptResult([0], [sampler.pick_from(logits, 0, before)])

    class Nothing(AcceptOptions):
        rule = "none"

    class WithProbs(Stateless):
        def proposed(self, request: DraftRequest) -> DraftTree:
            return replace(tree := super().proposed(request), probs=np.ones(len(tree), np.float32))

    truth = plainly(PROMPT, GREEDY, 40)[0]
    session = Session(decoder_of(64), WithProbs([(PROMPT, truth)], VOCAB, 1))
    seq = SequenceState(PROMPT, GREEDY, 5, plan=DraftPlan(1, 3, 4), acceptance=Nothing())
    with mock.patch.dict(ACCEPT_RULES, none=rule_row(nothing_accepted)):
        steps = list(generate(session, seq))
    assert tokens_of(steps) == plainly(PROMPT, GREEDY, 5)
    assert seen == [(1, 1, 5), (4, 4, 6), (3, 3, 7), (2, 2, 8), (1, 1, 9)]


# Ends


@pytest.mark.parametrize("max_new", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("right", [0, 0.7, 1])
def test_exactly_max_new_tokens_come_out(max_new: int, right: float) -> None:
    steps, _ = drafted(right, max_new=max_new)
    assert tokens_of(steps) == (plainly(PROMPT, GREEDY, max_new)[0], MAX_LENGTH)
    assert sum(len(step.tokens) for step in steps) == max_new


TRUTH = plainly(PROMPT, GREEDY, 40)[0]


INSIDE = 2  # tokens 1 to 4 are the first step's: three drafts and a bonus


def test_stop_token_inside_an_accepted_run_ends_it_there() -> None:
    steps, session = drafted(1, stop_ids=frozenset({TRUTH[INSIDE]}), plan=DraftPlan(1, 3, 4))
    assert tokens_of(steps) == (TRUTH[: INSIDE + 1], END_OF_SEQUENCE)
    assert session.base.lanes[0].length == len(PROMPT) + INSIDE  # the stop token has no row
    assert (len(steps), steps[-1].drafted, steps[-1].accepted) == (
        2,
        3,
        INSIDE,
    )  # what was cut is not counted


def test_stop_token_as_the_bonus_counts_all_drafts_before_it() -> None:
    bonus = INSIDE  # with INSIDE - 1 drafts a step
    steps, _ = drafted(1, stop_ids=frozenset({TRUTH[bonus]}), plan=DraftPlan(1, bonus - 1, bonus))
    assert tokens_of(steps) == (TRUTH[: bonus + 1], END_OF_SEQUENCE)
    assert (len(steps), steps[-1].accepted) == (2, bonus - 1)


def test_stop_token_drawn_by_prefill_ends_before_any_draft() -> None:
    steps, session = drafted(1, stop_ids=frozenset({TRUTH[0]}))
    assert tokens_of(steps) == (TRUTH[:1], END_OF_SEQUENCE)
    assert session.drafter.trees == []


def test_stop_token_as_the_last_one_allowed_is_a_stop() -> None:
    for right in (0, 1):
        steps, _ = drafted(right, stop_ids=frozenset({TRUTH[INSIDE]}), max_new=INSIDE + 1)
        assert tokens_of(steps)[1] == END_OF_SEQUENCE


@pytest.mark.parametrize("room", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("right", [0, 0.7, 1])
def test_full_cache_ends_both_runs_at_the_same_token_for_the_same_reason(
    room: int, right: float
) -> None:
    capacity = len(PROMPT) + room
    steps, session = drafted(right, capacity=capacity, max_new=50)
    plain = undrafted(PROMPT, GREEDY, 50, frozenset(), capacity)
    assert tokens_of(steps) == tokens_of(plain) == (TRUTH[: room + 1], CAPACITY)
    assert session.base.lanes[0].length == capacity


def test_prompt_that_fills_the_cache_gives_one_token() -> None:
    steps = undrafted(PROMPT, GREEDY, 50, frozenset(), len(PROMPT))
    assert tokens_of(steps) == (TRUTH[:1], CAPACITY)


def test_prompt_beyond_the_cache_is_refused_and_so_is_an_empty_one() -> None:
    with pytest.raises(LimitError, match=r"5 tokens.* holds 4\n"):
        undrafted(PROMPT, GREEDY, 50, frozenset(), 4)
    with pytest.raises(LimitError, match="empty"):
        undrafted([], GREEDY, 50, frozenset(), 4)


@pytest.mark.parametrize("length", [4, 5, 8, 9, 13])
def test_prompt_is_read_in_chunks_and_gives_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(CachedDecoder, "prefill_chunk", 4)
    prompt = [i * i % VOCAB for i in range(length)]
    steps, session = drafted(0.8, prompt=prompt)
    assert tokens_of(steps) == plainly(prompt, GREEDY, 24)
    rows = session.base.runner.rows[: -(-length // 4)]
    assert rows == [4] * (length // 4) + ([length % 4] if length % 4 else [])


# The cache


@pytest.mark.parametrize("right", [0, 0.5, 0.8, 1])
def test_committed_slots_hold_the_accepted_path_in_order(right: float) -> None:
    steps, session = drafted(right, max_new=40, plan=DraftPlan(4, 4, 20))
    path = PROMPT + tokens_of(steps)[0][:-1]  # the pending token has no row
    assert session.base.lanes[0].length == len(path)
    assert session.base.runner.slots[0][: len(path)] == list(enumerate(path))
    assert len(session.base.lanes[0].scratch) == 0


def test_second_request_starts_from_nothing() -> None:
    """Rows of the first stay in memory; the second must not see them, even if the first was left
    half-way."""
    _, session = drafted(0.8, max_new=40)
    other = [8, 8, 1]
    session.drafter = ScriptedDrafter([(other, plainly(other, GREEDY, 30)[0])], VOCAB, 0.8)
    unfinished = generate(session, SequenceState(other, GREEDY, 20, plan=PLAN))
    next(unfinished)
    next(unfinished)
    steps = list(generate(session, SequenceState(other, GREEDY, 20, plan=PLAN)))
    assert tokens_of(steps) == plainly(other, GREEDY, 20)
    assert session.drafter.tokens == [*other[1:], *tokens_of(steps[:-1])[0]]


def fed(decoder: CachedDecoder, tokens: Sequence[int], gather: int) -> np.ndarray:
    (result,) = decoder.extend([decoder.causal(0, np.array(tokens), np.array([gather]))])
    return result.logits.row(0)


def scratched(
    decoder: CachedDecoder, tokens: list[int], positions: list[int], visible: list[list[bool]]
) -> np.ndarray:
    """Logits of the last token."""
    rows = DecoderRows(
        0, np.array(tokens), np.array(positions), np.array(visible), np.array([len(tokens) - 1])
    )
    return decoder.run([rows])[0].logits.row(0)


def test_scratch_rows_that_are_dropped_leave_no_trace() -> None:
    decoder = decoder_of(16)
    fed(decoder, PROMPT, 4)
    scratched(
        decoder,
        [7, 2, 3],
        [5, 6, 6],
        [[True, False, False], [True, True, False], [True, False, True]],
    )
    assert decoder.room(0) == 16 - 5 - 3
    decoder.drop_scratch(0)
    assert decoder.room(0) == 16 - 5
    np.testing.assert_array_equal(fed(decoder, [8], 0), logits_after(list(enumerate([*PROMPT, 8]))))


def test_later_scratch_rows_see_earlier_ones_where_told_and_not_beyond_the_window() -> None:
    """As a draft's tree grows: a second call behind the first one's scratch, with a window of
    three."""
    decoder = decoder_of(16, window=3)
    fed(decoder, [1, 2], 1)
    scratched(decoder, [3, 4], [2, 2], [[True, False], [False, True]])
    scratched(decoder, [5], [3], [[True, False, True]])
    logits = scratched(decoder, [6], [4], [[True, False, True, True]])
    np.testing.assert_array_equal(logits, logits_after([(2, 3), (3, 5), (4, 6)]))


# The comparison itself can see


def forget_depth(
    tree: DraftTree, logits: Logits, sampler: Sampler, before: Sequence[int]
) -> AcceptResult:
    return walk(tree, logits, sampler, before[1:])


def commit_without_moving(decoder: CachedDecoder, lane: int, path: np.ndarray) -> None:
    decoder.lanes[lane].length += len(path)
    decoder.drop_scratch(lane)


PLANTED = {
    "walk accepts one more": mock.patch.dict(ACCEPT_RULES, exact=rule_row(accept_one_more)),
    "walk draws at the wrong position": mock.patch.dict(ACCEPT_RULES, exact=rule_row(forget_depth)),
    "commit moves no rows": mock.patch.object(CachedDecoder, "commit", commit_without_moving),
    "tree mask is causal": mock.patch.object(
        DraftTree, "mask", property(lambda t: np.tri(len(t), dtype=bool))
    ),
    "tree positions are slots": mock.patch.object(
        DraftTree, "depths", property(lambda t: np.arange(len(t)))
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_caught_by_the_comparison_with_plain_decoding(name: str) -> None:
    sampler = Sampler(1.0, seed=5)
    with PLANTED[name]:
        steps, _ = drafted(0.8, sampler=sampler, max_new=40, plan=DraftPlan(3, 3, 14))
    assert tokens_of(steps)[0] != plainly(PROMPT, sampler, 40)[0]
