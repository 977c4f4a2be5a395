"""Calls of an engine that are made of its contract alone: for checks and times that need no tokens.

Knows what inputs a graph has, and fills them with small random numbers. Knows no engine library and
no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from edgespec.backends.call import Attention, Call, Floats, Ids, LaneAttention, Value
from edgespec.backends.host import HostStates
from edgespec.contract import GraphContract, GraphShape, Kind, TensorSpec, graph_inputs
from edgespec.rope import Rotary, rotations


def made_call(
    contract: GraphContract, lane: int, start: int, rows: int, *, context: int = 1, heads: int = 1
) -> Call:
    """The call of one lane that writes `rows` rows from slot `start` on, each of which sees all
    before it; a block draft's stand behind `context` rows. The last `heads` rows have logits. The
    same sizes give the same numbers."""
    shape, rng = contract.shape, np.random.default_rng((lane, start, rows))
    read = context if shape.block else 0
    sizes = {"B": 1, "S": rows, "S_base": rows, "L": read}

    def numbers(spec: TensorSpec) -> Floats:
        return 0.5 * rng.standard_normal(spec.dims(**sizes), np.float32)

    before = start + read
    positions = {"S": before + np.arange(rows)[None], "L": start + np.arange(read)[None]}
    seen = LaneAttention(before, np.tri(rows, dtype=bool), positions["S"][0])
    values = made_values(shape, positions, Attention([seen]), numbers)
    if shape.heads:
        return Call.of_states(cast("list[HostStates]", values["base_hidden"]))
    gathered = [np.arange(rows - heads, rows)]
    return Call.of(values, np.array([start], np.int64), gathered, first_lane=lane)


def made_values(
    shape: GraphShape,
    positions: Mapping[str, Ids],
    attention: Attention,
    numbers: Callable[[TensorSpec], Floats],
) -> dict[str, Value]:
    """What a call gives to a graph of this shape: `numbers` makes the rows of an input, all masks
    hide the same, and of two inputs of which one is read it is the first."""
    tables = [PlainRope(shape.rotary_dim), PlainRope(shape.local_rotary_dim)]
    values: dict[str, Value] = dict(rotations(graph_inputs(shape), tables, positions))
    for row in graph_inputs(shape, Kind.MASK, Kind.ROWS, Kind.STATES):
        if row.kind is Kind.MASK:
            values[row.name] = attention
        elif not row.instead_of:
            made = numbers(row.spec(shape))
            states = row.kind is Kind.STATES
            values[row.name] = [HostStates(lane) for lane in made] if states else made
    return values


@dataclass(frozen=True)
class PlainRope(Rotary):
    """The plain rotary embedding with base 10000."""

    rotary_dim: int

    def rows(self, positions: Ids) -> tuple[Floats, Floats]:
        """Cosines and sines [B, S, rotary/2] of positions [B, S]."""
        half = self.rotary_dim // 2
        angles = positions[..., None] * 10000.0 ** -(np.arange(half) / max(half, 1))
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
