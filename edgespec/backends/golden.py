"""Puts the golden calls of an export to an engine and compares what it computes.

Knows what a golden file stands for, and how a batch could go wrong. Knows no engine library: how
close an engine has to come, and what its user can do, are asked of the backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from edgespec.backends.base import (
    AccuracySpec,
    Remedies,
    RoundingMargin,
    Runner,
    noop,
)
from edgespec.backends.call import (
    Attention,
    Call,
    Floats,
    HiddenStates,
    LaneAttention,
    Mask,
    Result,
    Value,
)
from edgespec.backends.golden_file import Golden
from edgespec.backends.host import HostStates
from edgespec.config import RopeConfig
from edgespec.contract import INPUTS, Kind, inputs_named
from edgespec.errors import GoldenMismatch
from edgespec.rope import RopeTable, rotations

Done = Callable[[], None]
ROUNDING_TRIALS = 4
CALLS = ("prompt", "tree")
CHANGED = "Or the export was changed after it was written: export the checkpoint again."


@dataclass(frozen=True, slots=True)
class Agreement:
    """How an engine's outputs agree with the golden ones: the largest relative difference, the
    smallest cosine, and how far the size of one is from that of the golden output, at most."""

    difference: float = 0.0
    cosine: float = 1.0
    scale: float = 0.0

    def __or__(self, other: Agreement) -> Agreement:
        """The worse of both; a NaN stays."""
        return Agreement(
            float(np.maximum(self.difference, other.difference)),
            float(np.minimum(self.cosine, other.cosine)),
            float(np.maximum(self.scale, other.scale)),
        )


def check_golden(
    runner: Runner,
    golden: Golden,
    ropes: Sequence[RopeConfig],
    spec: AccuracySpec,
    remedies: Remedies,
    done: Done = noop,
) -> Agreement:
    """How the engine agrees with the golden outputs; GoldenMismatch where it does not. `done` is
    called after each of its `num_passes`.

    With `spec.min_cosine`, for weights that are rounded, the direction of each output is compared,
    and batches with what the engine itself says of one sequence alone.
    """
    prompt, tree = golden_calls(golden, ropes)
    calls = dict(zip(CALLS, (prompt, tree), strict=True))
    tolerance = Tolerance(spec.tolerance, remedies.mismatch)
    if spec.min_cosine is None:
        return check_calls(runner, golden, calls, tolerance, done)
    agreement, own = own_outputs(runner, golden, calls, spec, remedies, done)
    check_calls(runner, golden | own, calls, tolerance, done)
    return agreement


def num_passes(lanes: int, golden: Golden, spec: AccuracySpec) -> int:
    """The passes of `check_golden`, and of `rounding` where the engine has a margin."""
    arrangements = len(ARRANGEMENTS) if lanes > 1 else 1
    compared = len(CALLS) * (arrangements + (spec.min_cosine is not None))
    if spec.margin is None:
        return compared
    by_row = "prompt_target_hidden" not in golden
    rows = golden["prompt_logits"].shape[1]
    return compared + ROUNDING_TRIALS * (rows if by_row else 1)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest difference of an output, relative to its largest value, and what a larger one
    means."""

    value: float
    remedy: str


def check_calls(
    runner: Runner, wanted: Golden, calls: Mapping[str, Call], tolerance: Tolerance, done: Done
) -> Agreement:
    """Each call in every arrangement that the engine has lanes for, against the wanted outputs."""
    worst = Agreement()
    for arrange in ARRANGEMENTS if runner.lanes > 1 else ARRANGEMENTS[:1]:
        for label, call in calls.items():
            for result in arrange(runner, call):
                worst |= agreement(wanted, label, result, tolerance)
            done()
            keep_prompt(runner, label, call, lanes=1 if arrange is alone else 2)
    return worst


def own_outputs(
    runner: Runner,
    golden: Golden,
    calls: Mapping[str, Call],
    spec: AccuracySpec,
    remedies: Remedies,
    done: Done,
) -> tuple[Agreement, Golden]:
    """How the engine's outputs of one sequence alone agree with the golden ones, and those outputs
    by their names in a golden file. GoldenMismatch where they point elsewhere or have another
    size."""
    worst, own = Agreement(), Golden()
    for label, call in calls.items():
        (result,) = runner.run(call)
        done()
        keep_prompt(runner, label, call)
        worst |= agreement(golden, label, result)
        check_direction(label, worst, spec, remedies)
        own |= {f"{label}_{name}": value[None].copy() for name, value in outputs(result).items()}
    return worst, own


def keep_prompt(runner: Runner, label: str, call: Call, lanes: int = 1) -> None:
    """Commit the prompt's rows in the first `lanes` lanes, so that the tree follows them."""
    if label == "prompt":
        for lane in range(lanes):
            runner.keep_rows(lane, np.arange(call.inputs_embeds.shape[1]), 0)


