"""Calls of a runner from arrays, and what it says as arrays, for tests that compare numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.backends.call import Attention, LaneAttention, Result
from edgespec.backends.host import HostStates


@dataclass(frozen=True)
class Outputs:
    """A batch of results."""

    logits: np.ndarray  # [B, G, V]
    hidden_states: np.ndarray | None  # [B, S, width]


def outputs_of(results: Sequence[Result]) -> Outputs:
    """Those of lanes with as many rows each; views where there is one lane."""
    logits = [result.logits.rows() for result in results]
    states = [r.hidden_states.numpy() for r in results if r.hidden_states is not None]
    batch = (lambda arrays: arrays[0][None]) if len(results) == 1 else np.stack
    return Outputs(batch(logits), batch(states) if states else None)


def attention_of(mask: np.ndarray) -> Attention:
    """What a mask [B, 1, S, T] says of all slots, the last of which are the rows' own."""
    lanes = [LaneAttention(0, lane, np.arange(lane.shape[1])) for lane in mask[:, 0]]
    return Attention(lanes)


def states_of(array: np.ndarray) -> list[HostStates]:
    """[B, S, width] lane by lane."""
    return [HostStates(lane) for lane in array]
