"""What the check of an engine's cache finds: over a runner of a few lines, and each way in which it
could write or read wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.backends.base import LaneRows, Table
from edgespec.backends.cache_check import COMMITTED, WRITTEN, check_cache
from edgespec.backends.call import Call, Ids, Result
from edgespec.backends.findings import Outcome
from edgespec.backends.host import host_results
from edgespec.contract import GraphContract, GraphShape, Role, canonical_contract

Array = NDArray[Any]
SHAPE = GraphShape(Role.BASE, 8, 1, 1, 8, 8, vocab_size=5, features=8)
TENSORS, LANES, SLOTS = 2, 2, 24


class Sums:
    """A runner whose logits are sums over the rows that a row sees; it is its own cache memory."""

    contract: GraphContract = canonical_contract(SHAPE)
    capacity = prefill_chunk = max_rows = SLOTS
    lanes, num_tensors, engine_s = LANES, TENSORS, 0.0
    table: Table | None = None

    def __init__(self) -> None:
        self.cache = np.zeros((TENSORS, LANES, 1, SLOTS, 8), np.float32)

    def run(self, call: Call) -> list[Result]:
        lane, start = call.first_lane, int(call.write_indices[0])
        self.write(lane, start, call.inputs_embeds[0])
        seen = self.cache[0, lane, 0, : self.visible(start + call.rows)].sum()
        return host_results(call, np.full((1, 1, 5), seen, np.float32), None)

    def write(self, lane: int, start: int, rows: Array) -> None:
        self.cache[:, lane, 0, start : start + len(rows)] = rows

    def visible(self, end: int) -> int:
        return end

    def read_tensor(self, tensor: int) -> Array:
        return self.cache[tensor].copy()

    def keep_rows(self, lane: int, slots: Ids, start: int) -> None: ...

    def read_rows(self, lane: int, count: int) -> LaneRows:
        raise NotImplementedError

    def write_rows(self, lane: int, rows: LaneRows) -> None: ...

    def free(self, lane: int) -> None: ...

    def zero(self, lane: int) -> None:
        self.cache[:, lane] = 0

    def copy_lane(self, source: int, target: int, count: int) -> None: ...

    def close(self) -> None: ...


class Memory:
    """The cache of a runner, as the check reads and writes it."""

    num_tensors = TENSORS

    def __init__(self, runner: Sums) -> None:
        self.runner = runner

    def read(self, tensor: int) -> Array:
        return self.runner.read_tensor(tensor)

    def write(self, tensor: int, values: Array) -> None:
        self.runner.cache[tensor] = values


def found(runner: Sums) -> list[tuple[Outcome, str]]:
    return [(one.outcome, one.detail) for one in check_cache(runner, Memory(runner), 1e-3)]


def test_a_runner_that_is_right_passes_in_its_first_and_its_last_lane() -> None:
    runner = Sums()
    outcomes = found(runner)
    assert [outcome for outcome, _ in outcomes] == [Outcome.PASSED] * LANES
    assert not runner.cache.any()


class OneMore(Sums):
    """Writes the row behind its own, too."""

    def write(self, lane: int, start: int, rows: Array) -> None:
        super().write(lane, start, np.concatenate([rows, rows[-1:]]))


class OneLess(Sums):
    """Leaves its last row out."""

    def write(self, lane: int, start: int, rows: Array) -> None:
        super().write(lane, start, rows[:-1])


class Further(Sums):
    """Writes one slot behind."""

    def write(self, lane: int, start: int, rows: Array) -> None:
        super().write(lane, start + 1, rows)


class OtherLane(Sums):
    """Writes into all lanes."""

    def write(self, lane: int, start: int, rows: Array) -> None:
        self.cache[:, :, 0, start : start + len(rows)] = rows


class ValuesAlone(Sums):
    """Writes one of its tensors."""

    def write(self, lane: int, start: int, rows: Array) -> None:
        self.cache[0, lane, 0, start : start + len(rows)] = rows


class SeesAll(Sums):
    """Reads rows behind its own."""

    def visible(self, end: int) -> int:
        return SLOTS


class NoNumber(Sums):
    """Computes with what it must not see, which is no number."""

    def run(self, call: Call) -> list[Result]:
        results = super().run(call)
        if self.cache[0, call.first_lane, 0, -1].any():
            results[0].logits.array[:] = np.nan  # type: ignore[attr-defined]
        return results


END = COMMITTED + WRITTEN
FAULTS: dict[Callable[[], Sums], str] = {
    OneMore: f"row {END} was changed",
    OneLess: f"row {END - 1} was not written",
    Further: f"row {COMMITTED} was not written",
    OtherLane: "lane 1, row 4 was changed",
    ValuesAlone: "tensor 1, lane 0, row 4 was not written",
    SeesAll: "rows that no row sees change the logits",
    NoNumber: "rows that no row sees change the logits by nan",
}


@pytest.mark.parametrize("runner", FAULTS, ids=lambda kind: kind.__name__)
def test_a_runner_that_is_wrong_is_found(runner: Callable[[], Sums]) -> None:
    outcome, detail = found(runner())[0]
    assert outcome is Outcome.FAILED
    assert FAULTS[runner] in detail
