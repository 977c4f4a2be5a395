"""Hidden states and logits of backends whose outputs are in host memory: views, and copies where
they are asked for.

Knows numpy arrays. Knows no engine library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.call import Call, Floats, HiddenStates, Ids, Logits, Result, Top


@dataclass(frozen=True, slots=True)
class HostStates(HiddenStates):
    """Hidden states as an array [rows, width]."""

    array: Floats

    def __len__(self) -> int:
        return len(self.array)

    @property
    def nbytes(self) -> int:
        """The bytes of the array."""
        return self.array.nbytes

    def take(self, rows: Ids) -> HostStates:
        """A copy of some rows."""
        return HostStates(self.array[rows])

    def joined(self, others: Sequence[HiddenStates]) -> HostStates:
        """A copy of these rows and those of the others."""
        return HostStates(np.concatenate([self.array, *(other.numpy() for other in others)]))

    def finite(self) -> bool:
        """Whether they hold no NaN and no Inf."""
        return bool(np.isfinite(self.array).all())

    def numpy(self) -> Floats:
        """The array itself."""
        return self.array


@dataclass(frozen=True, slots=True)
class HostLogits(Logits):
    """Logits as an array [rows, V]."""

    array: Floats

    def __len__(self) -> int:
        return len(self.array)

    @property
    def vocab_size(self) -> int:
        """Logits of a row."""
        return int(self.array.shape[1])

    def take(self, rows: Ids) -> HostLogits:
        """A copy of some rows."""
        return HostLogits(self.array[rows])

    def first_rows(self, count: int) -> HostLogits:
        """A view of the first `count` rows."""
        return HostLogits(self.array[:count])

    def first_ids(self, count: int) -> HostLogits:
        """A view of the first `count` columns."""
        return HostLogits(self.array[:, :count])

    def finite(self) -> bool:
        """Whether they hold no NaN and no Inf."""
        return bool(np.isfinite(self.array).all())

    def best(self, row: int) -> tuple[int, float]:
        """The id of a row's largest logit, and the logit."""
        best = int(self.array[row].argmax())  # argmax returns the first NaN, if there is one
        return best, float(self.array[row, best])

    def top(self, count: int) -> Top:
        """The `count` largest of each row."""
        logits = self.array
        peak = logits.max(1, keepdims=True)
        total = np.exp(logits - peak).sum(1, dtype=np.float64)
        logsumexp: Floats = peak[:, 0] + np.log(total).astype(np.float32)
        count = min(count, logits.shape[1])
        if count == 1:
            best = logits.argmax(1)[:, None]
            return Top(best, logits[np.arange(len(logits))[:, None], best], logsumexp)
        edges = np.partition(logits, logits.shape[1] - count, axis=1)[:, -count]
        ids = np.empty((len(logits), count), np.int64)
        for row, edge in enumerate(edges):
            own = logits[row]
            chosen = np.flatnonzero(~(own < edge) if edge == edge else np.isnan(own))
            order = np.lexsort((-own[chosen], ~np.isnan(own[chosen])))  # a NaN counts as largest
            ids[row] = chosen[order[:count]]
        return Top(ids, np.take_along_axis(logits, ids, 1), logsumexp)

    def row(self, row: int) -> Floats:
        """A view of one row."""
        view: Floats = self.array[row]
        return view

    def rows(self) -> Floats:
        """The array itself."""
        return self.array


def host_results(
    call: Call, logits: Floats, hidden_states: Floats | None, heads: int = 0
) -> list[Result]:
    """The results of a call, one a lane, as views of its outputs: `logits` [B, G, V], or with
    `heads` [B, G, heads*V], and `hidden_states` [B, S, width]."""
    results = []
    for lane, gathered in enumerate(call.gather):
        own = logits[lane, : len(gathered)]
        if heads:
            own = own.reshape(len(gathered) * heads, -1)
        states = None
        if hidden_states is not None:
            rows = len(call.attention.lanes[lane].visible)
            states = HostStates(hidden_states[lane, :rows])
        results.append(Result(HostLogits(own), states))
    return results


def gather_idx(call: Call) -> Ids:
    """[B, G], the rows of each lane that go through the lm_head, filled up with row 0; at least
    one."""
    return stacked(call.gather, 1)


def stacked_states(states: Sequence[HiddenStates], rows: int) -> Floats:
    """[B, rows, width], the rows of each lane, filled up with zeros."""
    return stacked([lane.numpy() for lane in states], rows)


def stacked(arrays: Sequence[NDArray], min_rows: int = 1) -> NDArray:  # type: ignore[type-arg]
    """[B, longest, ...], the shorter ones filled up with zeros."""
    if len(arrays) == 1 and len(arrays[0]) >= min_rows:
        return np.ascontiguousarray(arrays[0])[None]
    lengths = [*map(len, arrays)]
    longest = max(min_rows, *lengths)
    if min(lengths) == longest:
        return np.concatenate(arrays).reshape(len(arrays), longest, *arrays[0].shape[1:])
    out = np.zeros((len(arrays), longest, *arrays[0].shape[1:]), arrays[0].dtype)
    for row, array in zip(out, arrays, strict=True):
        row[: len(array)] = array
    return out
