"""The lm_head of an open engine that is a LowBitHead: what its calls are to find and to write, and
what is asked of their logits.

A call finds what was asked of earlier ones. Logits that it did not write are computed when somebody
asks for them, from the rows that the head multiplied: their bits are the same. Knows rows and
weights. Knows no session.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.call import Floats, Ids, Logits, Mask, Top
from edgespec.backends.host import HostLogits
from edgespec.backends.ort.contract import head_rows
from edgespec.backends.ort.head_form import HeadForm
from edgespec.backends.ort.low_bit_matmul import run
from edgespec.backends.ort.native.library import MOST_TOP, kernels

WRITING = 64  # further calls whose logits are written after somebody asked for a whole row


@dataclass(frozen=True, slots=True)
class Found:
    """What a search of the first `searched` logits of R rows found. `logsumexp` is NaN without
    `sums`."""

    searched: int
    sums: bool
    ids: Ids  # [R, K]
    values: Floats  # [R, K]
    logsumexp: Floats  # [R]
    finite: Mask  # [R]

    @property
    def count(self) -> int:
        """K."""
        return int(self.ids.shape[1])

    def part(self, rows: int | slice | Ids) -> Found:
        """The same of some rows; of those of several lanes, those of one."""
        arrays = self.ids[rows], self.values[rows], self.logsumexp[rows], self.finite[rows]
        return Found(self.searched, self.sums, *arrays)


def search(logits: Floats, ids: int, count: int, *, sums: bool) -> Found:
    """What stands in the first `ids` logits of rows [R, V]."""
    rows = len(logits)
    arrays = (
        np.empty((rows, count), np.int64),
        np.empty((rows, count), np.float32),
        np.empty(rows, np.float32),
        np.empty(rows, np.bool_),
    )
    kernels().find(logits, ids, count, arrays, sums=sums)
    return Found(ids, sums, *arrays)


class Head:
    """What was asked of the logits of an engine: so much its next calls find by themselves.
    `writing` counts, for a lane, the next calls whose logits are written as a whole."""

    def __init__(self, form: HeadForm, weight: NDArray[np.uint8]) -> None:
        self.form, self.weight = form, weight
        self.count, self.ids, self.sums = 1, form.layout.out_features, False
        self.writing: dict[int, int] = {}
        self.rows_spec = head_rows(form.layout.in_features)

    def begin(self, lane: int) -> None:
        """A lane gets another sequence, and nobody knows what it asks for: its first logits are
        written."""
        self.writing[lane] = max(1, self.writing.get(lane, 0))

    def write_request(self, first_lane: int, written: Mask, search: Ids) -> None:
        """Fill in a call's inputs: the lanes [B] whose logits it writes, and what it looks for
        [3]."""
        for place in range(len(written)):
            left = self.writing.get(first_lane + place, 1)
            written[place] = left > 0
            self.writing[first_lane + place] = max(0, left - 1)
        search[:] = self.search

    @property
    def search(self) -> tuple[int, int, int]:
        """How many of the largest are looked for, of the first so many ids, and whether
        exponentials are summed."""
        return self.count, self.ids, int(self.sums)

    def rows(self, x: Floats) -> Floats:
        """The logits [R, V] of the rows that the head multiplies, [R, in]."""
        return run(self.form.layout, self.weight, self.form.rounding, x)

    def ask(self, count: int, ids: int, *, sums: bool) -> None:
        """What the next calls find."""
        self.count, self.ids, self.sums = max(self.count, count), ids, self.sums or sums
        self.count = min(self.count, ids)


@dataclass(slots=True, eq=False)
class HeadLogits(Logits):
    """The first `ids` logits of rows, by what was found of them; `array` [R, V] where they were
    written."""

    head: Head
    lane: int
    ids: int
    x: Floats  # [R, in]
    largest: Found
    array: Floats | None
    # of each row the id of the largest of these logits, and that, as numbers of Python
    bests: tuple[list[int], list[float]] | None = None

    def __len__(self) -> int:
        return len(self.x)

    @property
    def vocab_size(self) -> int:
        """Logits of a row."""
        return self.ids

    def take(self, rows: Ids) -> HeadLogits:
        """A copy of some rows."""
        return self.part(rows)

    def first_rows(self, count: int) -> HeadLogits:
        """The first `count` rows, not copied."""
        return self.part(slice(count))

    def part(self, rows: slice | Ids) -> HeadLogits:
        """The same of some rows."""
        array = None if self.array is None else self.array[rows]
        x, top = self.x[rows], self.largest.part(rows)
        return HeadLogits(self.head, self.lane, self.ids, x, top, array)

    def first_ids(self, count: int) -> HeadLogits:
        """The same rows of the first `count` ids alone, not copied."""
        return replace(self, ids=min(count, self.ids), bests=None)

    def whole(self) -> Floats:
        """[R, V], computed now where they were not written."""
        if self.array is None:
            self.array = self.head.rows(self.x)
        return self.array

    def known(self, count: int, *, sums: bool = False) -> Found:
        """The `count` largest of each row, and perhaps more: of the call itself, or found now."""
        top = self.largest
        has_sums = top.sums or not sums
        if top.searched != self.ids or top.count < count or not has_sums:
            self.head.ask(count, self.ids, sums=sums)
            top = self.largest = search(self.whole(), self.ids, count, sums=sums)
        return top

    def finite(self) -> bool:
        """Whether they hold no NaN and no Inf."""
        return bool(self.known(1).finite.all())

    def best(self, row: int) -> tuple[int, float]:
        """The id of a row's largest logit, and the logit."""
        if self.bests is not None:
            return self.bests[0][row], self.bests[1][row]
        top = self.known(1)
        return int(top.ids[row, 0]), float(top.values[row, 0])

    def top(self, count: int) -> Top:
        """The `count` largest of each row: copies."""
        count = min(count, self.ids)
        if count > MOST_TOP:
            return HostLogits(self.rows()).top(count)
        top = self.known(count, sums=True)
        return Top(top.ids[:, :count].copy(), top.values[:, :count].copy(), top.logsumexp.copy())

    def row(self, row: int) -> Floats:
        """One row; it may be a view."""
        view: Floats = self.rows()[row]
        return view

    def rows(self) -> Floats:
        """[R, V] of all rows; it may be a view."""
        self.head.writing[self.lane] = WRITING
        return self.whole()[:, : self.ids]
