"""N-gram drafts, by the pool of TensorRT-LLM's NGram: what followed the last few tokens before is
drafted.

Knows tokens. A pool maps patterns, of 1 to max_matching_ngram_size tokens, to their matches: what
followed, up to max_draft_len tokens. Needs no engine and no hidden states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgespec.backends.base import PlanHints
from edgespec.backends.engine_config import EngineConfig
from edgespec.errors import LimitError
from edgespec.methods.ngram import NAME
from edgespec.runtime.drafters.base import Continuing, DraftRequest, Observation, TextDrafter
from edgespec.runtime.drafters.options import DrafterOptions, option
from edgespec.runtime.drafters.row import DrafterRow, DrafterSources
from edgespec.runtime.plans.plan import TreeLimits
from edgespec.runtime.trees.tree import DraftPlan, DraftTree

Tokens = tuple[int, ...]
MAX_BYTES = 100_000_000  # of a pool, about: the oldest patterns go
BYTES_A_MATCH, BYTES_A_TOKEN = 360, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramOptions(DrafterOptions):
    """Those of TensorRT-LLM's NGramDecodingConfig, by its names."""

    max_draft_len: int = option(3, "Tokens of a draft, at most.", low=1, high=1024)
    max_matching_ngram_size: int = option(
        2, "Tokens that are looked up, at most; longer ones first.", low=1, high=64
    )
    is_keep_all: bool = option(
        True, "Keep all matches of a pattern; false: until one comes that is longer than the first."
    )
    is_use_oldest: bool = option(True, "Draft the oldest match; false: the newest one.")
    is_public_pool: bool = option(
        True, "One pool for all requests; false: one for each, until it ends."
    )


class Pool:
    """Patterns and what followed them: the matches of each, the oldest first, by the rules of
    TensorRT-LLM's pool class.

    A match is cut where the sequence ends, and is added again as the sequence goes on. A new match
    takes the place of the shorter ones of its pattern; where several of these stand side by side
    every other one goes, from the first on, and the rest stay. With `is_keep_all` False a match
    that is longer than the first one takes the place of all, and any other is added as with True.

    A match of full length never gives way to a new one. So only the short ones are looked at, which
    are few: for each it is known how many of full length stand before it, and two with the same
    number stand side by side.
    """

    def __init__(self, options: NgramOptions, max_bytes: int = MAX_BYTES) -> None:
        self.options = options
        longest = options.max_matching_ngram_size + options.max_draft_len
        self.max_matches = max_bytes // (BYTES_A_MATCH + BYTES_A_TOKEN * longest)
        self.matches: dict[Tokens, dict[Tokens, None]] = {}
        # pattern -> match -> how many matches of full length came before it
        self.short: dict[Tokens, dict[Tokens, int]] = {}
        self.patterns: deque[Tokens] = deque()  # the oldest first
        self.num_matches = 0

    def update(self, tokens: Sequence[int], start: int) -> None:
        """Add all patterns of tokens[start:] with what follows them."""
        most, end = self.options.max_draft_len, len(tokens)
        for size in self.sizes(tokens):
            for first in range(start, end - size):
                after = first + size
                self.add(tuple(tokens[first:after]), tuple(tokens[after : after + most]))

    def sizes(self, tokens: Sequence[int]) -> Iterable[int]:
        """The sizes of patterns in a sequence, the largest first."""
        return range(min(self.options.max_matching_ngram_size, len(tokens) - 1), 0, -1)

    def add(self, pattern: Tokens, match: Tokens) -> None:
        """Add one match of a pattern, unless it has it."""
        matches = self.matches.get(pattern)
        if matches is None:
            matches = self.matches[pattern] = {}
            self.patterns.append(pattern)
        elif match in matches:
            return
        elif not self.options.is_keep_all and len(match) > len(next(iter(matches))):
            self.num_matches -= len(matches)
            matches.clear()
            self.short.pop(pattern, None)
        elif pattern in self.short:
            self.drop_shorter(pattern, len(match))
        if len(match) < self.options.max_draft_len:
            short = self.short.setdefault(pattern, {})
            short[match] = len(matches) - len(short)
        matches[match] = None
        self.num_matches += 1
        while self.num_matches > self.max_matches:
            self.drop_oldest()

    def drop_shorter(self, pattern: Tokens, length: int) -> None:
        """Drop the matches of a pattern that have fewer tokens, but for each that stands right
        behind one that was dropped."""
        matches, short = self.matches[pattern], self.short[pattern]
        spared: int | None = None
        for match, num_full in list(short.items()):
            if len(match) >= length or num_full == spared:
                spared = None
                continue
            del matches[match], short[match]
            self.num_matches -= 1
            spared = num_full  # the next one stands beside it if this is its number too
        if not short:
            del self.short[pattern]

    def drop_oldest(self) -> None:
        """Drop the pattern that has been there longest, with all its matches."""
        pattern = self.patterns.popleft()
        self.num_matches -= len(self.matches.pop(pattern))
        self.short.pop(pattern, None)

    def find(self, tokens: Sequence[int]) -> Tokens:
        """What followed the longest pattern at the end of a sequence: its oldest match, or its
        newest; empty where there is none."""
        for size in self.sizes(tokens):
            if matches := self.matches.get(tuple(tokens[-size:])):
                return next(iter(matches) if self.options.is_use_oldest else reversed(matches))
        return ()


