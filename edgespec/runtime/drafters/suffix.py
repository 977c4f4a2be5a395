"""Suffix drafts: what followed the longest end of the text that occurred before, in the prompt, in
the answer or, if asked for, in earlier answers (after SuffixDecoding, arXiv 2411.04975).

Knows tokens, and grows trees by the counts of a suffix automaton. Which drafts pay is
`suffix_confidence`'s. Needs no engine and no hidden states.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import numpy as np

from edgespec.backends.base import PlanHints
from edgespec.backends.engine_config import EngineConfig
from edgespec.methods.suffix import NAME
from edgespec.runtime.drafters.base import Continuing, DraftRequest, Observation, TextDrafter
from edgespec.runtime.drafters.options import DrafterOptions, option
from edgespec.runtime.drafters.row import DrafterRow, DrafterSources
from edgespec.runtime.drafters.suffix_automaton import (
    EMPTY,
    Continuation,
    MatchContext,
    SuffixAutomaton,
)
from edgespec.runtime.drafters.suffix_confidence import Confidence, Pace
from edgespec.runtime.plans.plan import TreeLimits
from edgespec.runtime.trees.tree import DraftPlan, DraftTree

SEPARATOR = -1  # behind an answer in the pool; no token
# Continuations of a context that are looked at: one that has more is no prediction
MAX_CONTINUATIONS = 64
MAX_STEPS, MAX_CHILDREN = 32, 4  # of a plan where none are given


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixOptions(DrafterOptions):
    """What is matched, and what is drafted of it."""

    max_matching_ngram_size: int = option(
        32, "Tokens of a match that count, at most.", low=1, high=256
    )
    min_token_prob: float | None = option(
        None,
        "The least estimated probability of a draft. Without it: that from which on it pays, by"
        " what a row costs.",
        low=0,
        high=1,
    )
    enable_global_pool: bool = option(
        False, "Draft from earlier answers of the engine too, of all requests."
    )
    global_pool_tokens: int = option(
        65536, "Tokens of earlier answers that are kept, at most.", low=2, high=2**24
    )


class AnswerPool:
    """Earlier answers, at most `max_tokens` tokens of them.

    They are in two automata of half the size: when the young one is full it becomes the old one,
    which is dropped.
    """

    def __init__(self, max_tokens: int, max_size: int) -> None:
        self.half, self.max_size = max(1, max_tokens // 2), max_size
        self.young, self.old = SuffixAutomaton(max_size), SuffixAutomaton(max_size)

    def add(self, answer: Sequence[int]) -> None:
        """Add an answer, or its end where it is larger than half of the pool."""
        answer = answer[-(self.half - 1) :] if self.half > 1 else ()
        if not answer:
            return
        if len(self.young) + len(answer) + 1 > self.half:
            self.young, self.old = SuffixAutomaton(self.max_size), self.young
        self.young.extend(answer)
        self.young.append(SEPARATOR)

    def __len__(self) -> int:
        return len(self.young) + len(self.old)

    @property
    def automata(self) -> tuple[SuffixAutomaton, SuffixAutomaton]:
        """Those to search, the newer answers first."""
        return self.young, self.old


class Match(NamedTuple):
    """A context in one of the automata, and what followed it."""

    automaton: SuffixAutomaton
    context: MatchContext
    continuations: list[Continuation]
    total: int  # how often anything followed it

    @classmethod
    def of(cls, automaton: SuffixAutomaton, context: MatchContext) -> Match:
        """The match of a context; nothing followed one with more than MAX_CONTINUATIONS."""
        if len(automaton.following[context.state]) > MAX_CONTINUATIONS:
            return cls(automaton, context, [], 0)
        continuations = automaton.continuations(context)
        return cls(automaton, context, continuations, sum(item[0] for item in continuations))

    def onward(self, token: int) -> Match:
        """The match one token on."""
        return Match.of(self.automaton, self.automaton.onward(self.context, token))


class WaitingDraft(NamedTuple):
    """A draft that waits for its place in the tree: the most probable ones come first, of equals
    those of the earlier parent, and of siblings the one of lower rank."""

    negative_probability: float
    parent: int  # node
    rank: int
    depth: int
    token: int
    match: Match  # behind which it is drafted


@dataclass
class SuffixLane:
    """A sequence: its text, the matches of its end, and how its drafts fared. `live` until it ends;
    what ended may go on as the next turn of a chat."""

    text: SuffixAutomaton
    num_prompt: int
    pace: Pace
    confidence: Confidence = field(default_factory=Confidence)
    pooled: dict[SuffixAutomaton, MatchContext] = field(default_factory=dict)
    match: Match | None = None  # the longest one of the text's end, where anything followed
    num_rows: int = 0  # that the next step verifies; 0: the prompt's pass comes first
    live: bool = True


class SuffixDrafter(TextDrafter, Continuing):
    """Trees of what followed the longest match, as far as they pay."""

    def __init__(self, options: SuffixOptions, row_cost: float) -> None:
        self.options, self.row_cost = options, row_cost
        self.lanes: dict[int, SuffixLane] = {}
        self.pool = self.empty_pool()

    def empty_pool(self) -> AnswerPool | None:
        """A pool for earlier answers; None where none is asked for."""
        if not self.options.enable_global_pool:
            return None
        most = self.options.global_pool_tokens
        return AnswerPool(most, self.options.max_matching_ngram_size)

    # ---- a sequence's tokens

    def begin(self, lane: int, tokens: Sequence[int], num_reused: int) -> None:
        """Index the whole prompt, or what is new in it where it goes on with a text that ended
        here."""
        text = self.known_beginning(tokens)
        text.extend(tokens[len(text) :])
        state = SuffixLane(text, len(tokens), Pace(self.row_cost))
        self.lanes[lane] = state
        for token in tokens[-self.options.max_matching_ngram_size :]:
            self.follow_pool(state, token)

    def known_beginning(self, tokens: Sequence[int]) -> SuffixAutomaton:
        """The longest text that ended in a lane and with which these tokens begin, taken from its
        lane; else an empty one."""
        ended = [
            (len(state.text), number)
            for number, state in self.lanes.items()
            if not state.live and state.text.text == list(tokens[: len(state.text)])
        ]
        if not ended:
            return SuffixAutomaton(self.options.max_matching_ngram_size)
        return self.lanes.pop(max(ended)[1]).text

    def observe(self, observations: Sequence[Observation]) -> None:
        """Take in what was generated, and whether it was predicted."""
        for item in observations:
            state, tokens = self.lanes[item.lane], item.tokens.tolist()
            for token in tokens:
                self.take(state, token)
            if state.num_rows:
                state.pace.add(len(tokens), state.num_rows)
            state.num_rows = 1  # of the next step, unless drafts are asked for

    def take(self, state: SuffixLane, token: int) -> None:
        """Take in one token of an answer."""
        if state.match is not None:
            _, context, continuations, total = state.match
            count, _, expected = max(continuations)
            hit = token == expected
            state.confidence.learn(context.size, total, count / total, hit=hit)
        state.text.append(token)
        self.follow_pool(state, token)
        state.match = self.longest_match(state)

    def follow_pool(self, state: SuffixLane, token: int) -> None:
        """Move the matches in earlier answers on by one token; one in an automaton that is new
        begins here."""
        if self.pool is not None:
            state.pooled = {
                automaton: automaton.advance(state.pooled.get(automaton, EMPTY), token)
                for automaton in self.pool.automata
            }

    def longest_match(self, state: SuffixLane, forced: Sequence[int] = ()) -> Match | None:
        """The longest end of the text, with `forced` behind it, that occurred before, in itself or,
        where that is longer, in earlier answers; None where nothing followed it."""
        automaton = state.text
        context = reduce(automaton.advance, forced, automaton.repeated())
        for pooled, before in state.pooled.items():
            other = reduce(pooled.advance, forced, before)
            if other.size > context.size:
                automaton, context = pooled, other
        if not context.size:
            return None
        match = Match.of(automaton, automaton.shortened(context, context.size))
        return match if match.continuations else None

    # ---- drafts

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A tree for each, of the drafts that pay; the root alone where none does."""
        return [self.proposed(request, len(requests)) for request in requests]

    def proposed(self, request: DraftRequest, batch_size: int) -> DraftTree:
        """The tree of one sequence, beside so many others that draft."""
        state, least = self.lanes[request.lane], self.options.min_token_prob
        if least is None:
            least = state.pace.least_probability(batch_size)
        tree = self.grown(state, request, least)
        state.num_rows = len(tree)
        return tree

    def grown(self, state: SuffixLane, request: DraftRequest, least: float) -> DraftTree:
        """The most probable drafts first, until one is below `least` or the plan is full."""
        plan, tokens = request.plan, [request.pending, *request.forced]
        parents, last = [*range(-1, len(request.forced))], len(request.forced)
        match = self.longest_match(state, request.forced) if last else state.match
        waiting: list[WaitingDraft] = []
        if match is not None and plan.steps:
            above = WaitingDraft(-1.0, -1, 0, 0, -1, match)
            self.find(waiting, state, above, last, plan.top_k, least)
        while waiting and len(tokens) < last + plan.verify_size:
            draft = heapq.heappop(waiting)
            tokens.append(draft.token)
            parents.append(draft.parent)
            if draft.depth < plan.steps:
                onward = draft._replace(match=draft.match.onward(draft.token))
                self.find(waiting, state, onward, len(tokens) - 1, plan.top_k, least)
        return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64))

    def find(
        self,
        waiting: list[WaitingDraft],
        state: SuffixLane,
        above: WaitingDraft,
        node: int,
        top_k: int,
        least: float,
    ) -> None:
        """Let what follows the match of `above`, whose node is `node`, wait for its place: at most
        `top_k` drafts, each with a probability of at least `least`."""
        match = above.match
        if not match.continuations:
            return
        trust = state.confidence.trust(match.context.size, match.total) / match.total
        best = heapq.nlargest(top_k, match.continuations)
        for rank, (count, _, token) in enumerate(best):
            probability = above.negative_probability * trust * count
            if -probability < least:
                return
            draft = WaitingDraft(probability, node, rank, above.depth + 1, token, match)
            heapq.heappush(waiting, draft)

    # ---- lanes

    def reset(self, lane: int) -> None:
        """A lane's sequence has ended; its text is kept until another one begins there, as the next
        turn of a chat begins with it."""
        state = self.lanes.get(lane)
        if state is None or not state.live:
            return
        state.live = False
        if self.pool is not None:
            self.pool.add(state.text.text[state.num_prompt :])

    def move(self, source: int, target: int) -> None:
        """The sequence goes on in another lane, whose own has ended."""
        self.reset(target)
        self.lanes[target] = self.lanes.pop(source)

    def forget(self) -> None:
        """Forget all texts and all earlier answers; nothing may be running."""
        self.lanes.clear()
        self.pool = self.empty_pool()

    def close(self) -> None:
        """Forget all texts."""
        self.lanes.clear()


