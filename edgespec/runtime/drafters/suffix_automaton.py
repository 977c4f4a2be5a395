"""A suffix automaton (Blumer et al. 1985) over a growing text, which also counts: how often each
context of up to a given length occurs, and where last.

Knows tokens. Knows nothing of drafts. A state stands for all contexts that end at the same places
of the text; its `link` is the state of the longest shorter contexts that end at more places. A text
of n tokens has at most 2n states and 3n transitions, so that a token costs O(1) amortised; counting
adds at most one addition for each length of a context.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

ROOT = 0


class MatchContext(NamedTuple):
    """A state, and how many tokens of the text's end, or of another text's, it was found for."""

    state: int
    size: int


EMPTY = MatchContext(ROOT, 0)


# How often a token followed a context, where it stood last, and the token: in this order, so that
# the largest is the most frequent one, and of several the latest
Continuation = tuple[int, int, int]


class SuffixAutomaton:
    """The automaton of the tokens appended so far. Contexts are counted up to `max_size` tokens.

    Tokens below 0 separate texts: they are no continuation of anything.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.text: list[int] = []
        self.following: list[dict[int, int]] = []  # state -> token -> state
        self.link: list[int] = []
        self.length: list[int] = []  # of the longest context of a state
        self.count: list[int] = []
        self.latest: list[int] = []  # index of the last token, where a context occurred last
        self.add_state({}, 0, ROOT, 0, -1)
        self.whole = ROOT  # the state of the whole text
        self.tail = EMPTY  # the text's last max_size + 1 tokens, or all of them

    def __len__(self) -> int:
        return len(self.text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens, in order."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Take in the next token of the text."""
        following, link, at = self.following, self.link, self.whole
        index = len(self.text)
        self.text.append(token)
        state = self.add_state({}, index + 1, ROOT, 0, index)
        while token not in following[at]:
            following[at][token] = state
            if at == ROOT:
                break
            at = link[at]
        else:
            target = following[at][token]
            one_longer = self.length[target] == self.length[at] + 1
            link[state] = target if one_longer else self.split(at, token, target)
        self.whole = state
        self.count_tail(token, index)

    def split(self, at: int, token: int, target: int) -> int:
        """Give those contexts of `target` a state of their own that end at the new token too: they
        are those of `at` and shorter ones, one token on."""
        following, link = self.following, self.link
        kept = (self.link[target], self.count[target], self.latest[target])
        state = self.add_state({**following[target]}, self.length[at] + 1, *kept)
        while following[at].get(token) == target:
            following[at][token] = state
            if at == ROOT:
                break
            at = link[at]
        link[target] = state
        return state

    def add_state(
        self, following: dict[int, int], length: int, link: int, count: int, latest: int
    ) -> int:
        """Add a state and return its number."""
        self.following.append(following)
        self.length.append(length)
        self.link.append(link)
        self.count.append(count)
        self.latest.append(latest)
        return len(self.link) - 1

    def count_tail(self, token: int, index: int) -> None:
        """Count one more occurrence of each context of up to max_size + 1 tokens that ends at
        `index`: one token more than asked for, as the last one is what follows."""
        state, size = self.shortened(self.tail, self.max_size)
        state = self.following[state][token]
        self.tail = MatchContext(state, size + 1)
        count, latest, link = self.count, self.latest, self.link
        while state != ROOT:
            count[state] += 1
            latest[state] = index
            state = link[state]

    # ---- what occurred

    def shortened(self, context: MatchContext, size: int) -> MatchContext:
        """The last `size` tokens of a context, or all of them where it has fewer. A state that was
        found earlier may have been split since: this finds the one that stands for it now."""
        state, size = context.state, min(context.size, size)
        link, length = self.link, self.length
        while state != ROOT and length[link[state]] >= size:
            state = link[state]
        return MatchContext(state, size)

    def repeated(self) -> MatchContext:
        """The longest end of the text, up to max_size tokens, that occurred before; empty where
        its last token is new."""
        state, size = self.shortened(self.tail, self.max_size)
        while state != ROOT and self.count[state] < 2:
            state = self.link[state]
            size = self.length[state]
        return MatchContext(state, size)

    def advance(self, context: MatchContext, token: int) -> MatchContext:
        """The longest end, up to max_size tokens, of another text that occurs in this one; before
        `token` it was `context`."""
        state, size = self.shortened(context, self.max_size)
        while token not in self.following[state]:
            if state == ROOT:
                return EMPTY
            state = self.link[state]
            size = self.length[state]
        return self.shortened(MatchContext(self.following[state][token], size + 1), self.max_size)

    def onward(self, context: MatchContext, token: int) -> MatchContext:
        """A context of at most max_size tokens with one of its continuations behind it, cut to
        max_size, and further where only the end of the text is so."""
        state = self.following[context.state][token]
        state, size = self.shortened(MatchContext(state, context.size + 1), self.max_size)
        while not self.following[state]:
            state = self.link[state]
            size = self.length[state]
        return MatchContext(state, size)

    def continuations(self, context: MatchContext) -> list[Continuation]:
        """What followed a context of at most max_size tokens."""
        count, latest = self.count, self.latest
        return [
            (count[state], latest[state], token)
            for token, state in self.following[context.state].items()
            if token >= 0
        ]
