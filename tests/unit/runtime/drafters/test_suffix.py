"""Suffix drafts: they follow what stood in the text before, by its counts, as far as they pay, and
cost nothing where nothing repeats.

What may be drafted is looked up in the text itself, from end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edgespec.errors import OptionError
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.suffix import AnswerPool, SuffixDrafter, SuffixOptions
from edgespec.runtime.drafters.suffix_confidence import (
    COUNTS,
    PRIOR,
    SIZES,
    Confidence,
    Pace,
    class_of,
)
from edgespec.runtime.trees.tree import DraftPlan, DraftTree

ALL = SuffixOptions(min_token_prob=0.0)  # drafts whatever it finds
PLAN = DraftPlan(3, 6, 12)
texts = st.integers(2, 5).flatmap(
    lambda letters: st.lists(st.integers(0, letters - 1), min_size=2, max_size=60)
)


class Running:
    """One sequence in a drafter: the text is known beforehand."""

    def __init__(self, drafter: SuffixDrafter, text: Sequence[int], prompt: int, lane: int = 0):
        self.drafter, self.text, self.lane, self.at = drafter, [*text], lane, prompt
        drafter.reset(lane)
        drafter.begin(lane, self.text[:prompt], 0)
        self.take(1)

    def take(self, count: int) -> None:
        new = self.text[self.at : self.at + count]
        if new:
            self.drafter.observe([Observation(self.lane, None, np.array(new, np.int64))])
        self.at += len(new)

    def propose(self, plan: DraftPlan = PLAN) -> DraftTree:
        (tree,) = self.drafter.propose([DraftRequest(self.lane, self.text[self.at - 1], plan)])
        return tree

    @property
    def ended(self) -> bool:
        return self.at >= len(self.text)


def drafter_of(options: SuffixOptions = ALL, row_cost: float = 0.1) -> SuffixDrafter:
    return SuffixDrafter(options, row_cost)


def occurs(text: Sequence[int], part: Sequence[int]) -> bool:
    return any([*text[i : i + len(part)]] == [*part] for i in range(len(text) - len(part) + 1))


def longest_repeated(text: Sequence[int], most: int) -> int:
    sizes = range(1, min(most, len(text) - 1) + 1)
    return max((n for n in sizes if occurs(text[:-1], text[-n:])), default=0)


def path_of(tree: DraftTree, node: int) -> list[int]:
    path: list[int] = []
    while node > 0:
        path.insert(0, int(tree.tokens[node]))
        node = int(tree.parents[node])
    return path


def followed(text: Sequence[int], context: Sequence[int]) -> list[int]:
    """The tokens that stood behind a context, which is not empty."""
    size = len(context)
    ends = range(size, len(text) if size else 0)
    return [text[e] for e in ends if [*text[e - size : e]] == [*context]]


def share(text: Sequence[int], context: Sequence[int], token: int) -> float:
    """How often a token followed a context, over how often anything did."""
    behind = followed(text, context)
    return behind.count(token) / len(behind)


def support(text: Sequence[int], context: Sequence[int]) -> tuple[int, int]:
    """The length of a context, and how often anything followed it."""
    return len(context), len(followed(text, context))


def context_of(text: list[int], size: int, path: list[int], most: int) -> list[int]:
    """What decides how a path goes on that began behind the last `size` tokens: its longest end
    that anything followed, of at most `most` tokens."""
    context = (text[len(text) - size :] + path)[-most:]
    while context and not followed(text, context):
        del context[0]
    return context


@settings(max_examples=150, deadline=None)
@given(text=texts, prompt=st.integers(1, 30), stride=st.integers(1, 4), most=st.integers(1, 8))
def test_drafts_follow_the_longest_earlier_occurrence(
    text: list[int], prompt: int, stride: int, most: int
) -> None:
    """Every path stood in the text behind the longest repeated end, or behind its last `most`
    tokens; siblings differ, and the plan holds."""
    options = SuffixOptions(min_token_prob=0.0, max_matching_ngram_size=most)
    running = Running(drafter_of(options), text, min(prompt, len(text) - 1))
    while not running.ended:
        tree, before = running.propose(), text[: running.at]
        size = longest_repeated(before, most)
        assert (len(tree) > 1) == (size > 0)
        assert len(tree) <= PLAN.verify_size
        assert tree.depths.max() <= PLAN.steps
        assert all(tree.parents[node] < node for node in range(1, len(tree)))
        for node in range(len(tree)):
            children = tree.tokens[tree.parents == node].tolist()
            assert len(children) == len(set(children)) <= PLAN.top_k
        for node in range(1, len(tree)):
            *path, token = path_of(tree, node)
            assert occurs(before, [*context_of(before, size, path, most), token])
        running.take(stride)


@settings(max_examples=100, deadline=None)
@given(text=texts, least=st.floats(0.05, 0.9))
def test_drafts_are_those_whose_probability_by_counts_is_enough(
    text: list[int], least: float
) -> None:
    """Along each path the shares of the counts multiply, times how far matches of that length are
    trusted; all that reach `least`, and no others, are drafted."""
    most, plan = 8, DraftPlan(50, 3, 500)
    drafter = drafter_of(SuffixOptions(min_token_prob=least, max_matching_ngram_size=most))
    running = Running(drafter, text[:-1], max(1, len(text) // 2))
    before, trust = text[: running.at], drafter.lanes[0].confidence.trust

    def probabilities(path: list[int], above: float) -> dict[tuple[int, ...], float]:
        context = context_of(before, size, path, most)
        found: dict[tuple[int, ...], float] = {}
        for token in set(followed(before, context)) if len(path) < plan.steps else ():
            found[*path, token] = (
                above * trust(*support(before, context)) * share(before, context, token)
            )
            found |= probabilities([*path, token], found[*path, token])
        return found

    size = longest_repeated(before, most)
    expected = probabilities([], 1.0) if size else {}
    assume(all(abs(probability - least) > 1e-9 for probability in expected.values()))
    tree = running.propose(plan)
    drafted = [tuple(path_of(tree, node)) for node in range(1, len(tree))]
    assert sorted(drafted) == sorted(path for path, p in expected.items() if p >= least)


def test_most_probable_drafts_fill_a_small_plan() -> None:
    """Two ways on: the more frequent one gets the nodes; of equals the later one."""
    text = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 5, 1, 2, 0]
    running = Running(drafter_of(), text, len(text) - 2)
    tree = running.propose(DraftPlan(1, 3, 4))
    assert tree.tokens.tolist() == [2, 3, 8, 1]
    tree = running.propose(DraftPlan(2, 2, 4))
    assert path_of(tree, 1) == [3]
    assert {tuple(path_of(tree, node)) for node in (2, 3)} == {(4,), (3, 8)}


def test_tree_where_continuations_differ_chain_where_they_agree() -> None:
    agreeing = [7, 1, 2, 3, 4, 5, 6, 7, 8]
    running = Running(drafter_of(), [*agreeing, 1, 2, 0], len(agreeing) + 1)
    tree = running.propose()
    assert tree.tokens.tolist()[1:7] == [3, 4, 5, 6, 7, 8]
    assert tree.parents.tolist()[:7] == [-1, 0, 1, 2, 3, 4, 5]
    differing = [1, 2, 3, 8, 1, 2, 4, 9]
    running = Running(drafter_of(), [*differing, 1, 2, 0], len(differing) + 1)
    tree = running.propose()
    assert sorted(tree.tokens[tree.parents == 0].tolist()) == [3, 4]


@pytest.mark.parametrize(("ways", "drafts"), [(64, True), (65, False)])
def test_token_that_everything_follows_predicts_nothing(ways: int, drafts: bool) -> None:
    text = [token for way in range(ways) for token in (0, 100 + way)]
    running = Running(drafter_of(), [*text, 0], len(text))
    assert (len(running.propose()) > 1) == drafts


def test_nothing_is_drafted_where_nothing_repeats() -> None:
    running = Running(drafter_of(), range(200), 100)
    while not running.ended:
        assert len(running.propose()) == 1
        running.take(1)


def test_plan_without_levels_or_rows_drafts_nothing() -> None:
    running = Running(drafter_of(), [1, 2, 1, 2, 1, 2], 4)
    assert len(running.propose(DraftPlan(3, 0, 12))) == 1
    assert len(running.propose(DraftPlan(3, 6, 1))) == 1
    assert len(running.propose(DraftPlan(3, 6, 2))) == 2


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(texts, min_size=2, max_size=4), options=st.sampled_from([ALL, SuffixOptions()])
)
def test_next_turn_drafts_as_one_that_begins_anew(
    turns: list[list[int]], options: SuffixOptions
) -> None:
    """The prompt of a turn is the text so far; the index of the turn before goes on, in whatever
    lane, and drafts are those of an index made of the whole prompt."""
    kept, text = drafter_of(options), list[int]()
    for turn, answer in enumerate(turns):
        text = text + answer
        prompt = max(1, len(text) - len(answer) // 2)
        running = Running(kept, text, prompt, lane=turn % 2)
        fresh = Running(drafter_of(options), text, prompt)
        while not running.ended:
            first, second = running.propose(), fresh.propose()
            assert first.tokens.tolist() == second.tokens.tolist()
            assert first.parents.tolist() == second.parents.tolist()
            running.take(2), fresh.take(2)
        kept.reset(turn % 2)


def test_index_of_a_turn_goes_on_in_the_next_one() -> None:
    drafter = drafter_of()
    text = Running(drafter, [1, 2, 3, 4], 2).drafter.lanes[0].text
    drafter.reset(0)
    drafter.begin(1, [1, 2, 3, 9, 9], 3)
    assert drafter.lanes[1].text is text
    assert text.text == [1, 2, 3, 9, 9]
    drafter.reset(1)
    drafter.begin(1, [1, 2, 3, 8], 3)
    assert drafter.lanes[1].text is not text
    assert len(drafter.lanes) == 1


def test_text_of_a_sequence_that_runs_is_left_to_it() -> None:
    """A second request begins with all that the first one has said so far."""
    drafter, text = drafter_of(), [1, 2, 3, 1, 2]
    first = Running(drafter, [*text, 3, 4], 4)
    second = Running(drafter, [*text, 5, 6], 5, lane=1)
    first.take(1)
    assert drafter.lanes[0].text.text == [*text, 3]
    assert drafter.lanes[1].text.text == [*text, 5]
    assert first.propose(DraftPlan(1, 1, 2)).tokens.tolist() == [3, 1]
    assert len(second.propose()) == 1


@settings(max_examples=60, deadline=None)
@given(lanes=st.lists(texts, min_size=2, max_size=3))
def test_lanes_do_not_see_each_other_wherever_they_move(lanes: list[list[int]]) -> None:
    drafter = drafter_of()
    beside = [Running(drafter, text, 1, lane) for lane, text in enumerate(lanes)]
    alone = [Running(drafter_of(), text, 1) for text in lanes]
    free = len(lanes)
    while not all(one.ended for one in alone):
        for first, second in zip(beside, alone, strict=True):
            assert first.propose().tokens.tolist() == second.propose().tokens.tolist()
            first.take(1), second.take(1)
        drafter.move(beside[0].lane, free)
        beside[0].lane, free = free, beside[0].lane


# ---- earlier answers


POOLED = replace(ALL, enable_global_pool=True)


def test_earlier_answers_are_drafted_from_only_where_asked() -> None:
    answer = [5, 6, 7, 8, 9]
    for options, expected in ((ALL, [6]), (POOLED, [6, 7, 8, 9])):
        drafter = drafter_of(options)
        Running(drafter, [1, *answer, 3], 1).take(9)
        running = Running(drafter, [2, 5, 6, 7], 2)
        assert running.propose(DraftPlan(1, 4, 5)).tokens.tolist()[: len(expected)] == expected
        assert (len(running.propose()) > 1) == (options is POOLED)


def test_drafter_that_forgets_knows_no_answer() -> None:
    """Not even that of a sequence that ended and whose lane nobody took."""
    drafter = drafter_of(POOLED)
    for lane in (0, 1):
        Running(drafter, [1, 5, 6, 7, 8], 1, lane).take(9)
    drafter.forget()
    running = Running(drafter, [2, 5, 6, 7], 2)
    assert len(running.propose()) == 1


def test_prompts_are_not_in_the_pool() -> None:
    drafter = drafter_of(POOLED)
    Running(drafter, [5, 6, 7, 8, 1, 2, 3], 5).take(9)
    running = Running(drafter, [9, 5, 6, 7], 2)
    assert len(running.propose()) == 1


def test_longer_match_of_the_two_is_drafted() -> None:
    drafter = drafter_of(POOLED)
    Running(drafter, [0, 4, 5, 6, 7, 7], 1).take(9)
    running = Running(drafter, [6, 3, 9, 4, 5, 6], 5)
    assert running.propose(DraftPlan(1, 1, 2)).tokens.tolist() == [6, 7]
    running = Running(drafter, [4, 5, 6, 3, 9, 4, 5, 6], 7)
    assert running.propose(DraftPlan(1, 1, 2)).tokens.tolist() == [6, 3]


@settings(max_examples=60, deadline=None)
@given(
    answers=st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=30),
    most=st.integers(2, 60),
)
def test_pool_keeps_its_bound_and_the_newest(answers: list[list[int]], most: int) -> None:
    pool = AnswerPool(most, 8)
    for answer in answers:
        pool.add(answer)
        assert len(pool) <= most
        newest = answer[-(most // 2 - 1) :] if most // 2 > 1 else []
        assert occurs(pool.young.text, newest)


@settings(max_examples=40, deadline=None)
@given(answers=st.lists(texts, min_size=2, max_size=6), size=st.integers(8, 60))
def test_drafts_from_the_pool_stood_in_an_answer(answers: list[list[int]], size: int) -> None:
    """Also while answers come in between, and the pool drops the old ones."""
    options = replace(POOLED, global_pool_tokens=size, max_matching_ngram_size=6)
    drafter, finished = drafter_of(options), list[list[int]]()
    for number, answer in enumerate(answers):
        running = Running(drafter, [99, *answer], 1, lane=number % 2)
        while not running.ended:
            tree = running.propose()
            texts_now = [running.text[: running.at], *finished]
            for node in range(1, len(tree)):
                pair = [running.text[running.at - 1], *path_of(tree, node)][-2:]
                assert any(occurs(known, pair) for known in texts_now)
            running.take(1)
        drafter.reset(number % 2)
        finished.append(answer)


# ---- what pays


def test_classes_of_matches() -> None:
    sizes, counts = (1, 2, 3, 4, 5, 6, 8, 9, 24, 1000), (1, 2, 3, 4, 99)
    assert [class_of(size, 1) // 3 for size in sizes] == [0, 1, 2, 3, 3, 4, 4, 5, 7, 7]
    assert [class_of(1, count) for count in counts] == [0, 1, 1, 2, 2]
    assert class_of(1000, 1000) == len(PRIOR) - 1 == len(SIZES) * len(COUNTS) - 1


def test_longer_and_more_frequent_matches_are_trusted_more() -> None:
    trust = np.array([Confidence().trust(size, n) for size in SIZES for n in COUNTS])
    table = trust.reshape(len(SIZES), len(COUNTS))
    assert (np.diff(table, axis=0) > 0).all()
    assert (np.diff(table, axis=1) > 0).all()


def test_confidence_is_learnt_from_hits() -> None:
    confidence = Confidence()
    before = confidence.trust(5, 1)
    for _ in range(200):
        confidence.learn(5, 1, 1.0, hit=False)
    assert confidence.trust(5, 1) < 0.1 < before
    assert confidence.trust(5, 2) == pytest.approx(0.8)
    for _ in range(300):
        confidence.learn(5, 1, 0.5, hit=True)  # oftener than its share says
    assert confidence.trust(5, 1) == 1.0


def test_misleading_repetitions_end_drafts_and_good_ones_bring_them_back() -> None:
    """A text whose matches never come true again, then one that copies itself."""
    rng = np.random.default_rng(0)
    pairs = [token for i in range(150) for token in (1000, 2000 + i)]
    copied = rng.permutation(500).tolist() * 2
    options = SuffixOptions()
    running = Running(drafter_of(options), [*pairs, *copied], 4)
    sizes = []
    while not running.ended:
        sizes.append(len(running.propose()))
        running.take(1)
    assert sum(sizes[200:280]) == 80
    assert min(sizes[-300:-50]) > 3


def test_dear_rows_are_drafted_seldom() -> None:
    text = np.random.default_rng(1).integers(0, 8, 400).tolist()
    drafted = []
    for row_cost in (0.02, 0.2, 0.9):
        running = Running(drafter_of(SuffixOptions(), row_cost), text, 100)
        drafted.append(0)
        while not running.ended:
            drafted[-1] += len(running.propose()) - 1
            running.take(1)
    assert drafted[0] > drafted[1] > drafted[2] == 0


def test_row_pays_from_the_average_of_the_batch_on() -> None:
    """Renewal-reward: a row that costs a tenth of a plain step must bring more than the sequences
    would get in that time."""
    pace = Pace(row_cost=0.1)
    assert pace.rate == 1
    assert pace.least_probability(1) == pytest.approx(0.1)
    assert pace.least_probability(4) == pytest.approx(0.1 * 4 / 1.3)
    for _ in range(400):
        pace.add(tokens=4, rows=6)
    assert pace.rate == pytest.approx(4 / 1.5, rel=0.01)
    assert pace.least_probability(1) == pytest.approx(0.1 * 4 / 1.5, rel=0.01)


def test_step_that_was_not_asked_for_drafts_costs_one_row() -> None:
    """As while too many sequences run: the tree before it was verified once."""
    text = [1, 2, 3, 4] * 20
    running = Running(drafter_of(SuffixOptions()), text, 8)
    assert len(running.propose()) > 3
    pace = running.drafter.lanes[0].pace
    for count, rows in ((1, len(running.propose())), (1, 1), (1, 1)):
        before = pace.cost
        running.take(count)
        assert pace.cost == pytest.approx(0.98 * before + 1 + 0.1 * (rows - 1))


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_matching_ngram_size", 0), ("min_token_prob", 1.5), ("global_pool_tokens", 1)],
)
def test_other_values_are_refused_by_their_key(key: str, value: object) -> None:
    with pytest.raises(OptionError, match=key):
        SuffixOptions(**{key: value})
