"""Puts the golden calls of an export to an engine and compares what it answers.

Knows what a golden file stands for, and how a batch could go wrong. Knows no engine library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Call, Floats, Result, Runner
from edgespec.config import RopeConfig
from edgespec.errors import BuildError
from edgespec.rope import RopeTable

Golden = dict[str, NDArray[Any]]

# Largest difference from the golden outputs, relative to their largest value. Sums in float32 in another order differ
# by about 1e-6 here; a wrong mask, layout or weight by more than 1e-2.
GOLDEN_TOLERANCE = 1e-4


def check_golden(runner: Runner, golden: Golden, rope: RopeConfig, capacity: int) -> float:
    """The largest relative difference from the golden outputs; BuildError where it is beyond the tolerance."""
    worst = 0.0
    calls = golden_calls(golden, RopeTable.of(rope, capacity))
    for arrange in ARRANGEMENTS if runner.lanes > 1 else ARRANGEMENTS[:1]:
        for label, call in zip(("prompt", "tree"), calls, strict=True):
            for member, result in arrange(runner, call):
                worst = max(worst, golden_difference(golden, label, result, member))
    return worst


def golden_difference(golden: Golden, label: str, result: Result, member: int) -> float:
    """How far one sequence of a batch is from a golden call."""
    worst = 0.0
    for name, found in (("logits", result.logits), ("hidden_states", result.hidden_states)):
        wanted = golden.get(f"{label}_{name}")
        if wanted is None or found is None:
            continue
        difference = float(np.abs(found[member] - wanted[0]).max() / max(np.abs(wanted).max(), 1e-6))
        if not difference <= GOLDEN_TOLERANCE:  # a NaN is not within any tolerance
            what = f"the engine's {name} on the golden {label} differ by {difference:.1e} of their largest value"
            raise BuildError(what, f"Allowed is {GOLDEN_TOLERANCE:.0e}. This ONNX Runtime computes another result.")
        worst = max(worst, difference)
    return worst


Members = Iterator[tuple[int, Result]]  # which sequence of the batch is to be golden


def alone(runner: Runner, call: Call) -> Members:
    yield 0, runner.run(call)


def twice(runner: Runner, call: Call) -> Members:
    """The same sequence in two lanes."""
    result = runner.run(joined(call, call))
    yield from ((0, result), (1, result))


def before_another(runner: Runner, call: Call) -> Members:
    yield 0, runner.run(joined(call, disturbed(call)))


def behind_another(runner: Runner, call: Call) -> Members:
    yield 1, runner.run(joined(disturbed(call), call))


# How the golden calls are put to an engine: a batch kernel that mixes up its sequences passes with equal ones.
ARRANGEMENTS = (alone, twice, before_another, behind_another)


def joined(first: Call, second: Call) -> Call:
    """Two calls of one sequence as one call of two."""
    arrays: dict[str, Any] = {}
    for name in (f.name for f in fields(Call) if f.name != "first_lane"):
        one, other = getattr(first, name), getattr(second, name)
        arrays[name] = None if one is None else np.concatenate([one, other])
    return Call(**arrays)


def disturbed(call: Call) -> Call:
    """The same call of another sequence: its rows in another order."""
    return replace(call, inputs_embeds=np.ascontiguousarray(call.inputs_embeds[:, ::-1]))


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
                np.array([width - len(ids)], np.int64),
                np.arange(len(ids), dtype=np.int64)[None],
                used(golden, f"{label}_base_hidden"),
                used(golden, f"{label}_draft_hidden"),
            )
        )
    return calls


def used(golden: Golden, name: str) -> Floats | None:
    value = golden.get(name)
    return None if value is None or value.shape[1] == 0 else value
