"""Block drafts that are steered towards the truth or away from it, and held to the slow references.

Knows engines and drafters of blocks. Knows nothing of which method drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from edgespec.backends.base import LaneRows
from edgespec.backends.host import HostLogits
from edgespec.prompts import SamplingParams
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.block_drafter import BlockDrafter
from edgespec.runtime.engine import Engine
from edgespec.runtime.lanes.block import BlockOutput
from edgespec.runtime.loop.generation import Response
from edgespec.runtime.trees.tree import DraftTree
from tests import reference
from tests.lossless import answers
from tests.lossless.answers import VOCAB
from tests.parity.dflash_reference import DFlashReference

CAPACITY, LANES = 64, 4
GREEDY = SamplingParams(temperature=0.0, seed=0)
SAMPLED = SamplingParams(temperature=1.0, top_k=0, top_p=0.9, seed=5)
CLOSE = {"rtol": 2e-4, "atol": 5e-4}  # of logits up to 5: float32 behind a hybrid is off by 3e-4

Turn = Callable[[np.ndarray, int, bool], None]


def far(slot: np.ndarray, token: int, right: bool) -> None:
    """The true token becomes by far the best one of a slot's logits, or another does."""
    slot[token if right else (token + 1) % VOCAB] = 1e4  # beyond what heads add


def near(slot: np.ndarray, token: int, right: bool) -> None:
    """The true token becomes the best one, or is second by a little, where a tree still has it."""
    best = float(slot.max())
    if right:
        slot[token] = best + 3
    elif slot.argmax() != token:
        slot[token] = best - 1e-3
    else:
        slot[(token + 1) % VOCAB] = best + 1e-3


@dataclass(frozen=True)
class Block:
    """What the engine said of a block behind `before`, the tokens known by then; the pending one is
    the last of them."""

    before: tuple[int, ...]
    logits: np.ndarray


class Steering:
    """A real drafter whose logits are turned, to a slot's true token with probability `right`. What
    the engine itself said is kept in `blocks`."""

    scripts: Sequence[Sequence[int]]
    right: float
    turn: Turn

    def steer(self, scripts: Sequence[Sequence[int]], right: float, turn: Turn, lanes: int) -> None:
        self.scripts, self.right, self.rng = scripts, right, np.random.default_rng(0)
        self.turn = turn
        self.told: dict[int, list[int]] = {lane: [] for lane in range(lanes)}
        self.blocks: list[Block] = []
        self.lengths: list[int] = []

    def observe(self, observations: Sequence[Observation]) -> None:
        for item in observations:
            self.told[item.lane] += item.tokens.tolist()
        super().observe(observations)  # type: ignore[misc]

    def reset(self, lane: int) -> None:
        super().reset(lane)  # type: ignore[misc]
        self.told[lane] = []

    def restore(self, lane: int, rows: LaneRows) -> None:
        super().restore(lane, rows)  # type: ignore[misc]
        self.told[lane] = next(
            [*script[1 : len(rows) + 1]] for script in self.scripts if len(script) > len(rows)
        )

    def move(self, source: int, target: int) -> None:
        super().move(source, target)  # type: ignore[misc]
        self.told[target] = self.told[source]

    def drafted(self, request: DraftRequest, output: BlockOutput) -> DraftTree:
        told = self.told[request.lane]
        script = next((s for s in self.scripts if list(s[1 : len(told) + 1]) == told), [])
        self.blocks.append(Block((*script[:1], *told), output.logits.rows().copy()))
        turned = output.logits.rows().copy()
        for slot, token in zip(turned, script[len(told) + 1 :], strict=False):
            self.turn(slot, token, self.rng.random() < self.right)
        states = output.states
        tree: DraftTree = super().drafted(request, BlockOutput(HostLogits(turned), states))  # type: ignore[misc]
        self.lengths.append(len(tree) - 1)
        return tree


@dataclass(frozen=True)
class Pair:
    """Engines of the same draft for one sequence and for four, the references, and how logits are
    turned."""

    one: Engine
    four: Engine
    ref: DFlashReference
    model: Any
    turn: Turn
    told: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)

    @property
    def first_slot(self) -> int:
        return getattr(self.ref, "first_slot", 1)

    @contextmanager
    def steered(
        self, engine: Engine, scripts: Sequence[Sequence[int]], right: float
    ) -> Iterator[Any]:
        """An engine with its drafter steered, which shares the real one's engine and state."""
        real = engine.drafter
        assert isinstance(real, BlockDrafter)
        drafter: Any = object.__new__(type("Steered", (Steering, type(real)), {}))
        vars(drafter).update(vars(real))
        drafter.steer(scripts, right, self.turn, len(real.lanes))
        engine.session.drafter = drafter
        yield drafter
        engine.session.drafter = real

    def assert_true(self, blocks: Sequence[Block]) -> None:
        """Each block against the reference, from the features of all tokens but the pending one."""
        for block in reversed(blocks):
            assert len(block.before) > 1
            *committed, pending = block.before
            states = self.states(committed)
            first = self.first_slot
            wanted = self.ref.block(states, pending, len(block.logits) + first)[first:]
            np.testing.assert_allclose(block.logits, wanted.numpy(), **CLOSE)

    def states(self, tokens: list[int]) -> torch.Tensor:
        """What the base says of tokens; a longer text of before says it of its beginning."""
        count = len(tokens)
        for known, states in self.told:
            if known[:count] == tokens:
                return states[:count]
        _, hidden = reference.base_hidden_states(self.model, torch.tensor([tokens]))
        states = reference.gather_aux_hidden_states(hidden, self.ref.aux_layers)[0]
        self.told.append((tokens, states))
        return states

    def restored(self) -> None:
        """The engines draft with their own drafters again, and keep no prefix."""
        for engine in (self.one, self.four):
            engine.session.drafter = engine.drafter
            engine.forget_prefixes()


def prompt_of(length: int) -> list[int]:
    return answers.prompt_of(length, seed=7)


def plainly(pair: Pair, prompt: Sequence[int], sampling: SamplingParams, count: int) -> Response:
    return answers.plainly(pair.one, prompt, answers.asked(sampling, count))