def agreement(
    golden: Golden, label: str, result: Result, tolerance: Tolerance | None = None
) -> Agreement:
    """How one sequence of a batch agrees with a golden call. Raises GoldenMismatch beyond the
    tolerance."""
    computed = outputs(result)
    stored = {name: golden.get(f"{label}_{name}") for name in computed}
    wanted = {
        n: rows[0].reshape(computed[n].shape) for n, rows in stored.items() if rows is not None
    }
    return compared(computed, wanted, label, tolerance)


def compared(
    computed: Mapping[str, Floats],
    wanted: Mapping[str, Floats],
    label: str,
    tolerance: Tolerance | None = None,
) -> Agreement:
    """How an engine's outputs agree with the wanted ones. Raises GoldenMismatch beyond the
    tolerance."""
    worst = Agreement()
    for name, rows in wanted.items():
        own = computed[name]
        difference = float(np.abs(own - rows).max()) / max(float(np.abs(rows).max()), 1e-6)
        # a NaN is not within any tolerance
        if tolerance is not None and not difference <= tolerance.value:
            message = (
                f"the engine's {name} on the golden {label} differ by {difference:.1e} of their"
                " largest value"
            )
            raise GoldenMismatch(
                message, f"Allowed is {tolerance.value:.0e}. {tolerance.remedy} {CHANGED}"
            )
        worst |= Agreement(difference, cosine(own, rows), scale(own, rows))
    return worst


def outputs(result: Result) -> dict[str, Floats]:
    """The outputs of a sequence by name, on the host: logits [G, V], and hidden_states [S, width]
    where the engine has them."""
    arrays = {"logits": result.logits.rows()}
    if result.hidden_states is not None:
        arrays["hidden_states"] = result.hidden_states.numpy()
    return arrays


def cosine(first: Floats, second: Floats) -> float:
    """The cosine of two arrays of one shape, flattened and in float64; 0 for zeros."""
    a, b = first.astype(np.float64).ravel(), second.astype(np.float64).ravel()
    return float(a @ b) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12)


def scale(computed: Floats, wanted: Floats) -> float:
    """How far the size of `computed` along `wanted` is from that of `wanted`, relative to it; 0
    where that is zeros."""
    a, b = computed.astype(np.float64).ravel(), wanted.astype(np.float64).ravel()
    size = float(b @ b)
    return abs(float(a @ b) / size - 1) if size > 0 else 0.0


def check_direction(
    label: str, agreement: Agreement, spec: AccuracySpec, remedies: Remedies
) -> None:
    """GoldenMismatch where outputs of weights that are rounded point elsewhere than the golden
    ones, or have another size."""
    assert spec.min_cosine is not None
    said = f"with what it rounds the engine's outputs on the golden {label}"
    # a NaN is not within any bound
    if not agreement.cosine >= spec.min_cosine:
        message = f"{said} have a cosine of {agreement.cosine:.{digits(spec.min_cosine)}f}"
        raise GoldenMismatch(
            message, f"At least {spec.min_cosine} is asked for. {remedies.too_coarse}"
        )
    if spec.max_scale is not None and not agreement.scale <= spec.max_scale:
        message = f"{said} differ in size by {100 * agreement.scale:.2g} %"
        raise GoldenMismatch(
            message, f"Allowed is {100 * spec.max_scale:.2g} %. {remedies.mismatch} {CHANGED}"
        )


def digits(bound: float) -> int:
    """How many digits behind the point show that a cosine is below its bound: three at least."""
    return max(3, 1 - math.floor(math.log10(max(1 - bound, 1e-12))))


def rounding(
    runner: Runner,
    golden: Golden,
    ropes: Sequence[RopeConfig],
    margin: RoundingMargin,
    done: Done = noop,
) -> float:
    """The margin, in nats, within which kernels for one row and for many may choose another token.

    The golden prompt at once against row by row, and again with its embeddings moved by less than
    any difference that counts: kernels that round activations to 8 bits pass on that a value stands
    near an edge, or do not, by chance. `done` is called after each pass but the first.
    """
    prompt, _ = golden_calls(golden, ropes)
    rng, worst = np.random.default_rng(0), 0.0
    at_once = only_logits(runner, prompt).copy()
    for _ in range(ROUNDING_TRIALS):
        moved = moved_by_noise(prompt, margin.noise, rng)
        if prompt.is_block:  # its rows see each other: there is no one row alone
            worst = max(worst, float(np.abs(only_logits(runner, moved) - at_once).max()))
            done()
            continue
        rows = prompt.rows
        for i, row in enumerate(at_once.reshape(rows, -1)):
            alone = only_logits(runner, row_of(moved, i)).ravel()
            worst = max(worst, float(np.abs(alone - row).max()))
            runner.keep_rows(0, np.array([i]), i)
            done()
    return max(margin.times * worst, margin.min_nats)


def only_logits(runner: Runner, call: Call) -> Floats:
    """The logits of a call of one sequence; of several heads one behind another."""
    (result,) = runner.run(call)
    return result.logits.rows()


