"""The suffix automaton against counting by hand: what a text repeats, how often, and what followed.

The reference looks through the whole text for each answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.runtime.drafters.suffix_automaton import EMPTY, ROOT, MatchContext, SuffixAutomaton

texts = st.integers(1, 4).flatmap(
    lambda letters: st.lists(st.integers(0, letters - 1), min_size=1, max_size=70)
)


def ends_of(text: Sequence[int], context: Sequence[int]) -> list[int]:
    """Where a context ends in a text: the index behind its last token."""
    size = len(context)
    return [e for e in range(size, len(text) + 1) if [*text[e - size : e]] == [*context]]


def longest_repeated(text: list[int], most: int) -> int:
    sizes = [n for n in range(1, min(most, len(text)) + 1) if len(ends_of(text, text[-n:])) > 1]
    return max(sizes, default=0)


def followed(text: Sequence[int], context: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Token behind a context -> how often it stood there, and where last."""
    places = [end for end in ends_of(text, context) if end < len(text)]
    counts = Counter(text[end] for end in places)
    return {t: (n, max(e for e in places if text[e] == t)) for t, n in counts.items()}


def automaton_of(text: Sequence[int], most: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton(most)
    automaton.extend(text)
    return automaton


@settings(max_examples=200, deadline=None)
@given(text=texts, most=st.integers(1, 9))
def test_repeated_end_and_what_followed_it(text: list[int], most: int) -> None:
    automaton = SuffixAutomaton(most)
    for end, token in enumerate(text, start=1):
        automaton.append(token)
        context = automaton.repeated()
        so_far = text[:end]
        assert context.size == longest_repeated(so_far, most)
        if context.size:
            expected = followed(so_far, so_far[-context.size :])
            found = automaton.continuations(context)
            assert {token: (count, latest) for count, latest, token in found} == expected


@settings(max_examples=150, deadline=None)
@given(text=texts, most=st.integers(1, 9), chosen=st.randoms(use_true_random=False))
def test_counts_along_a_path(text: list[int], most: int, chosen: object) -> None:
    """Going on from the repeated end through any continuation, again and again: the context is cut
    to `most` tokens, and to what stood before the text's end; counts are those of the text."""
    automaton, path = automaton_of(text, most), list(text)
    context = automaton.repeated()
    for _ in range(12):
        if not context.size:
            return
        expected = followed(text, path[len(path) - context.size :])
        found = automaton.continuations(context)
        assert found
        assert {token: (count, latest) for count, latest, token in found} == expected
        token, before = chosen.choice(found)[-1], context.size  # type: ignore[attr-defined]
        path.append(token)
        context = automaton.onward(context, token)
        sizes = range(min(most, before + 1), 0, -1)
        assert context.size == next((n for n in sizes if followed(text, path[-n:])), 0)


@settings(max_examples=150, deadline=None)
@given(text=texts, other=texts, most=st.integers(1, 9))
def test_matches_of_another_text(text: list[int], other: list[int], most: int) -> None:
    """Also while the automaton grows under them."""
    automaton, context = SuffixAutomaton(most), EMPTY
    waiting = list(text)
    for end in range(1, len(other) + 1):
        if waiting:
            automaton.append(waiting.pop(0))
        context = automaton.advance(context, other[end - 1])
        ends = range(min(most, end), -1, -1)
        # A match that was cut short may have become longer only through tokens appended since
        longest = next(n for n in ends if not n or ends_of(automaton.text, other[end - n : end]))
        assert context.size <= longest
        assert not context.size or ends_of(automaton.text, other[end - context.size : end])
        if not waiting:
            found = automaton.continuations(automaton.shortened(context, most))
            expected = followed(automaton.text, other[end - context.size : end])
            assert {
                token: (count, latest) for count, latest, token in found
            } == expected or not context.size


@settings(max_examples=100, deadline=None)
@given(text=texts, other=texts, most=st.integers(1, 9))
def test_match_in_a_text_that_is_complete_is_the_longest(
    text: list[int], other: list[int], most: int
) -> None:
    automaton, context = automaton_of(text, most), EMPTY
    for end in range(1, len(other) + 1):
        context = automaton.advance(context, other[end - 1])
        sizes = range(min(most, end), 0, -1)
        longest = next((n for n in sizes if ends_of(text, other[end - n : end])), 0)
        assert context.size == longest


def fibonacci(count: int) -> list[int]:
    """A word with as many repetitions as a word can have without being periodic."""
    first, second = [0], [0, 1]
    while len(second) < count:
        first, second = second, second + first
    return second[:count]


ADVERSARIES = {
    "one letter": [0] * 600,
    "two letters": [0, 1] * 300,
    "all different": list(range(600)),
    "most states": [0] + [1] * 599,
    "most transitions": [0] + [1] * 598 + [2],
    "fibonacci": fibonacci(600),
    "blocks": [i // 20 % 3 for i in range(600)],
}


@pytest.mark.parametrize("text", ADVERSARIES.values(), ids=ADVERSARIES)
def test_size_and_work_are_linear(text: list[int]) -> None:
    """At most 2n states and 3n transitions; each token moves at most so many counts as contexts are
    counted, and what it redirects is paid for by what the text is long."""
    most, n = 8, len(text)
    automaton = automaton_of(text, most)
    assert len(automaton.link) <= 2 * n
    assert sum(map(len, automaton.following)) <= 3 * n
    assert sum(automaton.count) <= n * (most + 1)


def test_work_of_the_links_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps along links, of all tokens together, for texts that make many."""
    for name, text in ADVERSARIES.items():
        automaton = SuffixAutomaton(8)
        steps = Steps(automaton.link)
        automaton.link = steps
        automaton.extend(text)
        assert steps.num_read <= (8 + 1 + 8) * len(text), name


class Steps(list[int]):
    """A list that counts how often it is read."""

    num_read = 0

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        self.num_read += 1
        return list.__getitem__(self, index)


def test_separators_end_texts() -> None:
    automaton = automaton_of([1, 2, 3, -1, 1, 2, -1, 1, 2], 8)
    context = automaton.advance(automaton.advance(EMPTY, 1), 2)
    assert context.size == 2
    assert automaton.continuations(context) == [(1, 2, 3)]


def test_empty_text_repeats_nothing() -> None:
    automaton = SuffixAutomaton(4)
    assert automaton.repeated() == MatchContext(ROOT, 0)
    assert automaton.continuations(EMPTY) == []
    assert automaton.advance(EMPTY, 3) == EMPTY
