"""Calls of an engine that are made of its contract alone: for checks and times that need no tokens.

Knows what inputs a graph has, and fills them with small random numbers. Knows no engine library and
no model.
"""

from __future__ import annotations

import numpy as np

from edgespec.backends.call import Attention, Call, Floats, LaneAttention
from edgespec.backends.host import HostStates
from edgespec.contract import GraphContract


def made_call(
    contract: GraphContract, lane: int, start: int, rows: int, *, context: int = 1, heads: int = 1
) -> Call:
    """The call of one lane that writes `rows` rows from slot `start` on, each of which sees all
    before it; a block draft's stand behind `context` rows. The last `heads` rows have logits. The
    same sizes give the same numbers."""
    shape, rng = contract.shape, np.random.default_rng((lane, start, rows))

    def numbers(*dims: int) -> Floats:
        return 0.5 * rng.standard_normal(dims, np.float32)

    def states(count: int) -> list[HostStates]:
        return [HostStates(numbers(count, shape.base_features))]

    if shape.heads:
        return Call.of_states(states(rows))
    read = context if shape.block else 0
    before = start + read
    seen = LaneAttention(before, np.tri(rows, dtype=bool), before + np.arange(rows))
    attention = Attention([seen])
    cos, sin = turned(before, rows, shape.rotary_dim)
    local = turned(before, rows, shape.local_rotary_dim) if shape.local_rotary_dim else (None, None)
    deepstack = shape.deepstack_width
    behind = turned(start, read, shape.rotary_dim) if shape.block else (None, None)
    return Call(
        numbers(1, rows, shape.hidden_size),
        cos,
        sin,
        attention,
        np.array([start], np.int64),
        [np.arange(rows - heads, rows)],
        base_hidden=states(rows) if shape.reads_hidden_states else None,
        first_lane=lane,
        target_hidden=states(read) if shape.block else None,
        context_cos=behind[0],
        context_sin=behind[1],
        sliding_attention=attention if shape.sliding else None,
        local_rope_cos=local[0],
        local_rope_sin=local[1],
        deepstack_embeds=numbers(1, rows, deepstack) if deepstack else None,
    )


def turned(start: int, rows: int, rotary_dim: int) -> tuple[Floats, Floats]:
    """Cosines and sines [1, rows, rotary/2] of positions from `start` on, of the plain rotary
    embedding with base 10000."""
    half = rotary_dim // 2
    steps = 10000.0 ** -(np.arange(half) / max(half, 1))
    angles = (start + np.arange(rows))[None, :, None] * steps
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
