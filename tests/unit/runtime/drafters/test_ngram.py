"""The n-gram pool: its proposals are those of a pool written from the definition, with every
option, for one sequence and for several that share a pool.

`Definition` has the rules of TensorRT-LLM's pool class, also where they differ from what it
documents: lists that are read from end to end, and nothing else.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import OptionError
from edgespec.runtime.drafters import ngram
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.ngram import NgramDrafter, NgramOptions, Pool, Tokens
from edgespec.runtime.trees.tree import DraftPlan

SWITCHES = list(product([True, False], repeat=3))
texts = st.integers(2, 5).flatmap(
    lambda letters: st.lists(st.integers(0, letters - 1), min_size=1, max_size=60)
)


@dataclass
class Definition:
    """Patterns, each with a list of its matches in the order in which they were added.

    What a request adds again goes back as far as a match of full length behind the longest pattern
    may begin. `num_spared` counts the shorter matches that stayed where a longer one was added.
    """

    options: NgramOptions
    public: dict[Tokens, list[Tokens]] = field(default_factory=dict)
    pools: dict[object, dict[Tokens, list[Tokens]]] = field(default_factory=dict)
    seen: dict[object, int] = field(default_factory=dict)
    num_spared: int = 0

    def proposal(self, prefix: list[int], request: object, room: int) -> list[int]:
        if room <= 0:
            return []
        options, pool = self.options, self.pool(request)
        window = prefix[self.seen.get(request, 0) :]
        largest = min(options.max_matching_ngram_size, len(prefix) - 1)
        for size in range(largest, 0, -1):
            for first in range(len(window)):
                behind = window[first + size : first + size + options.max_draft_len]
                if behind:
                    matches = pool.setdefault(tuple(window[first : first + size]), [])
                    self.keep(matches, tuple(behind))
        self.seen[request] = max(
            0, len(prefix) - options.max_draft_len - options.max_matching_ngram_size + 1
        )
        for size in range(largest, 0, -1):
            if matches := pool.get(tuple(prefix[-size:]), []):
                return list(matches[0 if options.is_use_oldest else -1][:room])
        return []

    def pool(self, request: object) -> dict[Tokens, list[Tokens]]:
        return self.public if self.options.is_public_pool else self.pools.setdefault(request, {})

    def keep(self, matches: list[Tokens], match: Tokens) -> None:
        if match in matches:
            return
        if matches and not self.options.is_keep_all and len(matches[0]) < len(match):
            matches.clear()
        at = 0
        while at < len(matches):
            if len(matches[at]) < len(match):
                matches.pop(at)  # the next one is now at this place, and is not looked at
            at += 1
        self.num_spared += sum(len(other) < len(match) for other in matches)
        matches.append(match)


def options_of(switches: tuple[bool, bool, bool], draft: int, size: int) -> NgramOptions:
    keep_all, oldest, public = switches
    return NgramOptions(
        max_draft_len=draft,
        max_matching_ngram_size=size,
        is_keep_all=keep_all,
        is_use_oldest=oldest,
        is_public_pool=public,
    )


class Running:
    """Sequences in lanes of a drafter, each known beforehand: `step` proposes for a lane and takes
    in the next tokens."""

    def __init__(self, options: NgramOptions) -> None:
        self.drafter, self.options = NgramDrafter(options), options
        self.at: dict[int, int] = {}

    def begin(self, lane: int, text: Sequence[int], prompt: int) -> None:
        self.drafter.reset(lane)
        self.drafter.begin(lane, text[:prompt], 0)
        self.at[lane] = prompt

    def propose(self, lane: int, text: Sequence[int], plan: DraftPlan) -> list[int]:
        request = DraftRequest(lane, text[self.at[lane] - 1], plan)
        (tree,) = self.drafter.propose([request])
        assert tree.tokens[0] == request.pending
        assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
        return [int(token) for token in tree.tokens[1:]]

    def take(self, lane: int, text: Sequence[int], count: int) -> None:
        new = text[self.at[lane] : self.at[lane] + count]
        self.drafter.observe([Observation(lane, None, np.array(new, np.int64))])
        self.at[lane] += len(new)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(texts, min_size=1, max_size=4),
    switches=st.sampled_from(SWITCHES),
    draft=st.integers(1, 6),
    size=st.integers(1, 4),
    strides=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    prompt=st.integers(1, 30),
)
def test_proposals_are_those_of_the_definition(
    requests: list[list[int]],
    switches: tuple[bool, bool, bool],
    draft: int,
    size: int,
    strides: list[int],
    prompt: int,
) -> None:
    """Requests one after the other in a lane, of which each step takes in one token or several."""
    options = options_of(switches, draft, size)
    running, definition = Running(options), Definition(options)
    for number, text in enumerate(requests):
        running.begin(0, text, min(prompt, len(text)))
        for stride in [*strides * len(text)]:
            at = running.at[0]
            room = len(text) - at
            expected = definition.proposal(text[:at], number, room)
            plan = DraftPlan(1, draft, draft + 1).within(levels=room, nodes=99)
            assert running.propose(0, text, plan) == expected
            if not room:
                break
            running.take(0, text, stride)


@settings(max_examples=60, deadline=None)
@given(
    lanes=st.lists(texts, min_size=2, max_size=3),
    switches=st.sampled_from(SWITCHES),
)
def test_side_by_side_and_moved_between_lanes_too(
    lanes: list[list[int]], switches: tuple[bool, bool, bool]
) -> None:
    options = options_of(switches, 4, 3)
    running, definition = Running(options), Definition(options)
    place = list(range(len(lanes)))
    for lane, text in enumerate(lanes):
        running.begin(lane, text, 1)
    for step in range(60):
        for number, text in enumerate(lanes):
            room = len(text) - running.at[place[number]]
            expected = definition.proposal(text[: len(text) - room], number, room)
            plan = DraftPlan(1, 4, 5).within(levels=room, nodes=99)
            assert running.propose(place[number], text, plan) == expected
            running.take(place[number], text, 1 + (step + number) % 2)
        if step % 3 == 0:  # into a lane that none has
            free = max(place) + 1
            running.drafter.move(place[0], free)
            running.at[free] = running.at.pop(place[0])
            place[0] = free


@pytest.mark.parametrize("switches", SWITCHES)
def test_pools_are_those_of_the_definition(switches: tuple[bool, bool, bool]) -> None:
    """Many random requests, three at a time, of which some end where a pattern has several short
    matches: those of one pattern are the same, in the same order."""
    num_proposals = num_spared = num_several = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        letters, draft, size = (int(rng.integers(low, 7)) for low in (2, 2, 1))
        options = options_of(switches, draft, size)
        running, definition = Running(options), Definition(options)
        texts, number = dict[int, list[int]](), dict[int, int]()
        for step in range(25):
            for lane in range(3):
                if lane not in texts or running.at[lane] == len(texts[lane]):
                    texts[lane] = rng.integers(0, letters, int(rng.integers(3, 30))).tolist()
                    number[lane] = 3 * step + lane
                    running.begin(lane, texts[lane], int(rng.integers(1, len(texts[lane]))))
                text, at = texts[lane], running.at[lane]
                room = len(text) - at
                expected = definition.proposal(text[:at], number[lane], room)
                plan = DraftPlan(1, draft, draft + 1).within(levels=room, nodes=99)
                assert running.propose(lane, text, plan) == expected
                pool = running.drafter.lanes[lane].pool
                kept = {pattern: list(matches) for pattern, matches in pool.matches.items()}
                assert kept == definition.pool(number[lane])
                assert pool.num_matches == sum(map(len, kept.values()))
                num_several += any(len(matches) > 1 for matches in kept.values())
                num_proposals += 1
                running.take(lane, text, int(rng.integers(1, draft + 1)))
        num_spared += definition.num_spared
    assert (num_proposals, num_several > 500, num_spared > 100) == (900, True, True)


@pytest.mark.parametrize(
    ("added", "left", "left_of_one"),
    [
        ("12 2 567", "2 567", "567"),
        ("12 2 567 7 888", "567 888", "567 888"),
        ("1 2 3 45", "2 45", "45"),
        ("23 1 4 56", "23 4 56", "23 4 56"),
        ("23 1 4 56 789", "4 789", "789"),
    ],
)
def test_of_shorter_matches_side_by_side_every_other_one_stays(
    added: str, left: str, left_of_one: str
) -> None:
    """By hand, a digit a token. With is_keep_all False one that is longer than the first replaces
    all, and others are added."""

    def kept(keep_all: bool) -> str:
        pool = Pool(NgramOptions(max_draft_len=3, is_keep_all=keep_all))
        for match in added.split():
            pool.add((0,), tuple(map(int, match)))
        assert pool.num_matches == len(pool.matches[(0,)])
        return " ".join("".join(map(str, match)) for match in pool.matches[(0,)])

    assert (kept(True), kept(False)) == (left, left_of_one)


def test_each_option_tells() -> None:
    """On a text where the ways to choose differ, by hand."""
    #       0  1  2  3  4  5  6  7  8  9
    text = [1, 2, 5, 1, 2, 6, 7, 1, 2]

    def proposal(**values: bool | int) -> list[int]:
        running = Running(NgramOptions(max_draft_len=3, **values))
        running.begin(0, text, len(text))
        return running.propose(0, text, DraftPlan(1, 3, 4))

    assert proposal() == [5, 1, 2]
    assert proposal(is_use_oldest=False) == [6, 7, 1]
    assert proposal(is_keep_all=False) == [5, 1, 2]
    assert proposal(is_keep_all=False, is_use_oldest=False) == [6, 7, 1]
    assert proposal(max_matching_ngram_size=1) == [5, 1, 2]


@pytest.mark.parametrize(
    ("keep_all", "oldest", "expected"),
    [(True, True, [2]), (True, False, [5, 6, 7]), (False, True, [5, 6, 7])],
)
def test_short_match_that_stays_is_the_oldest(
    keep_all: bool, oldest: bool, expected: list[int]
) -> None:
    """The first request ends behind two short matches of 1, and the second adds a longer one."""
    options = options_of((keep_all, oldest, True), 3, 1)
    running, first, second = Running(options), [1, 1, 2], [1, 5, 6, 7, 1]
    running.begin(0, first, len(first))
    assert running.propose(0, first, DraftPlan(1, 3, 4)) == []
    running.begin(0, second, len(second))
    assert running.propose(0, second, DraftPlan(1, 3, 4)) == expected


def test_longer_pattern_goes_before_a_shorter_one() -> None:
    text = [3, 2, 9, 9, 9, 1, 2, 4, 4, 4, 1, 2]
    for size, expected in ((1, [9, 9, 9]), (2, [4, 4, 4])):
        running = Running(NgramOptions(max_draft_len=3, max_matching_ngram_size=size))
        running.begin(0, text, len(text))
        assert running.propose(0, text, DraftPlan(1, 3, 4)) == expected


@pytest.mark.parametrize("public", [True, False])
def test_public_pool_outlives_its_requests(public: bool) -> None:
    running = Running(NgramOptions(max_draft_len=2, is_public_pool=public))
    first, second = [1, 2, 3, 4, 5], [9, 1, 2]
    running.begin(0, first, len(first))
    running.propose(0, first, DraftPlan(1, 2, 3))
    running.begin(0, second, len(second))
    assert running.propose(0, second, DraftPlan(1, 2, 3)) == ([3, 4] if public else [])


def test_pool_that_forgets_is_empty() -> None:
    running, text = Running(NgramOptions(max_draft_len=2)), [1, 2, 3, 4, 5]
    running.begin(0, text, len(text))
    running.propose(0, text, DraftPlan(1, 2, 3))
    running.drafter.forget()
    running.begin(0, [9, 1, 2], 3)
    assert running.propose(0, [9, 1, 2], DraftPlan(1, 2, 3)) == []


def test_proposal_stays_within_the_plan() -> None:
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    running = Running(NgramOptions(max_draft_len=4))
    running.begin(0, text, len(text))
    assert running.propose(0, text, DraftPlan(1, 4, 5)) == [3, 4, 5, 6]
    assert running.propose(0, text, DraftPlan(1, 2, 3)) == [3, 4]
    assert running.propose(0, text, DraftPlan(1, 4, 3)) == [3, 4]
    assert running.propose(0, text, DraftPlan(1, 0, 1)) == []


@settings(max_examples=50, deadline=None)
@given(
    text=st.lists(st.integers(0, 3), min_size=40, max_size=120), switches=st.sampled_from(SWITCHES)
)
def test_pool_keeps_its_bound(text: list[int], switches: tuple[bool, bool, bool]) -> None:
    """The oldest patterns go; what is left is what the counter says."""
    pool = Pool(options_of(switches, 4, 3), max_bytes=20 * (360 + 8 * 7))
    start = 0
    for end in range(2, len(text) + 1):
        pool.update(text[:end], start)
        start = max(0, end - 6)
        assert sum(map(len, pool.matches.values())) == pool.num_matches <= 20
        assert list(pool.patterns) == list(pool.matches)
        for pattern, matches in pool.short.items():
            assert [*matches] == [match for match in pool.matches[pattern] if len(match) < 4] != []
        short = [p for p, matches in pool.matches.items() if any(len(m) < 4 for m in matches)]
        assert sorted(short) == sorted(pool.short)
    assert pool.find(text[:1]) == ()


def test_oldest_patterns_go_from_a_pool_that_is_full() -> None:
    """The end of a text, whose match is still short, is newer than its beginning, and older than
    the next text."""
    options = NgramOptions(max_draft_len=2, max_matching_ngram_size=1)
    pool = Pool(options, max_bytes=3 * (360 + 8 * 3))
    pool.update([1, 2, 3, 4, 5, 6], 0)
    found = [pool.find([9, token]) for token in (1, 2, 3, 4, 5)]
    assert found == [(), (), (4, 5), (5, 6), (6,)]
    pool.update([7, 8, 9, 6], 0)
    found = [pool.find([0, token]) for token in (4, 5, 7, 8, 9)]
    assert found == [(), (), (8, 9), (9, 6), (6,)]


@pytest.mark.parametrize(("draft", "size"), [(3, 2), (64, 8), (1024, 2)])
def test_bound_of_a_pool_is_one_of_memory(draft: int, size: int) -> None:
    """However long matches are: what a pool of few bytes holds is of that size."""
    options = NgramOptions(max_draft_len=draft, max_matching_ngram_size=size)
    drafter = NgramDrafter(options)
    most = Pool(options).max_matches
    assert drafter.public.max_matches == most
    assert most * (size + draft) * np.dtype(np.int64).itemsize < ngram.MAX_BYTES
    assert most > 0.9 * ngram.MAX_BYTES / (360 + 8 * (size + draft))
    text = np.random.default_rng(0).integers(0, 50000, 3000).tolist()
    tracemalloc.start()
    pool = Pool(options, 300_000)
    pool.update(text, 0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 20 < pool.num_matches <= pool.max_matches
    assert held < 450_000


@pytest.mark.parametrize(
    ("key", "value"), [("max_draft_len", 0), ("max_matching_ngram_size", 65), ("is_keep_all", 1)]
)
def test_other_values_are_refused_by_their_key(key: str, value: object) -> None:
    with pytest.raises(OptionError, match=key):
        NgramOptions(**{key: value})
