"""A model without an engine: the logits of a row are a hash of the (position, token) pairs that it
sees.

So a wrong mask, a wrong position or a KV row moved to the wrong place changes everything after it.
What is right is told by `plainly`, which has no cache, no mask and no session.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edgespec.backends.base import LaneRows
from edgespec.backends.call import Call, Result
from edgespec.backends.host import gather_idx, host_results
from edgespec.backends.masks import attention_mask, tree_mask
from edgespec.contract import GraphContract, GraphShape, RecurrentShape, Role, canonical_contract
from edgespec.prompts import CAPACITY, END_OF_SEQUENCE, MAX_LENGTH
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.loop.sequence import SequenceState, StepOutput
from edgespec.runtime.loop.session import Session
from edgespec.runtime.sampling.sampler import Sampler

VOCAB = 9
CONTRACT = canonical_contract(GraphShape(Role.BASE, 1, 1, 1, 2, 2, VOCAB, features=3))
RECURRENT = canonical_contract(
    GraphShape(
        Role.BASE, 1, 2, 1, 2, 2, VOCAB, features=3, recurrent=RecurrentShape((1,), 1, 1, 1, 1, 2)
    )
)
GREEDY = Sampler()


def logits_after(seen: Sequence[tuple[int, int]]) -> np.ndarray:
    """[V], from a set of (position, token) pairs."""
    digest = hashlib.blake2b(repr(sorted(seen)).encode(), digest_size=4 * VOCAB).digest()
    return (np.frombuffer(digest, np.uint32) / 2**30).astype(np.float32)


@dataclass(frozen=True)
class HashRows(LaneRows):
    """What a lane holds: (position, token) of its first slots."""

    slots: tuple[tuple[int, int], ...]
    can_crop: bool = True

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def nbytes(self) -> int:
        return 8 * len(self.slots)

    def prefix(self, count: int) -> HashRows:
        assert self.can_crop or count == len(self)
        return HashRows(self.slots[:count], self.can_crop)


@dataclass
class HashRunner:
    """A Runner whose cache holds (position, token) in each slot of each lane.

    Its results are views that the next call overwrites, here with NaN. With RECURRENT as its
    contract it keeps to what that asks for: each call continues what was committed, or begins anew.
    """

    table = None
    engine_s = 0.0
    prefill_chunk = max_rows = 256

    capacity: int
    lanes: int = 1
    contract: GraphContract = CONTRACT
    slots: list[list[tuple[int, int]]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # of each call
    batches: list[int] = field(default_factory=list)  # of each call
    widest: int = 0
    moved: int = 0  # rows that were not in their place
    zeroed: list[int] = field(default_factory=list)  # lanes
    lengths: list[int] = field(default_factory=list)  # committed rows of each lane
    given: list[np.ndarray] = field(default_factory=list)  # the last results

    def __post_init__(self) -> None:
        padding = (
            64 if self.lanes > 1 else 0
        )  # rows that a call may fill up with behind a full lane
        self.slots = [[(-1, -1)] * (self.capacity + padding) for _ in range(self.lanes)]
        self.lengths = [0] * self.lanes

    @property
    def recurrent(self) -> bool:
        return self.contract.shape.recurrent is not None

    def run(self, call: Call) -> list[Result]:
        mask = attention_mask(call, call.attention)
        batch, _, count, width = mask.shape
        assert width == call.write_indices.max() + count
        assert call.first_lane + batch <= self.lanes
        self.rows.append(count)
        self.batches.append(batch)
        for array in self.given:
            array.fill(np.nan)
        results = [self.run_lane(call, mask[b, 0], b, count) for b in range(batch)]
        self.given = [np.stack(parts) for parts in zip(*results, strict=True)]
        return host_results(call, *self.given)

    def run_lane(
        self, call: Call, mask: np.ndarray, b: int, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        slots, first = self.slots[call.first_lane + b], int(call.write_indices[b])
        positions, tokens = (
            rows[b, :, 0].astype(int).tolist() for rows in (call.rope_cos, call.inputs_embeds)
        )
        if self.recurrent:
            assert first in (0, self.lengths[call.first_lane + b])
            own = mask[:, first : first + count]
            np.testing.assert_array_equal(tree_mask(call)[b], own)
        slots[first : first + count] = list(zip(positions, tokens, strict=True))
        logits, hidden = [], []
        for row, visible in enumerate(mask):
            assert visible[first + row], "every row sees itself"
            assert not visible[first + row + 1 :].any(), (
                "the kernel's causality: no row sees a later slot"
            )
            if visible.sum() > 1 or first == 0:
                self.widest = max(self.widest, first + row + 1)
            logits.append(logits_after([slots[slot] for slot in np.flatnonzero(visible)]))
            hidden.append([*slots[first + row], visible.sum()])
        return np.stack(logits)[gather_idx(call)[b]], np.array(hidden, np.float32)

    def keep_rows(self, lane: int, slots: np.ndarray, start: int) -> None:
        assert (np.diff(slots) > 0).all()
        assert (slots >= start + np.arange(len(slots))).all()
        self.moved += int((slots != start + np.arange(len(slots))).sum())
        self.slots[lane][start : start + len(slots)] = [self.slots[lane][slot] for slot in slots]
        self.lengths[lane] = start + len(slots)

    def read_rows(self, lane: int, count: int) -> LaneRows:
        assert not self.recurrent or count == self.lengths[lane]
        return HashRows(tuple(self.slots[lane][:count]), not self.recurrent)

    def write_rows(self, lane: int, rows: LaneRows) -> None:
        assert isinstance(rows, HashRows)
        self.slots[lane][: len(rows)] = rows.slots
        self.lengths[lane] = len(rows)

    def free(self, lane: int) -> None:
        self.slots[lane] = [(-1, -1)] * len(self.slots[lane])
        self.lengths[lane] = 0

    def zero(self, lane: int) -> None:
        self.free(lane)
        self.zeroed.append(lane)

    def copy_lane(self, source: int, target: int, count: int) -> None:
        self.slots[target][:count] = self.slots[source][:count]
        self.lengths[target] = count

    def close(self) -> None: ...


class TokenRows:
    """Stands for the embedding table: the row of a token is the token."""

    def rows(self, tokens: np.ndarray) -> np.ndarray:
        return tokens[..., None].astype(np.float32)


class PositionRows:
    """Stands for the rotary table: the row of a position is the position."""

    def rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        row = positions[..., None].astype(np.float32)
        return row, row


def decoder_of(
    capacity: int, window: int | None = None, lanes: int = 1, *, recurrent: bool = False
) -> CachedDecoder:
    runner = HashRunner(capacity, lanes, RECURRENT if recurrent else CONTRACT)
    return CachedDecoder(runner, TokenRows(), PositionRows(), window)


def begin(session: Session, seq: SequenceState) -> StepOutput:
    """Read all of a prompt; the step of its first token."""
    session.admit(seq)
    output = None
    while output is None:
        output = session.prefill(seq)
    return output


def plainly(
    prompt: Sequence[int],
    sampler: Sampler,
    max_new: int,
    stop_ids: frozenset[int] = frozenset(),
    *,
    capacity: int = 10**6,
    window: int = 10**6,
) -> tuple[list[int], str]:
    """Tokens and finish reason, from the definition: one token after the other, each from all
    before it."""
    path = list(prompt)
    while True:
        path.append(sampler.pick(logits_after(list(enumerate(path))[-window:]), path))
        new = path[len(prompt) :]
        if path[-1] in stop_ids:
            return new, END_OF_SEQUENCE
        if len(new) == max_new:
            return new, MAX_LENGTH
        if len(path) == capacity + 1:  # the last token needs no row of its own
            return new, CAPACITY
