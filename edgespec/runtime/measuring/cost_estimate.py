"""What steps of a pair may cost here before there is an engine: from the weights and the cache that
a pass reads, the memory's bandwidth, and what the cores multiply.

Knows bytes, seconds and constants that are stated. It is an estimate: `cost_measure` measures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from edgespec.backends.machine import cores
from edgespec.config.model_cost import PairWork, PassWork
from edgespec.quantization.block_forms import FOUR_BITS
from edgespec.runtime.costs.cost_model import MAX_ROWS, StepCosts, best_chain, break_even
from edgespec.runtime.measuring.cost_description import aligned
from edgespec.runtime.measuring.speedup import ms

Format = Literal["int4", "int8", "fp32"]
FORMATS: tuple[Format, ...] = ("int4", "int8", "fp32")
# Bytes of a weight: int4 with minimums; int8 with its share of a float32 scale for 128
WEIGHT_BYTES = {"int4": FOUR_BITS.bits_per_weight / 8, "int8": 1.0 + 4 / 128, "fp32": 4.0}
# Multiply-adds in the time in which a byte is read, as on the CPU of docs/performance.md: about
# eleven rows of int4 take as long to multiply as their weights to read
PER_BYTE = {"int4": 20.0, "int8": 20.0, "fp32": 3.5}
CACHE_BYTES = 4  # of an element of the KV cache, in float32
CALL_S = 0.0003  # of the host and the library, in each call of an engine
# Reading and multiplying overlap, but not wholly: seconds = (read^3 + multiply^3)^(1/3)
OVERLAP = 3
ACCEPTANCES = (0.3, 0.5, 0.7, 0.9)
CONTEXTS = (128, 2048)
LEVELS = 8
PROBE_BYTES, PROBE_S = 64 * 2**20, 0.06


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes a second that all cores which this process may use read together."""

    bytes_per_s: float
    cores: int

    @classmethod
    def here(cls) -> Machine:
        """This one, in about a tenth of a second."""
        count = cores()
        return cls(bandwidth(count), count)


def bandwidth(cores: int) -> float:
    """Bytes a second that all cores together read of memory that is larger than their caches; the
    best of a few times."""
    parts = [np.ones(PROBE_BYTES // (4 * cores), np.float32) for _ in range(cores)]
    best, ends = float("inf"), time.perf_counter() + PROBE_S
    with ThreadPoolExecutor(cores) as pool:
        while True:
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - began)
            if time.perf_counter() > ends:
                return sum(part.nbytes for part in parts) / best


# ---- a pass, a step


def pass_seconds(
    work: PassWork, rows: int, context: int, weights: Format, machine: Machine
) -> float:
    """Seconds of a pass over so many rows of one sequence."""
    cached = work.cached(context)
    read = work.weights(rows) * WEIGHT_BYTES[weights] + cached * CACHE_BYTES
    multiplied = work.products() / PER_BYTE[weights] + cached * work.scores / PER_BYTE["fp32"]
    seconds = (part / machine.bytes_per_s for part in (read, rows * multiplied))
    return float(sum(part**OVERLAP for part in seconds) ** (1 / OVERLAP)) + CALL_S


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a pair may reach in one format of weights, behind so many tokens: `rows` is by how much
    4 and 8 rows take longer than one."""

    weights: Format
    context: int
    plain_s: float
    rows: dict[int, float]
    break_even: float | None  # the lowest acceptance from which some chain pays
    best: tuple[Reached, ...]


@dataclass(frozen=True, slots=True)
class Reached:
    """The best chain at an acceptance of each draft, and its speed over plain."""

    acceptance: float
    levels: int
    over_plain: float


def step_costs(work: PairWork, context: int, weights: Format, machine: Machine) -> StepCosts:
    """Seconds of steps, as the cost model looks them up."""
    passes = [0.0] + [
        pass_seconds(work.base, rows, context, weights, machine) for rows in range(1, MAX_ROWS + 1)
    ]
    drafts = [0.0] + [
        pass_seconds(work.draft, rows, context, weights, machine) for rows in range(1, MAX_ROWS + 1)
    ]
    nothing, counts = [0.0] * (MAX_ROWS + 1), range(MAX_ROWS + 1)
    if work.drafting == "levels":
        return StepCosts(passes, [max(0, n - 1) * drafts[1] for n in counts], drafts)
    if work.drafting == "model":
        return StepCosts(passes, [n * drafts[1] for n in counts], nothing)
    rows = [min(n + 1, MAX_ROWS) if work.drafting == "block" else 1 for n in counts]
    return StepCosts(passes, [drafts[rows[n]] if n else 0.0 for n in counts], nothing)


def estimates(work: PairWork, machine: Machine) -> list[Estimate]:
    """Those of all formats and contexts."""
    return [
        estimate(work, context, weights, machine) for weights in FORMATS for context in CONTEXTS
    ]


def estimate(work: PairWork, context: int, weights: Format, machine: Machine) -> Estimate:
    """That of one format behind so many tokens."""
    costs = step_costs(work, context, weights, machine)
    levels = min(LEVELS, work.levels or LEVELS)
    rates = [break_even(costs, count) for count in range(1, levels + 1)]
    best = [(rate, best_chain(costs, [rate] * levels)) for rate in ACCEPTANCES]
    return Estimate(
        weights,
        context,
        costs.plain,
        {rows: costs.passes[rows] / costs.plain for rows in (4, 8)},
        min((rate for rate in rates if rate is not None), default=None),
        tuple(Reached(rate, choice.levels, choice.over_plain) for rate, choice in best),
    )


# ---- in words


def lines(estimates: Sequence[Estimate], machine: Machine) -> Iterator[str]:
    """What `check` says: what it rests on, and a row for each format and context."""
    yield (
        f"estimated, nothing was run: {machine.cores} cores here read"
        f" {machine.bytes_per_s / 1e9:.0f} GB/s; a KV cache in float32, {1000 * CALL_S:.1f} ms a"
        " call, and from eleven rows of int4 on a pass multiplies longer than it reads. edgespec"
        " build measures"
    )
    names = ["weights", "tokens", "plain step", "drafts pay from"]
    names += [f"at {100 * rate:.0f} %" for rate in ACCEPTANCES]
    yield from aligned([names, *(list(cells_of(one)) for one in estimates)])


def cells_of(one: Estimate) -> Iterator[str]:
    """A row of the table: the best chain's speed, and its drafts, by acceptance."""
    yield from (one.weights, str(one.context), ms(one.plain_s))
    yield "never" if one.break_even is None else f"{100 * one.break_even:.0f} %"
    yield from (f"{best.over_plain:.2f}x ({best.levels})" for best in one.best)


def to_dict(estimates: Sequence[Estimate], machine: Machine) -> dict[str, Any]:
    """What `check --json` has of it, with all that was assumed."""
    return {
        "estimates": [asdict(one) for one in estimates],
        "assumed": {
            **asdict(machine),
            "weight_bytes": WEIGHT_BYTES,
            "multiply_adds_per_byte": PER_BYTE,
            "cache_bytes": CACHE_BYTES,
            "call_s": CALL_S,
        },
    }
