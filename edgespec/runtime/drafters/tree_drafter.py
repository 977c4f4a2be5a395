"""Drafts level by level: dynamic trees (arXiv 2406.16858) with chains as their narrowest form, and
static ones, from an engine that goes on with its own hidden states (arXiv 2401.15077, 2503.01840).

Knows the draft's engine, its vocabulary map and its pairs of (aux hidden state, next token). The
draft's cache holds only rows made from the base's own hidden states; the rows of a tree are dropped
when the tree is done. The trees of several sequences grow level by level together, one call a
level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.call import Floats, HiddenStates, Ids, Logits, Result
from edgespec.backends.engine_config import EngineConfig
from edgespec.runtime.drafters.base import Continuing, DraftRequest, Observation, Snapshot
from edgespec.runtime.drafters.candidates import top_log_probs
from edgespec.runtime.drafters.engine_drafter import EngineDrafter
from edgespec.runtime.drafters.row import DraftEngine
from edgespec.runtime.lanes.decoder import CachedDecoder, DecoderRows
from edgespec.runtime.plans.draft_budget import Budgeted
from edgespec.runtime.sampling.draft_sampler import Distribution
from edgespec.runtime.text.prompt_value import ImageSlots
from edgespec.runtime.trees.static_tree import Ranks, StaticPlan, children_of
from edgespec.runtime.trees.tree import DraftTree, TreePool

FIRST: Ids = np.zeros(1, np.int64)
ALONE = np.ones((1, 1), bool)


@dataclass
class TreeLane:
    """Where a sequence's drafts begin."""

    last_logits: Logits | None = None  # [1, Vd], at the last observed position
    last_hidden: HiddenStates | None = None  # of one row
    # the cache could not take all pairs, or they held NaN or Inf: no drafts from there on
    full: bool = False


@dataclass
class Growth:
    """A tree in the making, whose next level the beam's nodes grow. The beam's states, where the
    draft goes on with them, and what it sees are those of its parents. `drawn` is what each draft
    of a chain was drawn from, where they are drawn. `survival` is how likely the pool's first
    entries are to be accepted, where a budget asks."""

    request: DraftRequest
    steps: int
    hidden: HiddenStates | None  # of the beam
    ancestors: NDArray[np.bool_]  # [beam, scratch]
    beam: list[int] = field(default_factory=lambda: [-1])  # pool entries, -1: the root
    pool: TreePool = field(default_factory=TreePool)
    drawn: list[Distribution] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)

    def force(self, tokens: Sequence[int]) -> None:
        """The tree begins with a chain of these."""
        for token in tokens:
            self.beam = self.pool.add_children(
                self.beam[0], np.array([token]), np.zeros(1, np.float32)
            )
            self.survival.append(1.0)

    def extend(self, ids: Ids, log_probs: Floats) -> list[int]:
        """The children of the beam's nodes [beam, K] join the pool, the best K of them are the next
        beam (arXiv 2406.16858). Returns the row of each one's parent."""
        row_of: dict[int, int] = {}
        for row, parent in enumerate(self.beam):
            born = self.pool.add_children(parent, ids[row], log_probs[row])
            row_of |= dict.fromkeys(born, row)
        self.beam = self.pool.best([*row_of], self.request.plan.top_k)
        return [row_of[entry] for entry in self.beam]

    def goes_on(self, level: int) -> bool:
        """Whether a level behind `level` is drafted: the plan has one, and it pays."""
        budget, pool = self.request.budget, self.pool
        if budget is None or self.steps <= level:
            return self.steps > level
        survival = self.survival
        budget.extend(survival, pool.parents, pool.probs(len(survival)))
        reached, nodes = sum(survival[entry] for entry in self.beam), 1 + len(pool.tokens)
        size = min(nodes, self.request.plan.verify_size + len(self.request.forced))
        if not budget.goes_on(reached, level, size, len(self.beam)):
            self.steps = level
        return self.steps > level


