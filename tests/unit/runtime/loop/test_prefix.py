"""What is kept of a prefix is what its tokens say, no more and no less, for bases that can forget a
row and for those that cannot.

The model is `hash_model`'s; mixtures of sequences that reuse each other's prefixes are in
`test_batches`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from edgespec.prompts import STOP_WORDS
from edgespec.runtime.loop.prefix import Prefix, PrefixCache
from edgespec.runtime.loop.sequence import SequenceState
from edgespec.runtime.loop.session import Session
from edgespec.runtime.trees.tree import DraftPlan
from tests.lossless.drafters import ScriptedDrafter
from tests.unit.runtime.hash_model import GREEDY, VOCAB, HashRows, begin, decoder_of, plainly

PROMPT = [6, 1, 8, 0, 3]
PLAN = DraftPlan(1, 3, 4)  # with drafts that are all right: steps of four tokens
TRUTH = plainly(PROMPT, GREEDY, 60)[0]


@dataclass(eq=False)
class Stopping(SequenceState):
    """Ends at its `stop`th token, as at a stop string."""

    stop: int = 0

    def watch(self, token: int) -> str | None:
        return STOP_WORDS if self.num_emitted == self.stop else None


def session_of(*, recurrent: bool, scripts: Sequence[Sequence[int]] = (PROMPT,)) -> Session:
    told = [(prompt, plainly(prompt, GREEDY, 60)[0]) for prompt in scripts]
    base = decoder_of(64, recurrent=recurrent)
    return Session(base, ScriptedDrafter(told, VOCAB, 1), PrefixCache(10**6))


def run(session: Session, seq: SequenceState) -> list[int]:
    session.restart()
    begin(session, seq)
    while session.running:
        session.step()
    return seq.tokens[len(seq.prompt) :]


# The prompt and the first token come first, then a step commits four rows and emits four tokens.
LENGTH = len(PROMPT) + 4


@pytest.mark.parametrize(
    ("stop", "kept", "drafted"),
    [
        (5, LENGTH, True),  # all that was emitted is in the state but the last
        (4, LENGTH, False),  # all of it; the drafter did not see the last pair
        (3, None, False),  # the state has a token more
        (2, None, False),
    ],
)
def test_a_state_is_kept_only_where_it_is_that_of_its_tokens(
    stop: int, kept: int | None, drafted: bool
) -> None:
    session = session_of(recurrent=True)
    seq = Stopping(PROMPT, GREEDY, 30, plan=PLAN, keep_all=True, stop=stop)
    assert run(session, seq) == TRUTH[:stop]
    entries = session.prefixes.entries
    assert [len(entry.cache_key) for entry in entries] == ([] if kept is None else [kept])
    for entry in entries:
        assert entry.cache_key.tolist() == [*PROMPT, *TRUTH][:kept]
        assert len(entry.base) == kept
        assert (entry.draft is not None) == drafted


def test_a_state_ends_before_the_stop_token_that_ended_the_text() -> None:
    """It cannot be cut to that afterwards, so no row behind it is committed."""
    assert TRUTH[2] not in TRUTH[:2]
    session = session_of(recurrent=True)
    stop_ids = frozenset({TRUTH[2]})
    assert (
        run(session, SequenceState(PROMPT, GREEDY, 30, stop_ids, PLAN, keep_all=True)) == TRUTH[:3]
    )
    (entry,) = session.prefixes.entries
    assert entry.cache_key.tolist() == [*PROMPT, *TRUTH[:2]]
    assert entry.draft is not None
    assert len(entry.draft) >= len(entry.cache_key) - 1


@pytest.mark.parametrize(("stop", "plain", "drafting"), [(5, 9, 9), (4, 9, 0), (3, 0, 0)])
def test_the_next_turn_reuses_a_whole_state_and_what_follows_is_right(
    stop: int, plain: int, drafting: int
) -> None:
    following = [*PROMPT, *TRUTH[:stop], 3, 3]
    for plan, reused in ((None, plain), (PLAN, drafting)):
        session = session_of(recurrent=True, scripts=(PROMPT, following))
        run(session, Stopping(PROMPT, GREEDY, 30, plan=PLAN, keep_all=True, stop=stop))
        turn = SequenceState(following, GREEDY, 20, plan=plan)
        assert run(session, turn) == plainly(following, GREEDY, 20)[0]
        assert turn.num_reused == reused


def test_a_drafter_that_goes_on_is_given_the_pair_between_what_was_kept_and_what_follows() -> None:
    """Its snapshot ends with the last pair whose token was known; the hidden state for the next one
    was kept beside it."""
    following = [*PROMPT, *TRUTH[:5], 3, 3]
    session = session_of(recurrent=True, scripts=(PROMPT, following))
    run(session, Stopping(PROMPT, GREEDY, 30, plan=PLAN, keep_all=True, stop=5))
    turn = SequenceState(following, GREEDY, 20, plan=PLAN)
    path = [*following, *run(session, turn)]
    observed = session.drafter.tokens
    assert observed == path[1 : 1 + len(observed)]
    between = session.drafter.hidden_states[LENGTH - 1]
    assert between.tolist() == [LENGTH - 1, path[LENGTH - 1], LENGTH]


def test_a_state_without_its_drafters_memory_gives_way_to_one_with_it() -> None:
    following = [*PROMPT, *TRUTH[:4], 3, 3]
    session = session_of(recurrent=True, scripts=(PROMPT, following))
    run(session, Stopping(PROMPT, GREEDY, 30, plan=PLAN, keep_all=True, stop=4))
    reused = []
    for _ in range(2):
        turn = SequenceState(following, GREEDY, 9, plan=PLAN, keep=LENGTH)
        assert run(session, turn) == plainly(following, GREEDY, 9)[0]
        reused.append(turn.num_reused)
    assert reused == [0, LENGTH]


def test_a_cache_of_rows_keeps_what_the_text_has_of_a_step() -> None:
    for stop in (2, 3, 4, 5):
        session = session_of(recurrent=False)
        run(session, Stopping(PROMPT, GREEDY, 30, plan=PLAN, keep_all=True, stop=stop))
        (entry,) = session.prefixes.entries
        assert entry.cache_key.tolist() == [*PROMPT, *TRUTH][: min(LENGTH, len(PROMPT) + stop)]
        assert len(entry.base) == len(entry.cache_key)


def test_a_prompts_state_is_kept_where_it_was_asked_for_between_two_chunks() -> None:
    session = session_of(recurrent=True)
    for tail in ([0, 4], [3, 4], [7]):
        prompt = [*PROMPT, *tail]
        seq = SequenceState(prompt, GREEDY, 9, keep=len(PROMPT))
        assert run(session, seq) == plainly(prompt, GREEDY, 9)[0]
        assert seq.num_reused == (0 if tail == [0, 4] else len(PROMPT))
    assert len(session.prefixes.entries) == 1


# Entries

DRAFTER, ANOTHER = ScriptedDrafter([], VOCAB, 0), ScriptedDrafter([], VOCAB, 0)


def entry(tokens: Sequence[int], draft: int | None = None, *, croppable: bool = True) -> Prefix:
    rows = HashRows(tuple(enumerate(tokens)), croppable)
    drafted = None if draft is None else HashRows(tuple(enumerate(tokens[:draft])))
    state = np.zeros(1, np.float32) if not croppable else None
    return Prefix(np.array(tokens), rows, drafted, state, croppable, DRAFTER)


ONE_TO_FIVE = [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("kept", "prompt", "plain", "drafting"),
    [
        (entry(ONE_TO_FIVE, 4), [1, 2, 3, 9], 3, 2),
        (entry(ONE_TO_FIVE, 4), [1, 2, 3, 4, 5, 6], 5, 4),
        (entry(ONE_TO_FIVE, 4), ONE_TO_FIVE, 4, 4),
        (entry(ONE_TO_FIVE, 2), [1, 2, 3, 4, 5, 6], 5, 2),
        (entry(ONE_TO_FIVE), [1, 2, 3, 4, 5, 6], 5, 0),
        (entry(ONE_TO_FIVE, 4), [9, 2, 3], 0, 0),
        (entry(ONE_TO_FIVE, 4), [1], 0, 0),
        (entry(ONE_TO_FIVE, 4, croppable=False), [1, 2, 3, 4, 5, 6], 5, 5),
        (entry(ONE_TO_FIVE, 3, croppable=False), [1, 2, 3, 4, 5, 6], 5, 0),
        (entry(ONE_TO_FIVE, croppable=False), [1, 2, 3, 4, 5, 6], 5, 0),
        (entry(ONE_TO_FIVE, 4, croppable=False), [1, 2, 3, 4, 9, 6], 0, 0),
        (entry(ONE_TO_FIVE, 4, croppable=False), ONE_TO_FIVE, 0, 0),
    ],
)
def test_a_prompt_reuses_what_it_shares_but_its_last_token(
    kept: Prefix, prompt: list[int], plain: int, drafting: int
) -> None:
    assert kept.reusable(np.array(prompt), None) == plain
    assert kept.reusable(np.array(prompt), DRAFTER) == drafting
    assert kept.reusable(np.array(prompt), ANOTHER) == 0


def test_the_longest_is_found_and_is_the_last_to_go() -> None:
    cache = PrefixCache(8 * 9)
    for tokens in ([1, 2], [1, 2, 3], [5, 5, 5, 5]):
        cache.keep(entry(tokens))
    assert [e.cache_key.tolist() for e in cache.entries] == [[1, 2, 3], [5, 5, 5, 5]]
    found = cache.find([1, 2, 3, 4], None)
    assert found is not None
    assert (found[0].cache_key.tolist(), found[1]) == ([1, 2, 3], 3)
    cache.keep(entry([7, 7, 7]))  # 7 tokens are there, 9 fit
    assert [e.cache_key.tolist() for e in cache.entries] == [[1, 2, 3], [7, 7, 7]]


def test_what_a_new_entry_serves_goes_and_nothing_else() -> None:
    cache = PrefixCache(10**6)
    cache.keep(entry([1, 2, 3], 2))
    cache.keep(entry([1, 2, 3, 4]))
    assert len(cache.entries) == 2  # a plain one serves no drafting request
    cache.keep(entry([1, 2, 3, 4, 5], 4))
    assert [len(e.cache_key) for e in cache.entries] == [5]
    cache.keep(entry([1, 2], 1, croppable=False))
    cache.keep(entry([1, 2, 3], 2, croppable=False))
    assert [len(e.cache_key) for e in cache.entries] == [5, 2, 3]  # a state serves itself alone


def test_what_one_drafter_remembers_goes_on_beside_what_another_does() -> None:
    cache = PrefixCache(10**6)
    for drafter in (DRAFTER, ANOTHER):
        cache.keep(replace(entry([1, 2, 3, 4], 3), drafter=drafter))
    assert len(cache.entries) == 2
    for drafter in (DRAFTER, ANOTHER):
        found = cache.find([1, 2, 3, 4, 5], drafter)
        assert found is not None
        assert found[0].drafter is drafter
    cache.keep(replace(entry([1, 2, 3, 4, 5], 4), drafter=ANOTHER))
    assert [e.drafter is DRAFTER for e in cache.entries] == [True, False]


def test_an_entry_larger_than_the_budget_drives_nothing_out() -> None:
    cache = PrefixCache(8 * 4)
    cache.keep(entry([1, 2, 3, 4]))
    cache.keep(entry([5, 6, 7, 8, 9]))
    assert [e.cache_key.tolist() for e in cache.entries] == [[1, 2, 3, 4]]
