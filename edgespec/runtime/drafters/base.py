"""What a drafter is: it proposes trees of drafts and observes what was committed.

Knows the values that pass between the loop and a drafter. How drafts are accepted is not its
concern, and whether a drafter runs an engine is not the loop's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.call import HiddenStates
from edgespec.runtime.drafters.options import DrafterOptions
from edgespec.runtime.plans.draft_budget import DraftBudget
from edgespec.runtime.sampling.draft_sampler import DraftSampler
from edgespec.runtime.text.prompt_value import ImageSlots, cut
from edgespec.runtime.trees.tree import DraftPlan, DraftTree


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A lane that asks for a tree rooted at its pending token.

    With a `sampler` the accept rule compares a draft with what it was drawn from: a drafter that
    has probabilities draws its chain with it, and gives `DraftTree.drawn_from`. One that does not
    drafts as it always does. With a `budget` a drafter that is `Budgeted` leaves out what does not
    pay. `forced` are tokens that a grammar leaves no choice: a drafter that is `Continuing` begins
    its tree with them, and its plan counts what is behind; of others what agrees with them is kept.
    """

    lane: int
    pending: int
    plan: DraftPlan
    sampler: DraftSampler | None = None
    budget: DraftBudget | None = None
    forced: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """What was committed in a lane: m positions, each with the token that follows it.

    `hidden_states` are the base's aux hidden states at these positions, k*H wide, for a drafter
    that needs them; else None. They stay where the base's backend keeps them, and are valid until
    the base's next call: `take` copies rows, for calls of a draft engine; `numpy` gives numbers.

    `rope_positions` are the base's in a prompt with images: time, height and width. `images` stand
    for some of `tokens`, counted from the first of them.
    """

    lane: int
    hidden_states: HiddenStates | None  # of m rows
    tokens: NDArray[np.int64]  # [m]
    rope_positions: NDArray[np.int64] | None = None  # [m, 3]
    images: Sequence[ImageSlots] = ()

    def pieces(self, size: int) -> list[Observation]:
        """The same in pieces of at most `size` positions, one behind the other."""
        if len(self.tokens) <= size:
            return [self]
        pieces = []
        for start in range(0, len(self.tokens), size):
            rows = np.arange(start, min(start + size, len(self.tokens)))
            states = None if self.hidden_states is None else self.hidden_states.take(rows)
            rope_positions = None if self.rope_positions is None else self.rope_positions[rows]
            images = cut(self.images, start, start + len(rows))
            pieces.append(Observation(self.lane, states, self.tokens[rows], rope_positions, images))
        return pieces


class Snapshot(Protocol):
    """What a drafter remembers of a lane's prefix; opaque but for its size."""

    @property
    def nbytes(self) -> int:
        """Bytes that keeping it costs."""

    def __len__(self) -> int:
        """Pairs of a position and the token after it that it covers."""

    def prefix(self, count: int) -> Snapshot:
        """The same of the first `count` pairs."""


class Drafter(Protocol):
    """Drafts for as many sequences as there are lanes; each lane holds one sequence."""

    @property
    def needs_hidden_states(self) -> bool:
        """Whether observations are to carry the base's aux hidden states.

        A drafter that needs them observes the prompt as well, chunk by chunk. One that does not
        gets the prompt by `begin` and observes only what was generated.
        """

    @property
    def capacity(self) -> int | None:
        """Tokens of a sequence that it can follow; beyond them it drafts nothing. None: no
        limit."""

    @property
    def num_lanes(self) -> int | None:
        """Sequences that it can hold at a time. None: no limit."""

    @property
    def engine_s(self) -> float:
        """Seconds spent inside engines so far."""

    def begin(self, lane: int, tokens: Sequence[int], num_reused: int) -> None:
        """A sequence begins in a lane that was reset, or restored: `tokens` is its whole prompt, a
        Prompt value, whose images are still there.

        The base has the first `num_reused` tokens from the prefix cache: no observation covers
        them.
        """

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """One tree per request, within its plan; the root alone where nothing can be drafted."""

    def observe(self, observations: Sequence[Observation]) -> None:
        """Take in what was committed since the last observation of these lanes."""

    def reset(self, lane: int) -> None:
        """Forget a lane's sequence, if it holds one."""

    def move(self, source: int, target: int) -> None:
        """The sequence that began in one lane goes on in another, whose own has ended."""

    def snapshot(self, lane: int, count: int) -> Snapshot | None:
        """What it remembers of a lane's first `count` pairs, or of as many as it has seen; None
        where it keeps no state."""

    def restore(self, lane: int, snapshot: Snapshot) -> None:
        """Begin a lane with what `snapshot` gave; at least one more pair is observed before
        anything is proposed."""

    def close(self) -> None:
        """Free what it holds; closing twice is harmless."""


class TextDrafter:
    """What a Drafter has that reads tokens alone: no engine, no limit, and nothing to keep of a
    prefix, as it gets every prompt whole."""

    needs_hidden_states = False
    capacity: int | None = None
    num_lanes: int | None = None
    engine_s = 0.0

    def snapshot(self, lane: int, count: int) -> None:
        """None: there is no state."""

    def restore(self, lane: int, snapshot: Snapshot) -> None:
        """Never called, as there are no snapshots."""

    def close(self) -> None:
        """Nothing to free."""


class EndObserver:
    """A Drafter that needs no hidden states and observes the last step of a sequence as well, as
    far as its tokens belong to the answer. Others would pay for what they do not need."""


class Continuing:
    """A Drafter that drafts behind tokens that are not committed: `DraftRequest.forced`."""


class Tunable(ABC):
    """A Drafter with an engine whose options may change while it is open, so that `edgespec tune`
    need not open it again for each."""

    @abstractmethod
    def tune(self, options: DrafterOptions) -> None:
        """Draft with these options from the next step on; they are of the method's class."""


class Reserving(ABC):
    """A Drafter that wants to know, before a lane's first call, how long its sequence may
    become."""

    @abstractmethod
    def reserve(self, lane: int, tokens: int) -> None:
        """The sequence of a lane, which was reset or restored, will come to so many tokens at
        most. EnvironmentProblem where there is no memory for them."""


class PacksSnapshots(ABC):
    """A Drafter whose snapshots can be kept in a file, where its engine's runner packs rows."""

    @abstractmethod
    def pack(self, snapshot: Snapshot) -> dict[str, NDArray[Any]]:
        """The arrays of a snapshot, by name."""

    @abstractmethod
    def unpack(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Snapshot:
        """The snapshot of `count` pairs that `pack` of a drafter with this engine took apart."""


class PromptReader(ABC):
    """A Drafter that reads prompts by itself, chunk by chunk while the base does: a long one holds
    up others no longer than a chunk."""

    @abstractmethod
    def read_prompt(self, lane: int, count: int) -> None:
        """The base has read the first `count` tokens of the prompt that `begin` gave."""