@dataclass(frozen=True, slots=True)
class SuffixLimits(TreeLimits):
    """What a base verifies. Sizes are bounds: the drafts of a step are those that pay."""

    def plan(
        self, top_k: int | None, steps: int | None, verify_size: int | None, hints: PlanHints
    ) -> DraftPlan:
        """The values given; else trees as large as the base verifies."""
        room = self.max_verify_tree_size if verify_size is None else verify_size
        if steps is None:
            steps = max(1, min(MAX_STEPS, room - 1))
        if top_k is None:
            top_k = min(MAX_CHILDREN, max(1, room - 1))
        return TreeLimits.plan(self, top_k, steps, verify_size, hints)


def limits(base: EngineConfig, draft: EngineConfig | None) -> SuffixLimits:
    """The plans that the base verifies."""
    del draft
    return SuffixLimits(base.limits.verify_tree_size)


def open_drafter(sources: DrafterSources) -> SuffixDrafter:
    """The drafter of an engine."""
    assert isinstance(sources.options, SuffixOptions)
    return SuffixDrafter(sources.options, sources.row_cost)


ROW = DrafterRow(
    open=open_drafter,
    limits=limits,
    words=" of earlier text, as far as it pays",
    options=SuffixOptions,
    forget=SuffixDrafter.forget,
    tries=({}, {"max_matching_ngram_size": 8}),
    paces_itself=True,
)
__all__ = ["NAME", "ROW"]
