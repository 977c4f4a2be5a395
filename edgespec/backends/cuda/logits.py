"""Logits that stay on the device: the largest ones of each row are found there, and a whole row
comes to the host where somebody asks for it.

A kernel of the project finds them, not TopK in the engine: TensorRT says nothing of the order of
equal values nor of NaN, and wants to know K when it builds. Here both are as on the host, and K is
what drafts ask for. Knows addresses and kernels. Knows no engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.call import Floats, Ids, Logits, Top
from edgespec.backends.cuda.kernels import PART_IDS, TOP_THREADS
from edgespec.backends.cuda.workspace import Borrowed, Launch, Workspace, aligned
from edgespec.backends.host import HostLogits

ITEM = 4  # bytes of a logit
MAX_TOP = 64  # of a row; who asks for more gets the rows


@dataclass
class Wanted:
    """What was asked of the logits of an engine: so much its next calls find by themselves."""

    count: int  # the largest ones of a row
    ids: int  # of the first so many ids


@dataclass(frozen=True, slots=True)
class TopFound:
    """The largest of the first `searched` logits of R rows. `logsumexp` is NaN where one of them is
    NaN or Inf."""

    searched: int
    ids: NDArray[np.int32]  # [R, K]
    values: Floats  # [R, K]
    logsumexp: Floats  # [R]

    def part(self, rows: slice | Ids) -> TopFound:
        """The same of some rows."""
        return TopFound(self.searched, self.ids[rows], self.values[rows], self.logsumexp[rows])


@dataclass(frozen=True, slots=True)
class TopSearch:
    """A search of the `count` largest of the first `ids` of `rows` rows, which stand `stride`
    logits apart. It takes `work_bytes` on the device while it runs, and leaves `found_bytes`."""

    rows: int
    stride: int
    ids: int
    count: int

    @property
    def parts(self) -> int:
        """Parts of a row."""
        return -(-self.ids // PART_IDS)

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys of all parts."""
        return aligned(8 * self.rows * self.parts * self.count)

    @property
    def work_bytes(self) -> int:
        """Bytes of keys and sums."""
        return self.key_bytes + aligned(ITEM * self.rows * self.parts)

    @property
    def found_bytes(self) -> int:
        """Bytes of ids, values and logsumexp."""
        return ITEM * self.rows * (2 * self.count + 1)

    def launches(self, logits: int, work: int, target: int) -> list[Launch]:
        """The kernels that search the logits at an address, and leave what they find at another."""
        keys, sums, size = work, work + self.key_bytes, ITEM * self.rows * self.count
        sizes = {"parts": self.parts, "count": self.count, "keys": keys, "sums": sums}
        first = {"logits": logits, "stride": self.stride, "ids": self.ids}
        places = {"ids": target, "values": target + size, "logsumexp": target + 2 * size}
        return [
            Launch.of("top_parts", (self.parts, self.rows, 1), TOP_THREADS, **sizes, **first),
            Launch.of("top_rows", (self.rows, 1, 1), TOP_THREADS, **sizes, **places),
        ]

    def read(self, block: NDArray[np.uint8]) -> TopFound:
        """What stands in a block of `found_bytes`: a copy."""
        items, size = block.view(np.float32).copy(), self.rows * self.count
        shape = (self.rows, self.count)
        ids, values = items[:size].view(np.int32), items[size : 2 * size]
        return TopFound(self.ids, ids.reshape(shape), values.reshape(shape), items[2 * size :])


def find_top(workspace: Workspace, logits: int, search: TopSearch) -> TopFound:
    """What a search finds, now."""
    if not search.rows:
        return search.read(np.zeros(0, np.uint8))
    with workspace.working():
        workspace.fit(inputs=search.work_bytes + search.found_bytes)
        work = workspace.inputs.address
        target = work + search.work_bytes
        for launch in search.launches(logits, work, target):
            workspace.run(launch)
        return search.read(workspace.down(target, search.found_bytes))


@dataclass(slots=True, eq=False)
class DeviceLogits(Logits):
    """The first `ids` logits of rows that stand `stride` logits apart, from an address on. `memory`
    is theirs; without it they are an engine's output. `largest` is what is known of them."""

    workspace: Workspace
    address: int
    num_rows: int
    ids: int
    stride: int
    wanted: Wanted
    largest: TopFound | None = None
    memory: Borrowed | None = None

    def __len__(self) -> int:
        return self.num_rows

    @property
    def vocab_size(self) -> int:
        """Logits of a row."""
        return self.ids

    def take(self, rows: Ids) -> DeviceLogits:
        """A copy of some rows."""
        size, workspace = ITEM * self.stride, self.workspace
        with workspace.working():
            memory = Borrowed(workspace, len(rows) * size)
            for place, row in enumerate(rows.tolist()):
                target, source = memory.address + place * size, self.address + row * size
                workspace.device.copy(target, source, size, workspace.stream)
        largest = None if self.largest is None else self.largest.part(rows)
        return replace(
            self, address=memory.address, num_rows=len(rows), largest=largest, memory=memory
        )

    def first_rows(self, count: int) -> DeviceLogits:
        """The first `count` rows, not copied."""
        largest = None if self.largest is None else self.largest.part(slice(count))
        return replace(self, num_rows=min(count, self.num_rows), largest=largest)

    def first_ids(self, count: int) -> DeviceLogits:
        """The same rows of the first `count` ids alone, not copied."""
        return replace(self, ids=min(count, self.ids))

    def known(self, count: int) -> TopFound:
        """The `count` largest of each row, and perhaps more: of the call itself, or found now."""
        largest = self.largest
        if largest is None or largest.searched != self.ids or largest.ids.shape[1] < count:
            self.wanted.count, self.wanted.ids = max(self.wanted.count, count), self.ids
            search = TopSearch(self.num_rows, self.stride, self.ids, count)
            largest = self.largest = find_top(self.workspace, self.address, search)
        return largest

    def finite(self) -> bool:
        """Whether they hold no NaN and no Inf."""
        return not np.isnan(self.known(1).logsumexp).any()

    def best(self, row: int) -> tuple[int, float]:
        """The id of a row's largest logit, and the logit."""
        largest = self.known(1)
        return int(largest.ids[row, 0]), float(largest.values[row, 0])

    def top(self, count: int) -> Top:
        """The `count` largest of each row."""
        count = min(count, self.ids)
        if count > MAX_TOP:
            return HostLogits(self.rows()).top(count)
        largest = self.known(count)
        return Top(
            largest.ids[:, :count].astype(np.int64), largest.values[:, :count], largest.logsumexp
        )

    def row(self, row: int) -> Floats:
        """A copy of one row on the host."""
        address = self.address + ITEM * self.stride * row
        return self.workspace.down(address, ITEM * self.ids).view(np.float32)

    def rows(self) -> Floats:
        """A copy of all rows on the host."""
        raw = self.workspace.down(self.address, ITEM * self.stride * self.num_rows)
        return raw.view(np.float32).reshape(self.num_rows, self.stride)[:, : self.ids]
