"""Drafts without an engine: what a row says is a hash of all that it sees, its own hidden state
included.

So a row that sees another ancestor, stands at another position or goes on with another row's state
says something else, and with it all below it. What is right is told by `said_of` and `block_said`,
which have no cache, no mask and no beam.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edgespec.backends.base import LaneRows
from edgespec.backends.call import Call, Result
from edgespec.backends.host import gather_idx, host_results, stacked_states
from edgespec.backends.masks import attention_mask
from edgespec.contract import (
    GraphContract,
    GraphShape,
    Kind,
    Role,
    canonical_contract,
    graph_inputs,
)
from edgespec.runtime.lanes.block import BlockDecoder, MaskSpec
from edgespec.runtime.lanes.decoder import CachedDecoder
from tests.unit.runtime.hash_model import PositionRows, TokenRows

VOCAB = 7  # of the draft
WIDTH = 2  # of the base's aux hidden states, and of the draft's own
LEVELS = canonical_contract(
    GraphShape(Role.DRAFT, 1, 1, 1, 2, 2, VOCAB, features=WIDTH, base_features=WIDTH)
)
BLOCKS = canonical_contract(
    GraphShape(Role.DRAFT, 1, 1, 1, 2, 2, VOCAB, base_features=WIDTH, block=True)
)
# Of drafts whose first slot drafts; their states go to heads that read them
BLOCKS_WITH_STATES = canonical_contract(
    GraphShape(Role.DRAFT, 1, 1, 1, 2, 2, VOCAB, features=WIDTH, base_features=WIDTH, block=True)
)
BLOCKS_WITH_STATES_TWO_MASKS = canonical_contract(
    GraphShape(
        Role.DRAFT,
        1,
        1,
        1,
        2,
        2,
        VOCAB,
        features=WIDTH,
        base_features=WIDTH,
        block=True,
        sliding=True,
    )
)
BLOCKS_TWO_MASKS = canonical_contract(
    GraphShape(Role.DRAFT, 1, 1, 1, 2, 2, VOCAB, base_features=WIDTH, block=True, sliding=True)
)

Slot = tuple[object, ...]
Broken = tuple[tuple[int, int], ...]
EMPTY: Slot = ("nothing",)


@dataclass(frozen=True)
class Said:
    """Of one row."""

    logits: np.ndarray  # [VOCAB]
    hidden: np.ndarray  # [WIDTH]


def said_of(*seen: Sequence[Slot]) -> Said:
    """From the slots that a row sees, once for each kind of mask."""
    words = repr([sorted(map(repr, slots)) for slots in seen]).encode()
    digest = np.frombuffer(
        hashlib.blake2b(words, digest_size=4 * (VOCAB + WIDTH)).digest(), np.uint32
    )
    values = (digest >> 12).astype(np.float32) / 2**18  # exact, 0 to 4
    return Said(values[:VOCAB], values[VOCAB:])


@dataclass(frozen=True)
class SlotRows(LaneRows):
    """What a lane holds: its first slots."""

    slots: tuple[Slot, ...]
    can_crop: bool = True

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def nbytes(self) -> int:
        return 8 * len(self.slots)

    def prefix(self, count: int) -> SlotRows:
        return SlotRows(self.slots[:count])


@dataclass
class SlotRunner:
    """A Runner whose cache holds in each slot of each lane what was put there. Results are views
    that the next call overwrites, here with zeros.

    Where a row sees a (lane, token) of `broken`, its logits are NaN.
    """

    table = None
    engine_s = 0.0
    prefill_chunk = max_rows = 256

    capacity: int
    lanes: int = 1
    contract: GraphContract = LEVELS
    broken: Broken = ()
    calls: list[Call] = field(default_factory=list)
    zeroed: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    given: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = [[EMPTY] * (self.capacity + 64) for _ in range(self.lanes)]

    def run(self, call: Call) -> list[Result]:
        batch = len(call.attention.lanes)
        assert call.width == call.write_indices.max() + call.written
        assert call.first_lane + batch <= self.lanes
        self.calls.append(call)
        for array in self.given:
            array.fill(0)
        rows = [self.run_lane(call, b) for b in range(batch)]
        logits = np.stack([[row.logits for row in lane] for lane in rows])
        picked = np.take_along_axis(logits, gather_idx(call)[..., None], 1)
        hidden = np.stack([[row.hidden for row in lane] for lane in rows])
        self.given = [picked, hidden]
        return host_results(call, picked, hidden if self.contract.shape.features else None)

    def run_lane(self, call: Call, b: int) -> list[Said]:
        slots, start = self.slots[call.first_lane + b], int(call.write_indices[b])
        slots[start : start + call.written] = [*context_of(call, b), *rows_of(call, b)]
        kinds = [call.attended(row.name) for row in graph_inputs(self.contract.shape, Kind.MASK)]
        masks = [attention_mask(call, kind)[b, 0] for kind in kinds]
        own = start + call.written - len(masks[0])
        return [
            self.row(call.first_lane + b, own + row, [mask[row] for mask in masks])
            for row in range(len(masks[0]))
        ]

    def row(self, lane: int, own: int, visible: list[np.ndarray]) -> Said:
        assert all(mask[own] for mask in visible), "every row sees itself"
        seen = [[self.slots[lane][slot] for slot in np.flatnonzero(mask)] for mask in visible]
        said = said_of(*seen)
        tokens = {slot[2] for part in seen for slot in part if slot[0] == "row"}
        if any((lane, token) in self.broken for token in tokens):
            return Said(np.full_like(said.logits, np.nan), said.hidden)
        return said

    def keep_rows(self, lane: int, slots: np.ndarray, start: int) -> None:
        self.slots[lane][start : start + len(slots)] = [self.slots[lane][slot] for slot in slots]

    def read_rows(self, lane: int, count: int) -> LaneRows:
        return SlotRows(tuple(self.slots[lane][:count]))

    def write_rows(self, lane: int, rows: LaneRows) -> None:
        assert isinstance(rows, SlotRows)
        self.slots[lane][: len(rows)] = rows.slots

    def free(self, lane: int) -> None:
        self.freed.append(lane)
        self.slots[lane] = [EMPTY] * len(self.slots[lane])

    def zero(self, lane: int) -> None:
        self.zeroed.append(lane)
        self.slots[lane] = [EMPTY] * len(self.slots[lane])

    def copy_lane(self, source: int, target: int, count: int) -> None:
        assert source != target
        self.slots[target][:count] = self.slots[source][:count]

    def close(self) -> None: ...


def context_of(call: Call, b: int) -> list[Slot]:
    cos, given = call.array("context_cos"), call.states("target_hidden")
    if cos is None or given is None:
        return []
    positions = cos[b, :, 0].astype(int).tolist()
    states = stacked_states(given, call.context_rows)[b].tolist()
    return [context_slot(*pair) for pair in zip(positions, states, strict=True)]


def rows_of(call: Call, b: int) -> list[Slot]:
    states: list[list[float]] = [[]] * call.inputs_embeds.shape[1]
    if not call.is_block:
        ((name, _),) = call.extras.items()
        states = stacked_states(call.states(name) or [], call.rows)[b].tolist()
    positions, tokens = (
        rows[b, :, 0].astype(int).tolist() for rows in (call.rope_cos, call.inputs_embeds)
    )
    return [row_slot(*row) for row in zip(positions, tokens, states, strict=True)]


def row_slot(position: int, token: int, state: Sequence[float] = ()) -> Slot:
    return "row", position, token, tuple(state)


def context_slot(position: int, state: Sequence[float]) -> Slot:
    return "context", position, tuple(state)


def levels_of(capacity: int, lanes: int = 1, broken: Broken = ()) -> CachedDecoder:
    return CachedDecoder(SlotRunner(capacity, lanes, LEVELS, broken), TokenRows(), PositionRows())


def blocks_of(
    capacity: int,
    lanes: int = 1,
    masks: Sequence[MaskSpec] = (MaskSpec(),),
    broken: Broken = (),
    first_slot: int = 1,
) -> BlockDecoder:
    one, two = (
        (BLOCKS_WITH_STATES, BLOCKS_WITH_STATES_TWO_MASKS)
        if first_slot == 0
        else (BLOCKS, BLOCKS_TWO_MASKS)
    )
    runner = SlotRunner(capacity, lanes, one if len(masks) == 1 else two, broken)
    return BlockDecoder(runner, TokenRows(), PositionRows(), masks, first_slot)


def block_said(context: np.ndarray, tokens: Sequence[int], masks: Sequence[MaskSpec]) -> np.ndarray:
    """Logits [S-1, VOCAB] of a block behind all of a lane's context [n, WIDTH], from the definition
    of its masks."""
    rows = [said.logits for said in block_rows_said(context, tokens, masks)[1:]]
    return np.array(rows, np.float32).reshape(-1, VOCAB)


def block_rows_said(
    context: np.ndarray, tokens: Sequence[int], masks: Sequence[MaskSpec]
) -> list[Said]:
    """Of each row of such a block, the first one included."""
    known = len(context)
    block = [row_slot(known + j, token) for j, token in enumerate(tokens)]

    def seen(row: int, spec: MaskSpec) -> list[Slot]:
        return [
            context_slot(p, state)
            for p, state in enumerate(context.tolist())
            if spec.window is None or known + row - p < spec.window
        ] + (block[: row + 1] if spec.causal else block)

    return [said_of(*(seen(row, spec) for spec in masks)) for row in range(len(tokens))]