@dataclass
class StaticGrowth(Growth):
    """A tree whose nodes are chosen beforehand, by rank: `children` are those of each node."""

    children: Mapping[Ranks, Ranks] = field(kw_only=True)
    paths: list[Ranks] = field(default_factory=list)  # of each pool entry

    def force(self, tokens: Sequence[int]) -> None:
        """What is forced is not of the static tree, which begins behind it."""
        super().force(tokens)
        self.paths += [()] * len(tokens)

    def extend(self, ids: Ids, log_probs: Floats) -> list[int]:
        """The chosen children of the beam's nodes join the pool, those that have children are the
        next beam. Returns the row of each one's parent."""
        rows: list[int] = []
        beam: list[int] = []
        for row, parent in enumerate(self.beam):
            path = self.paths[parent] if parent >= 0 else ()
            ranks = [*self.children[path]]
            born = self.pool.add_children(parent, ids[row, ranks], log_probs[row, ranks])
            self.paths += [(*path, rank) for rank in ranks]
            for entry in born:
                if self.paths[entry] in self.children:
                    beam.append(entry)
                    rows.append(row)
        self.beam = beam
        return rows


class TreeDrafter(EngineDrafter[CachedDecoder, TreeLane], Budgeted, Continuing):
    """`d2t` [Vd] are offsets: base id = draft id + d2t[draft id].

    With `image_rows` the slots of images are read as the images' rows, else as the image token:
    drafts are trained in either way. Rows of another width than the draft's are never read.
    """

    def __init__(
        self,
        decoder: CachedDecoder,
        d2t: Ids,
        empty: Callable[[], TreeLane] = TreeLane,
        *,
        image_rows: bool = False,
    ) -> None:
        super().__init__(decoder, empty)
        self.d2t, self.image_rows = d2t, image_rows

    def observe(self, observations: Sequence[Observation]) -> None:
        """Extend the cache by the base's hidden states, each paired with its next token; of a long
        prompt as many a call as the engine reads at a time."""
        chunk = self.decoder.prefill_chunk
        waiting = [item.pieces(chunk) for item in observations if self.can_take(item)]
        while waiting:
            self.take([pieces.pop(0) for pieces in waiting])
            waiting = [own for own in waiting if own and not self.lanes[own[0].lane].full]

    def take(self, taken: Sequence[Observation]) -> None:
        """Extend the cache in one call, and keep where drafts begin."""
        parts = [
            self.decoder.causal(
                item.lane,
                item.tokens,
                np.array([len(item.tokens) - 1]),
                item.hidden_states,
                item.rope_positions,
                self.images_of(item),
            )
            for item in taken
        ]
        for item, result in zip(taken, self.decoder.extend(parts), strict=True):
            assert result.hidden_states is not None
            state = self.lanes[item.lane]
            state.last_logits = result.logits.take(FIRST)
            state.last_hidden = result.hidden_states.take(np.array([len(item.tokens) - 1]))
            if not state.last_logits.finite():
                self.stop_drafting(item.lane)

    def images_of(self, item: Observation) -> Sequence[ImageSlots]:
        """The images whose rows are read in place of the image token."""
        width = self.decoder.runner.contract.shape.hidden_size
        fits = all(image.rows.embeds.shape[1] == width for image in item.images)
        return item.images if self.image_rows and fits else ()

    def can_take(self, item: Observation) -> bool:
        """Whether a lane goes on with an observation; one that cannot drafts no more."""
        assert item.hidden_states is not None
        state = self.lanes[item.lane]
        state.full = state.full or len(item.tokens) > self.decoder.room(item.lane)
        state.full = state.full or not item.hidden_states.finite()
        return not state.full

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Grow each tree level by level, all of them together, and verify the best nodes of each:
        of a static tree all."""
        growing = {one.lane: self.first_level(one) for one in requests if not one.forced}
        growing |= self.behind_forced([one for one in requests if one.forced])
        grown = [growth for growth in growing.values() if growth]
        for level in range(1, max((growth.steps for growth in grown), default=0)):
            if deeper := [growth for growth in grown if growth.goes_on(level)]:
                self.grow(deeper, level)
        return [
            self.finish(growth) if growth else DraftTree.root_only(request.pending)
            for request in requests
            for growth in [growing.get(request.lane)]
        ]

    def levels(self, request: DraftRequest) -> int:
        """Levels that a request's tree has at most; 0 where nothing can be drafted."""
        state, plan = self.lanes[request.lane], request.plan
        rows = min(self.room(request.lane), self.decoder.runner.max_rows) - len(request.forced)
        return 0 if state.full or rows < 0 or plan.verify_size == 1 else plan.levels_within(rows)

    def first_level(self, request: DraftRequest) -> Growth | None:
        """The first level: the best continuations of the last observed position. None where
        nothing can be drafted."""
        state, steps = self.lanes[request.lane], self.levels(request)
        if not steps:
            return None
        assert state.last_logits is not None
        return self.begun(request, steps, state.last_logits, state.last_hidden)

    def behind_forced(self, requests: Sequence[DraftRequest]) -> dict[int, Growth]:
        """The first levels behind what is forced, by lane: one call runs all of it."""
        steps = {one.lane: self.levels(one) for one in requests}
        asking = [one for one in requests if steps[one.lane]]
        results = self.decoder.run([self.forced_rows(one) for one in asking]) if asking else []
        growing = {}
        for one, result in zip(asking, results, strict=True):
            logits, states = self.said(result)
            if not logits.finite():
                self.stop_drafting(one.lane)
                continue
            hidden = None if states is None else states.take(np.array([len(one.forced) - 1]))
            growing[one.lane] = self.begun(one, steps[one.lane], logits, hidden)
        return growing

    def forced_rows(self, request: DraftRequest) -> DecoderRows:
        """What is forced as rows of one call. Each goes on with the state of the last observed
        position: their own would take a call each and are accepted no more often."""
        hidden, order = self.lanes[request.lane].last_hidden, np.arange(len(request.forced))
        return DecoderRows(
            request.lane,
            np.array(request.forced, np.int64),
            self.decoder.lanes[request.lane].length + order,
            order[:, None] >= order,
            order[-1:],
            draft_hidden=None if hidden is None else hidden.take(0 * order),
        )

    def begun(
        self, request: DraftRequest, steps: int, logits: Logits, hidden: HiddenStates | None
    ) -> Growth:
        """A tree of what is forced and one level behind it, by the logits [1, Vd] there."""
        plan, ancestors = request.plan, np.ones((1, len(request.forced)), bool)
        if isinstance(plan, StaticPlan):
            children = children_of(plan.choices)
            growth: Growth = StaticGrowth(request, steps, hidden, ancestors, children=children)
        else:
            growth = Growth(request, steps, hidden, ancestors)
        growth.force(request.forced)
        self.extend(growth, logits, hidden, ancestors)
        return growth

    def grow(self, growing: Sequence[Growth], level: int) -> None:
        """Run the beams one level on: their children join the pools."""
        parts = [self.beam_rows(growth, level) for growth in growing]
        for growth, part, result in zip(growing, parts, self.decoder.run(parts), strict=True):
            logits, states = self.said(result)
            if logits.finite():
                self.extend(growth, logits, states, part.visible)
            else:
                growth.steps, self.lanes[growth.request.lane].full = 0, True

    def said(self, result: Result) -> tuple[Logits, HiddenStates | None]:
        """The logits [R, Vd] of what may be proposed behind each row, and the states to go on
        with; None where the draft reads tokens alone."""
        assert result.hidden_states is not None
        return result.logits, result.hidden_states

    def extend(
        self,
        growth: Growth,
        logits: Logits,
        hidden: HiddenStates | None,
        visible: NDArray[np.bool_],
    ) -> None:
        """Grow a tree by what its beam's rows say: `hidden` and `visible` are theirs."""
        rows = np.array(growth.extend(*self.candidates(growth, logits)), np.int64)
        growth.hidden = None if hidden is None else hidden.take(rows)
        growth.ancestors = visible[rows]

    def candidates(self, growth: Growth, logits: Logits) -> tuple[Ids, Floats]:
        """The base's ids with which the drafts go on after each row of logits [R, Vd], and their
        log-probabilities, [R, K] each: the best ones, or for a chain that is drawn the one
        drawn."""
        request, draws = growth.request, growth.request.sampler
        if draws is None or request.plan.top_k != 1:
            ids, log_probs = top_log_probs(logits, request.plan.top_k)
            return self.to_base(ids), log_probs
        own = self.to_base(np.arange(logits.vocab_size))
        token, distribution = draws.draw(logits.row(0), growth.pool.tokens, own)
        growth.drawn.append(distribution)
        log_prob = np.log(distribution.prob(token))
        return np.array([[token]], np.int64), np.array([[log_prob]], np.float32)

    def beam_rows(self, growth: Growth, level: int) -> DecoderRows:
        """A lane's part of a call: the beam at one depth, each node seeing its ancestors."""
        lane, count = growth.request.lane, len(growth.beam)
        itself = ALONE if count == 1 else np.eye(count, dtype=bool)
        visible = np.concatenate([growth.ancestors, itself], 1)
        tokens = np.array([growth.pool.tokens[i] for i in growth.beam], np.int64)
        depth = len(growth.request.forced) + level
        positions = np.full(count, self.decoder.lanes[lane].length + depth - 1)
        return DecoderRows(
            lane, tokens, positions, visible, np.arange(count), draft_hidden=growth.hidden
        )

    def stop_drafting(self, lane: int) -> None:
        """No drafts from here on: the rows may hold NaN or Inf."""
        self.lanes[lane].full = True
        self.decoder.zero(lane)

    def finish(self, growth: Growth) -> DraftTree:
        """The tree of the best nodes."""
        lane = growth.request.lane
        self.leave(growth)
        if self.lanes[lane].full:
            self.stop_drafting(lane)
        most = growth.request.plan.verify_size + len(growth.request.forced)
        size = min(most, 1 + len(growth.pool.tokens))
        pending, budget = growth.request.pending, growth.request.budget
        levels = growth.pool.depths[-1] - len(growth.request.forced)
        # A chain that was drawn is not cut by its own tokens: they would be drawn otherwise
        if budget is not None and not growth.drawn:
            tree = budget.select(growth.pool, pending, size, growth.survival)
            return replace(tree, levels=levels)
        tree = replace(growth.pool.select(pending, size), levels=levels)
        if not growth.drawn:
            return tree
        drawn = [*[None] * (1 + len(growth.request.forced)), *growth.drawn]
        tree = replace(tree, drawn_from=drawn[: len(tree)])
        if budget is None:
            return tree
        return replace(tree, probs=np.array([1.0, *growth.pool.probs(0)], np.float32)[: len(tree)])

    def leave(self, growth: Growth) -> None:
        """A tree is done: its scratch rows are dropped."""
        self.decoder.drop_scratch(growth.request.lane)

    def room(self, lane: int) -> int:
        """Rows of a tree that a lane has room for."""
        return self.decoder.room(lane)

    def to_base(self, ids: Ids) -> Ids:
        """The base's ids of the draft's own, by the offsets of d2t."""
        return ids + self.d2t[ids]

    def snapshot(self, lane: int, count: int) -> Snapshot | None:
        """Copies of the first `count` KV rows, or of as many as there are."""
        return self.decoder.snapshot(lane, min(count, self.decoder.lanes[lane].length))


# ---- for the rows of methods that draft so


def cached_decoder(draft: DraftEngine) -> CachedDecoder:
    """A draft's engine with its memory."""
    return CachedDecoder.of(draft.runner, draft.table, draft.config.component)


def draft_sizes(base: EngineConfig, draft: EngineConfig | None) -> tuple[int, int, int]:
    """Nodes that the base verifies, nodes that the draft makes, and the draft's vocabulary."""
    assert draft is not None
    nodes, rows = draft.limits.max_draft_tree_size, draft.component.draft_vocab_size
    assert nodes is not None
    assert rows is not None
    return base.limits.verify_tree_size, nodes, rows
