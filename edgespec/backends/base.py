"""What a backend offers: a runner that executes one engine. Knows the contract, no engine library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.contract import GraphContract
from edgespec.rope import RopeTable

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Call:
    """One run of an engine, batch 1. This call's S rows go into the last S of the T slots that the mask spans."""

    inputs_embeds: Floats  # [1, S, H]
    rope_cos: Floats  # [1, S, rotary/2]
    rope_sin: Floats
    attention_mask: NDArray[np.bool_]  # [1, 1, S, T], True = attend
    gather_idx: NDArray[np.int64]  # [1, G]
    base_hidden: Floats | None = None  # drafts: exactly one of the two, [1, S, k*H]
    draft_hidden: Floats | None = None  # [1, S, Hd]


@dataclass(frozen=True, slots=True)
class Result:
    """Outputs of one run. They are views of the runner's buffers: copy what must outlive the next call."""

    logits: Floats  # [1, G, V]
    hidden_states: Floats | None  # [1, S, features]


class Runner(Protocol):
    """An open engine with its own zero-filled KV cache."""

    contract: GraphContract
    capacity: int  # slots of the cache

    def run(self, call: Call) -> Result: ...

    def move_rows(self, slots: NDArray[np.int64], start: int) -> None:
        """Copy the KV rows of `slots` (ascending, each >= its target) to start, start+1, ... in every layer."""

    def close(self) -> None: ...


Advance = Callable[[int], None]
Golden = dict[str, NDArray[Any]]


def golden_calls(golden: Golden, rope: RopeTable) -> list[Call]:
    """The calls that a golden file stands for: the prompt into an empty cache, then the tree behind it."""
    calls = []
    for label in ("prompt", "tree"):
        ids, positions = golden[f"{label}_ids"], golden[f"{label}_positions"]
        mask = golden[f"{label}_attention_mask"]
        width = len(ids) if label == "prompt" else mask.shape[-1]
        cos, sin = rope.rows(positions[None])
        calls.append(
            Call(
                golden[f"{label}_inputs_embeds"],
                cos,
                sin,
                np.ascontiguousarray(mask[..., :width]),
                np.arange(len(ids), dtype=np.int64)[None],
                used(golden, f"{label}_base_hidden"),
                used(golden, f"{label}_draft_hidden"),
            )
        )
    return calls


def used(golden: Golden, name: str) -> Floats | None:
    value = golden.get(name)
    return None if value is None or value.shape[1] == 0 else value
