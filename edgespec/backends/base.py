"""What a backend offers: a runner that executes one engine. Knows the contract, no engine
library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.contract import GraphContract

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Call:
    """One run of an engine over B neighbouring lanes, `first_lane` the first of them.

    A lane is the KV cache of one sequence. This call's S rows go into a lane's slots from its write
    index on, and what stood there and behind is given up; T is at least S beyond the largest write
    index. T may be greater than the capacity by the padding of a batched engine, so that a full
    lane can be padded to its neighbours' rows.
    """

    inputs_embeds: Floats  # [B, S, H]
    rope_cos: Floats  # [B, S, rotary/2]
    rope_sin: Floats
    attention_mask: NDArray[np.bool_]  # [B, 1, S, T], True = attend
    write_indices: NDArray[np.int64]  # [B]
    gather_idx: NDArray[np.int64]  # [B, G]
    base_hidden: Floats | None = None  # drafts: exactly one of the two, [B, S, k*H]
    draft_hidden: Floats | None = None  # [B, S, Hd]
    tree_mask: NDArray[np.bool_] | None = (
        None  # recurrent layers: [B, S, S], which rows of the call a row follows
    )
    first_lane: int = 0
    target_hidden: Floats | None = (
        None  # drafts of blocks, this and the next two: [B, L, k*H], written before the S
    )
    context_cos: Floats | None = None  # [B, L, rotary/2]
    context_sin: Floats | None = None
    # [B, 1, S, T], for the layers with a window where others have none
    sliding_attention_mask: NDArray[np.bool_] | None = None
    # [B, S, rotary/2], for the layers that rotate otherwise
    local_rope_cos: Floats | None = None
    local_rope_sin: Floats | None = None

    @property
    def written(self) -> int:
        """Rows that the call writes into each lane."""
        context = 0 if self.target_hidden is None else self.target_hidden.shape[1]
        return int(self.inputs_embeds.shape[1] + context)


@dataclass(frozen=True, slots=True)
class Result:
    """Outputs of one run. They are views of the runner's buffers: copy what must outlive the next
    call."""

    logits: Floats  # [B, G, V]
    hidden_states: Floats | None  # [B, S, features]


class Table(Protocol):
    """An embedding: the rows of tokens."""

    def rows(self, tokens: NDArray[np.int64]) -> Floats:
        """[S] or [B, S] ids -> [..., H]."""


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LaneRows:
    """What a lane remembers of a sequence's prefix. Keys and values can be cut to a shorter one, a
    state cannot."""

    kv: Floats  # [2*attention layers, Hkv, tokens, D]
    state: Sized | None = None  # of recurrent layers, as the backend has it

    def __len__(self) -> int:
        return int(self.kv.shape[2])

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes + (self.state.nbytes if self.state is not None else 0)

    def prefix(self, count: int) -> LaneRows:
        """The same of the first `count` tokens; a state has no shorter prefix."""
        assert self.state is None or count == len(self)
        return LaneRows(self.kv[:, :, :count], self.state)


class Runner(Protocol):
    """An open engine with its own zero-filled KV cache."""

    contract: GraphContract
    capacity: int  # slots of a lane
    lanes: int  # sequences that it can hold
    table: Table | None  # the embedding, where the engine's head is it

    def run(self, call: Call) -> Result: ...

    def keep_rows(self, lane: int, slots: NDArray[np.int64], start: int) -> None:
        """Commit rows that stand behind the first `start` ones: copy the KV rows of `slots`
        (ascending, each >= its target) to start, start+1, ... in every layer. Where layers are
        recurrent, the rows are one path of the last call's, and each call but the first continues
        what was committed.
        """

    def read_rows(self, lane: int, count: int) -> LaneRows:
        """A copy of the first `count` rows of a lane; of recurrent layers, of all that it has
        committed."""

    def write_rows(self, lane: int, rows: LaneRows) -> None:
        """Put such a copy at the head of a lane and give up what stood behind."""

    def clear(self, lane: int) -> None:
        """Give up all rows of a lane: what a lane holds, all lanes pay for."""

    def wipe(self, lane: int) -> None:
        """The same for rows that may hold what is no number: kernels may multiply before they
        mask."""

    def copy_lane(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` KV rows of one lane to the head of another, whose rows behind are
        given up."""

    def close(self) -> None: ...


Advance = Callable[[int], None]
