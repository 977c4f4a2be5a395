"""What passes between the runtime and a runner: a call, and what is asked of its results.

Knows shapes, and who may look into what: hidden states and logits stay where the backend keeps
them until somebody asks for numbers. Knows no engine library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]


# ---- what stays with the backend


class HiddenStates(Protocol):
    """Hidden states of rows, which may be on a device and of any float type.

    Those of a result are valid until the runner's next call; what `take` and `joined` give is a
    copy. They go back into calls of any runner of the pair.
    """

    def __len__(self) -> int:
        """Rows."""

    @property
    def nbytes(self) -> int:
        """The bytes of memory that they take."""

    def take(self, rows: Ids) -> HiddenStates:
        """A copy of some rows, in the order given."""

    def joined(self, others: Sequence[HiddenStates]) -> HiddenStates:
        """A copy of these rows and, behind them, those of the others."""

    def finite(self) -> bool:
        """Whether they hold no NaN and no Inf."""

    def numpy(self) -> Floats:
        """[rows, width] on the host; it may be a view."""


@dataclass(frozen=True, slots=True)
class Top:
    """The largest logits of R rows, descending, a NaN as the largest; ties go to the lowest id.
    `logsumexp` is that of a whole row: log-probabilities are `values` less it."""

    ids: Ids  # [R, K]
    values: Floats  # [R, K]
    logsumexp: Floats  # [R]


class Logits(Protocol):
    """Logits of one lane, a row for each that was gathered; of several heads one behind another
    for each row. They may be on a device, and are valid until the runner's next call; what `take`
    gives is a copy."""

    def __len__(self) -> int:
        """Rows."""

    @property
    def vocab_size(self) -> int:
        """Logits of a row."""

    def take(self, rows: Ids) -> Logits:
        """A copy of some rows, in the order given."""

    def first_rows(self, count: int) -> Logits:
        """The first `count` rows, not copied."""

    def first_ids(self, count: int) -> Logits:
        """The same rows of the first `count` ids alone, not copied."""

    def finite(self) -> bool:
        """Whether they hold no NaN and no Inf."""

    def best(self, row: int) -> tuple[int, float]:
        """The id of a row's largest logit, the lowest of equal ones, and the logit; a NaN, where
        there is one, counts as largest."""

    def top(self, count: int) -> Top:
        """The `count` largest of each row; all, where that is more than there are."""

    def row(self, row: int) -> Floats:
        """[V] of one row, on the host; it may be a view."""

    def rows(self) -> Floats:
        """[rows, V], on the host; it may be a view."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a run says of one lane, without the rows that only fill up."""

    logits: Logits  # of the rows gathered
    hidden_states: HiddenStates | None  # of the lane's rows, where the engine gives them


# ---- a call


@dataclass(frozen=True, slots=True)
class LaneAttention:
    """What the S rows of a lane attend to: all of its first `length` slots, and what `visible`
    says of the P slots behind those and of the S rows themselves.

    `positions` are those of the P + S.
    """

    length: int
    visible: Mask  # [S, P + S]
    positions: Ids  # [P + S]


@dataclass(frozen=True, slots=True)
class Attention:
    """What the rows of a call attend to in one kind of layer, lane by lane.

    A `window` hides what stands as many positions behind a row or more: of the first `length`
    slots, whose positions are their numbers, and of the rest. Rows of a block are not hidden from
    each other. `masks.attention_mask` makes the mask of it.
    """

    lanes: Sequence[LaneAttention]
    window: int | None = None


# What a call gives for an input of its graph, by the input's kind: rows, what they attend to, or
# hidden states lane by lane
Value = Floats | Attention | Sequence[HiddenStates]


@dataclass(frozen=True, slots=True)
class Call:
    """One run of an engine over B neighboring lanes, `first_lane` the first of them.

    A lane is the KV cache of one sequence. This call's S rows go into a lane's slots from its write
    index on, behind the L rows of a block's context, and what stood there and behind is dropped.
    Lanes have as many rows as `attention` says; those with fewer than S are filled up, and the rows
    that do so attend to themselves. The last slot may be behind the capacity by the padding of a
    batched engine, so that a full lane can be padded to its neighbors' rows.

    Beside what all decoders read, `extras` has what this graph reads by the names of its inputs
    (`contract.INPUTS`). Hidden states are given lane by lane, without filling rows.
    """

    inputs_embeds: Floats  # [B, S, H]
    rope_cos: Floats  # [B, S, rotary/2]
    rope_sin: Floats
    attention: Attention
    write_indices: Ids  # [B]
    gather: Sequence[Ids]  # of each lane, the rows that go through the lm_head
    extras: Mapping[str, Value] = field(default_factory=dict)
    first_lane: int = 0

    @classmethod
    def of(
        cls,
        values: Mapping[str, Value],
        write_indices: Ids,
        gather: Sequence[Ids],
        first_lane: int = 0,
    ) -> Call:
        """The call that gives `values` by the names of inputs."""
        own: dict[str, Any] = {field: values[name] for name, field in OWN.items()}
        extras = {name: value for name, value in values.items() if name not in OWN}
        return cls(
            **own, write_indices=write_indices, gather=gather, extras=extras, first_lane=first_lane
        )

    @classmethod
    def of_states(cls, hidden_states: Sequence[HiddenStates]) -> Call:
        """The call of heads over hidden states, those of a sequence each. Nothing else is read, and
        nothing is written."""
        rows = [len(states) for states in hidden_states]
        none = np.empty((len(rows), max(rows), 0), np.float32)
        places = [np.arange(count) for count in rows]
        seen = [LaneAttention(0, np.ones((len(own), len(own)), bool), own) for own in places]
        return cls(
            none,
            none,
            none,
            Attention(seen),
            np.zeros(len(rows), np.int64),
            places,
            {"base_hidden": hidden_states},
        )

    @property
    def values(self) -> dict[str, Value]:
        """What it gives, by the names of inputs."""
        return {name: getattr(self, own) for name, own in OWN.items()} | dict(self.extras)

    def array(self, name: str) -> Floats | None:
        """The rows [B, S, ...] that it gives for an input; None where it gives none."""
        value = getattr(self, OWN[name]) if name in OWN else self.extras.get(name)
        return cast("Floats | None", value)

    def attended(self, name: str) -> Attention:
        """What its rows attend to where the graph reads this mask."""
        return cast(Attention, getattr(self, OWN[name]) if name in OWN else self.extras[name])

    def states(self, name: str) -> Sequence[HiddenStates] | None:
        """The hidden states that it gives for an input; None where it gives none."""
        return cast("Sequence[HiddenStates] | None", self.extras.get(name))

    @property
    def is_block(self) -> bool:
        """Whether it runs a block behind its context: rows of a block see each other."""
        return "context_cos" in self.extras

    @property
    def rows(self) -> int:
        """S."""
        return int(self.inputs_embeds.shape[1])

    @property
    def context_rows(self) -> int:
        """L; 0 where there is no context."""
        context = self.array("context_cos")
        return 0 if context is None else context.shape[1]

    @property
    def written(self) -> int:
        """Rows that the call writes into each lane."""
        return self.rows + self.context_rows

    @property
    def width(self) -> int:
        """Slots up to the last that the call writes."""
        return int(self.write_indices.max()) + self.written


# Input -> the field of a call that gives it
OWN = {
    "inputs_embeds": "inputs_embeds",
    "rope_cos": "rope_cos",
    "rope_sin": "rope_sin",
    "attention_mask": "attention",
}
