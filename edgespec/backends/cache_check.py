"""Checks where an engine's calls write: a pattern is put into the cache around a call's rows, and
the contents are compared afterwards.

Knows calls and rows. How the cache is read and written is the backend's own (`CacheMemory`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Runner
from edgespec.backends.call import Call, Floats
from edgespec.backends.findings import Finding, failed, judged, passed
from edgespec.backends.made_calls import made_call
from edgespec.errors import LimitError

Array = NDArray[Any]
COMMITTED, WRITTEN = 4, 3  # rows before the call that is looked at, and its own
MAX_NAMED = 3  # rows that a finding names


class CacheMemory(Protocol):
    """The tensors of a runner's cache, each [lanes, heads, slots, width] in the cache's type."""

    num_tensors: int

    def read(self, tensor: int) -> Array:
        """A copy of one tensor."""

    def write(self, tensor: int, values: Array) -> None:
        """Replace the contents of one tensor."""


def check_cache(runner: Runner, memory: CacheMemory, tolerance: float) -> list[Finding]:
    """Whether a call writes its own rows and no others, in the first lane and in the last, and
    whether its logits depend on rows that it does not see: by `tolerance` of their largest value at
    most. All lanes are zeros afterwards."""
    findings = []
    for lane in sorted({0, runner.lanes - 1}):
        work = partial(check_lane, runner, memory, lane, tolerance)
        findings.append(judged(f"cache, lane {lane}", work))
    clear(runner)
    return findings


def check_lane(runner: Runner, memory: CacheMemory, lane: int, tolerance: float) -> Finding:
    """The finding of one lane. LimitError where the engine takes no such calls."""
    call = made_call(runner.contract, lane, COMMITTED, WRITTEN)
    if COMMITTED + call.written > runner.capacity:
        message = (
            f"{COMMITTED + call.written} slots are needed, and the engine has {runner.capacity}"
        )
        raise LimitError(message, "Build with a larger `max_kv_cache_capacity`.")
    begin(runner, lane)
    expected = logits_of(runner, call)
    kept = [put_pattern(memory, tensor, lane, COMMITTED) for tensor in range(memory.num_tensors)]
    logits = logits_of(runner, call)
    own = slice(COMMITTED, COMMITTED + call.written)
    wrong = [
        where
        for tensor, rows in enumerate(kept)
        for where in wrong_rows(memory.read(tensor), rows, tensor, lane, own)
    ]
    size = max(float(np.abs(expected).max()), 1e-6)
    difference = float(np.abs(logits - expected).max()) / size
    name, figures = f"cache, lane {lane}", {"rows_wrong": len(wrong), "difference": difference}
    if wrong:
        named = "; ".join(wrong[:MAX_NAMED])
        more = f"; {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        return failed(name, f"a call writes other rows than its own: {named}{more}", **figures)
    if not difference <= tolerance:  # a NaN is not within any tolerance
        message = f"rows that no row sees change the logits by {difference:.1e}"
        return failed(name, f"{message} of their largest value", **figures)
    count = memory.num_tensors
    return passed(
        name, f"{call.written} rows written in each of {count} tensors, no others", **figures
    )


def begin(runner: Runner, lane: int) -> None:
    """Commit the first rows of a lane, the rest of the cache being zeros."""
    clear(runner)
    call = made_call(runner.contract, lane, 0, COMMITTED, context=COMMITTED)
    runner.run(call)
    if not runner.contract.shape.block:  # whose context is where it stays
        runner.keep_rows(lane, np.arange(COMMITTED), 0)


def clear(runner: Runner) -> None:
    """Make the whole cache zeros."""
    for lane in range(runner.lanes):
        runner.zero(lane)


def logits_of(runner: Runner, call: Call) -> Floats:
    """A copy of the logits of a call of one lane."""
    (result,) = runner.run(call)
    return result.logits.rows().copy()


# ---- the pattern


def pattern(tensor: int, like: Array) -> Array:
    """Small numbers that differ from row to row, of the shape and type of a tensor."""
    rng = np.random.default_rng(1000 + tensor)
    values: Array = rng.integers(-64, 64, like.shape).astype(np.float32) / 16
    return values.astype(like.dtype)


def put_pattern(memory: CacheMemory, tensor: int, lane: int, start: int) -> Array:
    """Fill a tensor with its pattern, but for a lane's first `start` rows; a copy of those."""
    was = memory.read(tensor)
    values, kept = pattern(tensor, was), was[lane, :, :start].copy()
    values[lane, :, :start] = kept
    memory.write(tensor, values)
    return kept


def wrong_rows(values: Array, kept: Array, tensor: int, lane: int, own: slice) -> list[str]:
    """The rows of a tensor that a call changed beside its `own`, and those of its own that it left,
    in words."""
    before = pattern(tensor, values)
    before[lane, :, : kept.shape[1]] = kept
    same = (values == before).all(axis=(1, 3))  # [lanes, slots]
    wrong = [
        f"tensor {tensor}, lane {other}, row {slot} was changed"
        for other, slot in np.argwhere(~same)
        if other != lane or not own.start <= slot < own.stop
    ]
    left = (values == before).all(axis=3)[lane, :, own].any(axis=0)
    return wrong + [
        f"tensor {tensor}, lane {lane}, row {own.start + slot} was not written"
        for slot in np.flatnonzero(left)
    ]
