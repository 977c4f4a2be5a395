"""Single steps of an idle engine, timed: of the base over trees of any size, of its drafter by
levels and by what it observes, behind any context.

Knows lanes, trees and a clock. Contexts are not read: how long a pass takes is not a matter of what
stands in the cache. What is measured when, and how often, is known in `cost_measure`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.backends.base import LaneRows
from edgespec.backends.call import HiddenStates, Ids
from edgespec.errors import LimitError
from edgespec.runtime.drafters.base import Drafter, DraftRequest, Observation, TextDrafter
from edgespec.runtime.drafters.engine_drafter import EngineDrafter
from edgespec.runtime.engine import Engine
from edgespec.runtime.lanes.block import BlockDecoder
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.loop.sequence import SequenceState
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.text.prompt_value import PromptValue
from edgespec.runtime.trees.tree import DraftPlan, DraftTree

GREEDY = Sampler()
NO_END = 2**31 - 1  # tokens of an answer that does not end here
CHAIN_ROWS = 8  # up to so many rows are a chain; more are a tree
CHILDREN = 4  # of each node of such a tree
FILLED = 64  # rows of a cache that are written at once
KEPT_ROWS = 16  # rows of hidden states that drafters observe


@dataclass(frozen=True, slots=True, order=True)
class StepPlace:
    """So many sequences at a time, behind so many tokens each."""

    context: int
    batch: int


class RandomTokens:
    """Tokens in a random order, again and again: neighbors are different ones."""

    def __init__(self, vocab_size: int) -> None:
        self.order, self.next = np.random.default_rng(0).permutation(vocab_size), 0

    def take(self, count: int) -> Ids:
        """The next ones; all different, where there are as many."""
        places = np.arange(self.next, self.next + count) % len(self.order)
        self.next = int(places[-1] + 1) % len(self.order) if count else self.next
        return self.order[places]


class MadeTrees(TextDrafter):
    """A Drafter that proposes what it was given, whatever it is asked for."""

    def __init__(self) -> None:
        self.trees: list[tuple[Ids, Ids]] = []  # tokens and parents of each lane

    def begin(self, lane: int, tokens: Sequence[int], num_reused: int) -> None:
        """Nothing."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A tree for each lane, made anew as drafters make them."""
        return [DraftTree(*self.trees[request.lane]) for request in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing."""

    def reset(self, lane: int) -> None:
        """Nothing."""

    def move(self, source: int, target: int) -> None:
        """Nothing."""


# ---- lanes behind a context


class Held:
    """The lanes of an engine with memory, each as if so many tokens were committed there. Those of
    recurrent layers are read, as their state has to continue what was committed."""

    def __init__(self, decoder: CachedDecoder | BlockDecoder, tokens: RandomTokens) -> None:
        self.decoder, self.tokens = decoder, tokens
        self.states: dict[int, LaneRows] = {}  # by the context

    @property
    def recurrent(self) -> bool:
        """Whether a context has to be read."""
        return isinstance(self.decoder, CachedDecoder) and self.decoder.recurrent

    def begin(self, place: StepPlace, room: int) -> None:
        """Lanes for a place, with room for so many rows behind. EnvironmentProblem where there is
        no memory for them."""
        for lane in range(len(self.decoder.lanes)):
            self.decoder.reset(lane)
        for lane in range(place.batch):
            self.decoder.reserve(lane, place.context + room)
        if self.recurrent and place.context not in self.states:
            self.states[place.context] = self.read(place.context)

    def read(self, context: int) -> LaneRows:
        """What a lane holds after so many tokens."""
        assert isinstance(self.decoder, CachedDecoder)
        self.decoder.read(0, self.tokens.take(context))
        rows = self.decoder.snapshot(0, context)
        self.decoder.reset(0)
        return rows

    def hold(self, place: StepPlace) -> None:
        """Let the lanes be where they began, whatever was done since."""
        for lane in range(place.batch):
            if self.recurrent:
                self.decoder.restore(lane, self.states[place.context])
            else:
                self.decoder.hold(lane, place.context)

    def fill(self, place: StepPlace) -> None:
        """Write the rows of a context once: reading memory that was never written costs less. The
        lanes must have run a call at this place, so that the cache has the size for it."""
        if self.recurrent:
            return
        for lane in range(place.batch):
            for start in range(0, place.context, FILLED):
                slots = np.arange(start + 1, min(start + FILLED, place.context) + 1)
                self.decoder.runner.keep_rows(lane, slots, start)

    def end(self) -> None:
        """Free all lanes."""
        self.states.clear()
        for lane in range(len(self.decoder.lanes)):
            self.decoder.reset(lane)


# ---- the base


class BaseSteps:
    """Steps of an idle engine's loop whose drafts cost nothing, with the accept rule, the commit
    and the host's work. Nothing of it reaches an answer; `end` frees the lanes."""

    def __init__(self, engine: Engine, sampler: Sampler = GREEDY) -> None:
        self.session, self.sampler = engine.session, sampler
        self.base, self.most = engine.base, engine.config.limits.verify_tree_size
        self.tokens = RandomTokens(engine.config.component.vocab_size)
        self.held, self.made = Held(engine.base, self.tokens), MadeTrees()
        self.place, self.prompt = StepPlace(0, 0), list[int]()

    def room(self, context: int) -> int:
        """Rows of a tree that a lane has room for behind so many tokens, and goes on."""
        return min(self.most, self.base.capacity - context - 2)

    def begin(self, place: StepPlace, *, fill: bool = False) -> None:
        """Go to a place; one step there is thrown away."""
        self.place, self.prompt = place, self.tokens.take(place.context + 1).tolist()
        self.held.begin(place, self.room(place.context))
        self.step(1)
        if fill:
            self.held.fill(place)

    def step(self, rows: int, batch: int | None = None) -> float:
        """Seconds of a step over so many rows of each sequence, the drafts of which are wrong; of
        the first `batch` sequences alone, where that is given."""
        self.held.hold(self.place)
        self.session.restart()
        self.session.running = list(self.sequences(rows))[:batch]
        if rows > 1:
            self.made.trees = [self.tree(seq.pending, rows) for seq in self.session.running]
            self.session.drafters = [self.made]
            self.session.groups = [(self.made, self.session.running)]
        began = time.perf_counter()
        steps = self.session.step()
        seconds = time.perf_counter() - began
        for _, output in steps:
            if output.error is not None:
                raise output.error
        return seconds

    def sequences(self, rows: int) -> Iterator[SequenceState]:
        """One for each lane, which drafts where there is more than one row."""
        plan = DraftPlan(1, rows - 1, rows) if rows > 1 else None
        for lane in range(self.place.batch):
            made = None if plan is None else self.made
            seq = SequenceState(
                PromptValue.of(self.prompt), self.sampler, NO_END, plan=plan, drafter=made
            )
            seq.lane = lane
            yield seq

    def tree(self, pending: int, rows: int) -> tuple[Ids, Ids]:
        """Tokens and parents of a tree whose nodes are different tokens."""
        tokens = np.concatenate([[pending], self.tokens.take(rows - 1)])
        order = np.arange(rows)
        return tokens, order - 1 if rows <= CHAIN_ROWS else (order - 1) // CHILDREN

    def hidden_states(self) -> HiddenStates | None:
        """A copy of KEPT_ROWS rows of what drafters observe, or of as many as there is room for;
        None where the base gives none. A place was begun."""
        self.held.hold(self.place)
        count = min(KEPT_ROWS, self.base.room(0), self.base.prefill_chunk)
        part = self.base.causal(0, self.tokens.take(count), np.array([count - 1]))
        (result,) = self.base.run([part])
        states = result.hidden_states
        return None if states is None else states.take(np.arange(count))

    def end(self) -> None:
        """Free the lanes."""
        self.session.restart()
        self.held.end()


# ---- its drafter


class DraftSteps:
    """What an open engine's drafter takes: it proposes, observes what it proposed, and proposes
    again, as in a run whose drafts are right. `states` are hidden states of the base for it.

    A plain step of one sequence of `base` comes before all that is observed, as a pass does in a
    run: it leaves nothing of the draft's weights in the processor's cache.
    """

    def __init__(
        self, drafter: Drafter, states: HiddenStates | None, base: BaseSteps, num_lanes: int
    ) -> None:
        self.drafter, self.states, self.base, self.num_lanes = drafter, states, base, num_lanes
        tokens = self.tokens = base.tokens
        self.held = Held(drafter.decoder, tokens) if isinstance(drafter, EngineDrafter) else None
        self.place, self.prompt = StepPlace(0, 0), list[int]()

    def begin(self, place: StepPlace, plan: DraftPlan, *, fill: bool = False) -> None:
        """Go to a place, where the base is; one round there is thrown away."""
        assert self.base.place == place
        self.place, self.prompt = place, self.tokens.take(place.context).tolist()
        for lane in range(self.num_lanes):
            self.drafter.reset(lane)
        if self.held is not None:
            self.held.begin(place, room_of(plan))
        self.propose(plan)
        if self.held is not None and fill:
            self.held.fill(place)

    def hold(self) -> None:
        """Let the lanes be where they began."""
        for lane in range(self.place.batch):
            if isinstance(self.drafter, EngineDrafter):
                self.drafter.lanes[lane] = self.drafter.empty()
            else:
                self.drafter.reset(lane)
        if self.held is not None:
            self.held.hold(self.place)
        for lane in range(self.place.batch):
            self.drafter.begin(lane, self.prompt, 0)

    def seconds(self, plan: DraftPlan) -> float:
        """Those of `propose`."""
        return self.propose(plan)[1]

    def propose(self, plan: DraftPlan) -> tuple[list[DraftTree], float]:
        """What all lanes draft by a plan behind one observed token, and the seconds that it took.
        LimitError where nothing can be drafted here."""
        self.hold()
        first = self.tokens.take(1)
        self.base.step(1, batch=1)
        self.observe([first] * self.place.batch)
        return self.drafted(plan, int(first[0]))

    def time(self, plan: DraftPlan, shortest: DraftPlan, usual: float) -> tuple[float, float]:
        """Seconds of proposing by a plan, and of observing as many tokens as it has levels, whether
        the drafter pays for those in `observe` or in what it then proposes: `shortest` drafts one
        level, in `usual` seconds behind one token. LimitError as in `propose`."""
        trees, seconds = self.propose(plan)
        paths = [path_of(tree, plan.steps, self.tokens) for tree in trees]
        self.base.step(1, batch=1)
        began = time.perf_counter()
        self.observe(paths)
        observed = time.perf_counter() - began
        _, after = self.drafted(shortest, int(paths[0][-1]))
        return seconds, observed + after - usual

    def observe(self, paths: Sequence[Ids]) -> None:
        """Show each lane what was committed there."""
        observations = []
        for lane, tokens in enumerate(paths):
            rows = np.arange(len(tokens))
            states = None if self.states is None else self.states.take(rows)
            observations.append(Observation(lane, states, tokens))
        self.drafter.observe(observations)

    def drafted(self, plan: DraftPlan, pending: int) -> tuple[list[DraftTree], float]:
        """What all lanes draft by a plan, and the seconds that it took."""
        requests = [DraftRequest(lane, pending, plan) for lane in range(self.place.batch)]
        began = time.perf_counter()
        trees = self.drafter.propose(requests)
        seconds = time.perf_counter() - began
        if isinstance(self.drafter, EngineDrafter):
            states = (self.drafter.lanes[request.lane] for request in requests)
            if any(getattr(state, "full", False) for state in states):
                message = f"the draft has no room behind {self.place.context} tokens, or gives NaN"
                raise LimitError(message, "Nothing is measured there.")
        return trees, seconds

    def end(self) -> None:
        """Free the lanes."""
        for lane in range(self.num_lanes):
            self.drafter.reset(lane)
        if self.held is not None:
            self.held.end()


def room_of(plan: DraftPlan) -> int:
    """Rows of a lane that a round of a plan takes at most: what is observed, and a draft."""
    return 2 + plan.steps + max(plan.verify_size, plan.steps * plan.top_k + 1)


def path_of(tree: DraftTree, levels: int, tokens: RandomTokens) -> Ids:
    """Tokens of a step that accepts a tree's first path, up to so many levels with the bonus; where
    the tree is shorter others follow."""
    path, node = list[int](), 0
    while len(path) < levels - 1:
        children = np.flatnonzero(tree.parents == node)
        if not len(children):
            break
        node = int(children[0])
        path.append(int(tree.tokens[node]))
    return np.concatenate([np.array(path, np.int64), tokens.take(max(1, levels - len(path)))])
