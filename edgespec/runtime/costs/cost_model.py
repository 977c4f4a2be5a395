"""What a step will cost and what it will bring: from measured costs and from acceptance to the best
chain, the best tree and the acceptance from which drafts pay.

Knows seconds, rows and probabilities. Knows no engine and no clock: the same values give the same
answer. Speed over plain = tokens of a step * plain step time / step time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from edgespec.runtime.costs.cost_profile import CostProfile

MAX_ROWS = 129  # rows of a sequence that are looked up: the largest tree and its root
CONTEXT_STEP = 64  # tokens within which costs are taken to be the same
FEW_ROWS = 8
MAX_KEPT = 512  # contexts and batches whose costs are kept
Curve = NDArray[np.float64]
NOTHING: Curve = np.zeros(MAX_ROWS + 1)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds at one context and batch, looked up by a count: `passes[rows]` of a step of the base,
    `propose[levels]` and `observe[rows]` of the drafter, each for all sequences of the batch. Entry
    0 is 0."""

    passes: Sequence[float]
    propose: Sequence[float]
    observe: Sequence[float]

    @property
    def plain(self) -> float:
        """A step without drafts."""
        return self.passes[1]

    def step(self, nodes: int, levels: int, committed: float) -> float:
        """A step that drafts `levels` levels, verifies `nodes` nodes with the root, and commits so
        many tokens of each sequence, on average, which the drafter observes."""
        return self.passes[nodes] + self.propose[levels] + self.observed(committed)

    def observed(self, rows: float) -> float:
        """What observing so many rows takes, on average."""
        low = min(int(rows), len(self.observe) - 2)
        return self.observe[low] + (rows - low) * (self.observe[low + 1] - self.observe[low])

    def chain(self, levels: int, tokens: float) -> float:
        """A step that drafts a chain of so many drafts and emits so many tokens, on average."""
        return self.step(levels + 1, levels, tokens) if levels else self.plain