@dataclass
class NgramLane:
    """A sequence: its tokens, and from where on they are to be added to the pool again."""

    tokens: list[int]
    pool: Pool
    start: int = 0


class NgramDrafter(TextDrafter, Continuing):
    """Chains of what followed the last tokens before."""

    def __init__(self, options: NgramOptions) -> None:
        self.options = options
        self.public = Pool(options)
        self.lanes: dict[int, NgramLane] = {}

    def begin(self, lane: int, tokens: Sequence[int], num_reused: int) -> None:
        """Take the whole prompt."""
        pool = self.public if self.options.is_public_pool else Pool(self.options)
        self.lanes[lane] = NgramLane([*tokens], pool)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Take the tokens that were generated."""
        for item in observations:
            self.lanes[item.lane].tokens += item.tokens.tolist()

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A chain for each, or the root alone where no pattern is known."""
        return [self.proposed(request) for request in requests]

    def proposed(self, request: DraftRequest) -> DraftTree:
        """Add what is new to the pool, then look up the last tokens."""
        lane, plan = self.lanes[request.lane], request.plan
        if not plan.steps:  # the last token of the answer
            return DraftTree.root_only(request.pending)
        lane.pool.update(lane.tokens, lane.start)
        tokens = lane.pool.find([*lane.tokens, *request.forced] if request.forced else lane.tokens)
        again = self.options.max_draft_len + self.options.max_matching_ngram_size - 1
        lane.start = max(0, len(lane.tokens) - again)
        drafts = tokens[: min(plan.steps, plan.verify_size - 1)]
        return DraftTree.chain(request.pending, [*request.forced, *drafts])

    def reset(self, lane: int) -> None:
        """Forget a lane's sequence, and its pool where it has one of its own."""
        self.lanes.pop(lane, None)

    def move(self, source: int, target: int) -> None:
        """The sequence goes on in another lane."""
        self.lanes[target] = self.lanes.pop(source)

    def forget(self) -> None:
        """Empty the public pool."""
        self.public = Pool(self.options)


@dataclass(frozen=True, slots=True)
class NgramLimits(TreeLimits):
    """What a base verifies, as chains of at most `max_draft_len` drafts."""

    max_draft_len: int = 3

    def plan(
        self, top_k: int | None, steps: int | None, verify_size: int | None, hints: PlanHints
    ) -> DraftPlan:
        """The values given; else chains of max_draft_len, as far as the base verifies them."""
        if steps is None and verify_size is None:
            steps = max(1, min(self.max_draft_len, self.max_verify_tree_size - 1))
        return TreeLimits.plan(self, top_k, steps, verify_size, hints)

    def check_draft(self, plan: DraftPlan) -> None:
        """LimitError for trees, and for chains that are longer than the pool's matches."""
        if plan.top_k > 1:
            message = f"`spec_draft_top_k` {plan.top_k}: n-grams draft chains, and no trees"
            raise LimitError(message, "Set it to 1, or leave it out.")
        if plan.steps > self.max_draft_len:
            message = (
                f"`spec_draft_step` {plan.steps} exceeds the max_draft_len of {self.max_draft_len}"
            )
            raise LimitError(message, f"Lower it, or set max_draft_len to {plan.steps}.")


def limits(base: EngineConfig, options: NgramOptions) -> NgramLimits:
    """The plans that a base verifies and a pool has matches for."""
    most = options.max_draft_len
    return NgramLimits(base.limits.verify_tree_size, max_draft_len=most)


def open_drafter(sources: DrafterSources) -> NgramDrafter:
    """The drafter of an engine, with one public pool."""
    assert isinstance(sources.options, NgramOptions)
    return NgramDrafter(sources.options)


ROW = DrafterRow(
    open=open_drafter,
    limits=lambda base, draft: limits(base, NgramOptions()),
    words=" of n-gram matches",
    options=NgramOptions,
    limits_by_options=limits,
    forget=NgramDrafter.forget,
    tries=tuple(
        {"max_draft_len": length, "max_matching_ngram_size": size}
        for length in (2, 3, 5, 8)
        for size in (2, 3, 4)
    ),
)
__all__ = ["NAME", "ROW"]