def moved_by_noise(call: Call, size: float, rng: np.random.Generator) -> Call:
    """The call with each embedding changed by about `size` of itself (standard deviation), or each
    hidden state where it has no embeddings."""
    embeds, hidden = call.inputs_embeds, call.states("base_hidden")
    if embeds.size:
        noise = 1 + np.float32(size) * rng.standard_normal(embeds.shape, np.float32)
        return replace(call, inputs_embeds=embeds * noise)
    assert hidden is not None
    (states,) = (own.numpy() for own in hidden)
    noise = 1 + np.float32(size) * rng.standard_normal(states.shape, np.float32)
    return replace(call, extras={"base_hidden": [HostStates(states * noise)]})


def row_of(call: Call, row: int) -> Call:
    """The call of one row of a prompt, as plain decoding makes it: S = 1."""
    here = np.array([row])

    def alone(value: Value) -> Value:
        if isinstance(value, Attention):
            (lane,) = value.lanes
            return Attention([explicit(lane.visible[here, : row + 1])])
        if isinstance(value, np.ndarray):
            return np.ascontiguousarray(value[:, here])
        return [states.take(here) for states in value]

    values = {name: alone(value) for name, value in call.values.items()}
    return Call.of(values, np.array([row], np.int64), [np.zeros(1, np.int64)])


def explicit(visible: Mask) -> LaneAttention:
    """What is said of all slots [S, T] up to a call's last row."""
    return LaneAttention(0, visible, np.arange(visible.shape[1]))


Members = Iterator[Result]  # of the sequences of a batch that are to be golden


def alone(runner: Runner, call: Call) -> Members:
    """One sequence in the first lane."""
    yield from runner.run(call)


def twice(runner: Runner, call: Call) -> Members:
    """The sequence in both of two lanes."""
    yield from runner.run(joined(call, call))


def before_another(runner: Runner, call: Call) -> Members:
    """The sequence in the first of two lanes."""
    yield runner.run(joined(call, disturbed(call)))[0]


def behind_another(runner: Runner, call: Call) -> Members:
    """The sequence in the second of two lanes."""
    yield runner.run(joined(disturbed(call), call))[1]


# How the golden calls are put to an engine: a batch kernel that mixes up its sequences passes with
# equal ones.
ARRANGEMENTS = (alone, twice, before_another, behind_another)


def joined(first: Call, second: Call) -> Call:
    """Two calls of one sequence as one call of two."""

    def both(a: Value, b: Value) -> Value:
        if isinstance(a, Attention):
            return Attention([*a.lanes, *cast(Attention, b).lanes])
        if isinstance(a, np.ndarray):
            return np.concatenate([a, cast(Floats, b)])
        return [*a, *cast(Sequence[HiddenStates], b)]

    values = {name: both(value, second.values[name]) for name, value in first.values.items()}
    starts = np.concatenate([first.write_indices, second.write_indices])
    return Call.of(values, starts, [*first.gather, *second.gather])


def disturbed(call: Call) -> Call:
    """The call of another sequence: its embeddings, images and hidden states in reverse order of
    rows."""
    turned = inputs_named(Kind.ROWS, Kind.STATES)
    values = {name: backwards(v) if name in turned else v for name, v in call.values.items()}
    return Call.of(values, call.write_indices, call.gather)


def backwards(value: Value) -> Value:
    """Rows, or those of each lane, in reverse order."""
    assert not isinstance(value, Attention)
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value[:, ::-1])
    return [states.take(np.arange(len(states))[::-1]) for states in value]


def golden_calls(golden: Golden, ropes: Sequence[RopeConfig]) -> list[Call]:
    """The calls that a golden file stands for: the prompt into an empty cache, then the tree behind
    it. `ropes` are the rotary embeddings of the engine's tables."""
    if "prompt_inputs_embeds" not in golden:  # heads over a hidden state
        return [Call.of_states([HostStates(golden[f"{label}_base_hidden"][0])]) for label in CALLS]
    last = max(int(golden[f"{label}_positions"].max()) for label in CALLS)
    tables = [RopeTable.golden(rope, last + 1) for rope in ropes]
    return [golden_call(golden, tables, label) for label in CALLS]


def golden_call(golden: Golden, tables: Sequence[RopeTable], label: str) -> Call:
    """One of them; a block draft's has rows of context, and the block behind them."""
    stored = {
        name.removeprefix(f"{label}_"): array
        for name, array in golden.items()
        if name.startswith(f"{label}_")
    }
    rows, context = len(stored["ids"]), stored.get("context_positions")
    positions = {"S": stored["positions"][None]}
    start = 0 if label == "prompt" else golden["tree_attention_mask"].shape[-1] - rows
    width = start + rows
    if context is not None:
        positions["L"] = context[None]
        start, width = int(context[0]), int(context[-1]) + 1 + rows
    values: dict[str, Value] = dict(rotations(INPUTS.values(), tables, positions))
    for row in INPUTS.values():
        array = stored.get(row.name)
        if array is None:
            continue
        if row.kind is Kind.MASK:
            values[row.name] = Attention([explicit(array[0, 0, :, :width])])
        elif row.kind is Kind.ROWS:
            values[row.name] = array
        elif row.kind is Kind.STATES and array.shape[1]:  # of two, the one that is read
            values[row.name] = [HostStates(array[0])]
    return Call.of(values, np.array([start], np.int64), [np.arange(rows)])