class CostModel:
    """The costs of a profile at any context and batch size, between the measured points in
    proportion and beyond them as the last two go on."""

    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile
        self.passes = Curves.of([(t.context, t.batch, t.rows, t.seconds) for t in profile.base])
        self.observe = Curves.of([(t.context, t.batch, t.rows, t.seconds) for t in profile.observe])
        self.widths = sorted({t.top_k for t in profile.propose})
        self.propose = [
            Curves.of(
                (t.context, t.batch, t.levels, t.seconds)
                for t in profile.propose
                if t.top_k == width
            )
            for width in self.widths
        ]
        self.kept: dict[tuple[int, int, int], StepCosts] = {}

    @property
    def row_cost(self) -> float:
        """What each of the first few rows of a pass takes beside the first one, in passes of one
        row, behind a short context."""
        passes = self.at(0).passes
        return (passes[FEW_ROWS] - passes[1]) / (FEW_ROWS - 1) / passes[1]

    def at(self, context: int, batch: int = 1, top_k: int = 1) -> StepCosts:
        """The costs of `batch` sequences behind `context` tokens each, on average, whose drafts
        have `top_k` nodes a level."""
        key = (context // CONTEXT_STEP, batch, top_k)
        costs = self.kept.get(key)
        if costs is None:
            if len(self.kept) >= MAX_KEPT:
                self.kept.clear()
            place = (key[0] + 0.5) * CONTEXT_STEP
            costs = self.kept[key] = self.costs(place, batch, top_k)
        return costs

    def costs(self, context: float, batch: int, top_k: int) -> StepCosts:
        """`at`, of exactly this context."""
        proposals = [grid.at(context, batch) for grid in self.propose]
        propose = between(self.widths, proposals, top_k) if proposals else NOTHING
        return StepCosts(
            self.passes.at(context, batch).tolist(),
            propose.tolist(),
            self.observe.at(context, batch).tolist(),
        )


@dataclass(frozen=True, slots=True)
class Curves:
    """Seconds by count, as curves over 0 to MAX_ROWS, at measured contexts and batch sizes."""

    curves: Mapping[int, Mapping[int, Curve]] = field(default_factory=dict)  # batch -> context

    @classmethod
    def of(cls, points: Iterable[tuple[int, int, int, float]]) -> Curves:
        """The curves of (context, batch, count, seconds)."""
        seconds_at: dict[int, dict[int, dict[int, float]]] = {}
        for context, batch, count, seconds in points:
            seconds_at.setdefault(batch, {}).setdefault(context, {})[count] = seconds
        return cls(
            {
                batch: {context: curve_of(own) for context, own in sorted(contexts.items())}
                for batch, contexts in sorted(seconds_at.items())
            }
        )

    def at(self, context: float, batch: int) -> Curve:
        """The curve at any context and batch size, both at least 1."""
        if not self.curves:
            return NOTHING
        sizes = [*self.curves]
        return between(sizes, [self.of_batch(size, context) for size in sizes], batch)

    def of_batch(self, batch: int, context: float) -> Curve:
        """The curve at any context of a batch size that was measured. Where it was measured at one
        context alone, what others cost more is that of the smallest batch, for each sequence."""
        own, smallest = self.curves[batch], next(iter(self.curves))
        if len(own) > 1 or batch == smallest:
            return between([*own], [*own.values()], context)
        (there,), reference = own, self.curves[smallest]
        places, curves = [*reference], [*reference.values()]
        more = between(places, curves, context) - between(places, curves, there)
        return np.maximum.accumulate(own[there] + batch / smallest * more)


def curve_of(points: Mapping[int, float]) -> Curve:
    """Seconds for counts of 0 to MAX_ROWS from measured ones: never falling, 0 at 0, and beyond the
    largest count as the last two go on."""
    counts = np.array(sorted(points), np.float64)
    seconds = never_falling([points[int(count)] for count in counts])
    whole = np.arange(MAX_ROWS + 1, dtype=np.float64)
    curve = np.interp(whole, counts, seconds)
    if len(counts) > 1:
        slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
        curve = np.where(whole > counts[-1], seconds[-1] + slope * (whole - counts[-1]), curve)
    elif counts[0]:
        curve = seconds[0] * np.maximum(1.0, whole / counts[0])
    curve[0] = 0.0
    return curve


def never_falling(values: Sequence[float]) -> Curve:
    """The nearest values, by least squares, of which none is less than the one before: those that
    fall are noise, and become their mean (isotonic regression)."""
    blocks: list[tuple[float, int]] = []  # mean, length
    for value in values:
        mean, length = value, 1
        while blocks and blocks[-1][0] > mean:
            before, count = blocks.pop()
            mean = (before * count + mean * length) / (count + length)
            length += count
        blocks.append((mean, length))
    return np.array([mean for mean, length in blocks for _ in range(length)])


def between(places: Sequence[int], curves: Sequence[Curve], place: float) -> Curve:
    """The curve at a place between those of ascending places, in proportion; before the first one
    the first, and behind the last one as the last two go on."""
    if place <= places[0] or len(places) == 1:
        return curves[0]
    index = next((i for i, other in enumerate(places) if place <= other), len(places) - 1)
    low, high = curves[index - 1], curves[index]
    share = (place - places[index - 1]) / (places[index] - places[index - 1])
    return np.maximum.accumulate(np.maximum(low, low + share * (high - low)))


# ---- what drafts bring


def chain_tokens(acceptance: Sequence[float]) -> list[float]:
    """Tokens that a step emits on average with chains of 0, 1, ... drafts, the bonus included, from
    the acceptance of each position where the ones before it were accepted."""
    tokens, reached = [1.0], 1.0
    for rate in acceptance:
        reached *= rate
        tokens.append(tokens[-1] + reached)
    return tokens


@dataclass(frozen=True, slots=True)
class Choice:
    """A draft, and what the model says of it: `tokens` and `seconds` of a step of each sequence,
    `over_plain` is its speed, that of plain decoding being 1."""

    levels: int
    nodes: int  # with the root
    tokens: float
    seconds: float
    over_plain: float
    choices: tuple[tuple[int, ...], ...] = ()  # of a static tree: paths of ranks


def chosen(costs: StepCosts, levels: int, nodes: int, tokens: float) -> Choice:
    """What the model says of a draft."""
    seconds = costs.step(nodes, levels, tokens) if levels else costs.plain
    return Choice(levels, nodes, tokens, seconds, tokens * costs.plain / seconds)


def best_chain(costs: StepCosts, acceptance: Sequence[float]) -> Choice:
    """The chain of 0 to len(acceptance) drafts that decodes fastest; the shorter of two equal
    ones."""
    choices = [
        chosen(costs, levels, levels + 1, tokens)
        for levels, tokens in enumerate(chain_tokens(acceptance))
    ]
    return max(choices, key=lambda choice: choice.over_plain)


def break_even(costs: StepCosts, levels: int) -> float | None:
    """The acceptance of each position from which chains of `levels` drafts are as fast as plain
    decoding; None where they never are."""

    def pays(rate: float) -> bool:
        tokens = chain_tokens([rate] * levels)[-1]
        return chosen(costs, levels, levels + 1, tokens).over_plain >= 1

    if not pays(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


Acceptance = Sequence[Sequence[float]]  # [depth][rank], each where the parent was accepted


def best_paths(acceptance: Acceptance, most: int) -> list[tuple[float, tuple[int, ...]]]:
    """The `most` nodes that are the likeliest to be accepted, with that probability, descending: a
    node's is its parent's times its rank's, so that parents come first.

    Siblings exclude each other, so the tokens of a step are 1 + the sum over its nodes, and no tree
    of as many nodes has more.
    """
    paths: list[tuple[float, tuple[int, ...]]] = []
    heap: list[tuple[float, int, tuple[int, ...]]] = []

    def offer(reached: float, path: tuple[int, ...]) -> None:
        depth = len(path)
        if depth < len(acceptance):
            for rank, rate in enumerate(acceptance[depth]):
                if rate > 0:
                    heapq.heappush(heap, (-reached * rate, depth + 1, (*path, rank)))

    offer(1.0, ())
    while heap and len(paths) < most:
        minus, _, path = heapq.heappop(heap)
        paths.append((-minus, path))
        offer(-minus, path)
    return paths


def best_static_tree(costs: StepCosts, acceptance: Acceptance, max_nodes: int) -> Choice:
    """The static tree of up to `max_nodes` nodes with the root that decodes fastest, by the
    acceptance of each rank at each depth. A level costs a pass of the draft, so that trees of each
    depth are compared."""
    best, kept = chosen(costs, 0, 1, 1.0), list[tuple[int, ...]]()
    for depth in range(1, len(acceptance) + 1):
        tokens, levels = 1.0, 0
        paths = best_paths(acceptance[:depth], max_nodes - 1)
        for count, (reached, path) in enumerate(paths, start=1):
            tokens, levels = tokens + reached, max(levels, len(path))
            choice = chosen(costs, levels, count + 1, tokens)
            if choice.over_plain > best.over_plain:
                best, kept = choice, [path for _, path in paths[:count]]
    return replace(best, choices=tuple(sorted(kept, key=lambda path: (len(path), path))))
