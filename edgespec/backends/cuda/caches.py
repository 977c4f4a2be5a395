"""Keys and values of all lanes on a device, and the moves of their rows.

Knows addresses and kernels. Knows no engine and no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LaneRows
from edgespec.backends.cuda.kernels import COPY_BLOCKS, MAX_MOVES, MOVE_BLOCKS, THREADS, WIDE_BYTES
from edgespec.backends.cuda.workspace import Memory, Workspace, aligned

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowTable:
    """Rows of several tensors that kernels move at once: a table of their addresses, each
    [heads, rows, row_bytes] with a distance between heads; `offset` bytes behind the addresses.
    Without a table it is one tensor of one head, and `offset` its address."""

    table: int
    head_bytes: int
    offset: int = 0

    def at(self, offset: int) -> RowTable:
        """The same, so many bytes further."""
        return RowTable(self.table, self.head_bytes, self.offset + offset)


@dataclass(frozen=True, slots=True)
class RowSize:
    """How many tensors and heads a move is of, and the bytes of a row."""

    tensors: int
    heads: int
    row_bytes: int

    @property
    def wide(self) -> int:
        """Whether kernels may move 16 bytes at a time."""
        return int(self.row_bytes % WIDE_BYTES == 0)


def move_rows(
    workspace: Workspace,
    size: RowSize,
    source: RowTable,
    target: RowTable,
    origins: Sequence[int],
    places: Sequence[int],
) -> None:
    """Row origins[i] of each source becomes row places[i] of its target, in this order; zeros where
    the origin is negative."""
    blocks = min(MOVE_BLOCKS, -(-size.row_bytes // (THREADS * WIDE_BYTES)))
    for start in range(0, len(origins), MAX_MOVES):
        part = slice(start, start + MAX_MOVES)
        workspace.launch(
            "move_rows",
            (size.tensors, size.heads, blocks),
            THREADS,
            sources=source.table,
            targets=target.table,
            source_offset=source.offset,
            target_offset=target.offset,
            row_bytes=size.row_bytes,
            source_head_bytes=source.head_bytes,
            target_head_bytes=target.head_bytes,
            count=len(origins[part]),
            wide=size.wide,
            tables=int(bool(source.table)),
            **{"from": origins[part], "to": places[part]},
        )


def copy_rows(
    workspace: Workspace, size: RowSize, source: RowTable, target: RowTable, count: int
) -> None:
    """The first `count` rows of each source become those of its target."""
    if not count:
        return
    length = count * size.row_bytes
    blocks = min(COPY_BLOCKS, -(-length // (THREADS * WIDE_BYTES)))
    workspace.launch(
        "copy_rows",
        (size.tensors, size.heads, blocks),
        THREADS,
        sources=source.table,
        targets=target.table,
        source_offset=source.offset,
        target_offset=target.offset,
        size=length,
        source_head_bytes=source.head_bytes,
        target_head_bytes=target.head_bytes,
        wide=size.wide,
    )


class KvCache:
    """Zero-filled keys and values [tensors, lanes, heads, slots, row]: a tensor for the keys and
    one for the values of each layer."""

    def __init__(
        self, workspace: Workspace, tensors: int, lanes: int, heads: int, slots: int, row_bytes: int
    ) -> None:
        self.workspace, self.lanes, self.slots = workspace, lanes, slots
        self.size = RowSize(tensors, heads, row_bytes)
        self.head_bytes = slots * row_bytes
        self.lane_bytes = heads * self.head_bytes
        self.tensor_bytes = aligned(lanes * self.lane_bytes)
        total = tensors * self.tensor_bytes
        self.memory = workspace.alloc(total)
        workspace.device.zero(self.memory, total, workspace.stream)
        addresses = [self.address(tensor, 0) for tensor in range(tensors)]
        self.table = workspace.table(addresses)

    def address(self, tensor: int, lane: int) -> int:
        """Where the rows of a lane begin in one tensor."""
        return self.memory + tensor * self.tensor_bytes + lane * self.lane_bytes

    def rows(self, lane: int, start: int = 0) -> RowTable:
        """The rows of a lane from a slot on."""
        offset = lane * self.lane_bytes + start * self.size.row_bytes
        return RowTable(self.table, self.head_bytes, offset)

    def keep(self, lane: int, slots: Ids, start: int) -> None:
        """Move rows to `start`, `start`+1, ...; rows that stand right already are left alone."""
        moves = [(slot, to) for to, slot in enumerate(slots.tolist(), start) if slot != to]
        if moves:
            rows = self.rows(lane)
            move_rows(self.workspace, self.size, rows, rows, *zip(*moves, strict=True))

    def append(self, lane: int, start: int, source: RowTable, count: int) -> None:
        """Copy rows that an engine gave to the slots from `start` on."""
        assert start + count <= self.slots
        copy_rows(self.workspace, self.size, source, self.rows(lane, start), count)

    def copy_lane(self, source: int, target: int, count: int) -> None:
        """Copy the first rows of one lane to another."""
        copy_rows(self.workspace, self.size, self.rows(source), self.rows(target), count)

    def zero(self, lane: int) -> None:
        """Make the rows of a lane zeros."""
        for tensor in range(self.size.tensors):
            at = self.address(tensor, lane)
            self.workspace.device.zero(at, self.lane_bytes, self.workspace.stream)

    def read(self, lane: int, count: int) -> DeviceRows:
        """A copy of a lane's first rows."""
        row, heads = self.size.row_bytes, self.size.heads
        out = DeviceRows.of(self.workspace, self.size, count)
        for tensor in range(self.size.tensors if count else 0):
            self.workspace.device.copy_2d(
                out.memory.address + tensor * heads * count * row,
                count * row,
                self.address(tensor, lane),
                self.head_bytes,
                count * row,
                heads,
                self.workspace.stream,
            )
        return out

    def write(self, lane: int, rows: DeviceRows) -> None:
        """Put such a copy, or the prefix of one, into a lane."""
        row, heads = self.size.row_bytes, self.size.heads
        for tensor in range(self.size.tensors if len(rows) else 0):
            self.workspace.device.copy_2d(
                self.address(tensor, lane),
                self.head_bytes,
                rows.memory.address + tensor * heads * rows.stored * row,
                rows.stored * row,
                len(rows) * row,
                heads,
                self.workspace.stream,
            )

    def free(self) -> None:
        """Give the memory back."""
        self.workspace.free(self.table)
        self.workspace.free(self.memory)


@dataclass(frozen=True, slots=True)
class DeviceRows(LaneRows):
    """Keys and values of a lane's first tokens, [tensors, heads, stored, row] on the device, of
    which the first `count` count; beside them `state`, what recurrent layers hold."""

    memory: Memory
    size: RowSize
    stored: int
    count: int
    state: Any = None

    @classmethod
    def of(cls, workspace: Workspace, size: RowSize, count: int) -> DeviceRows:
        """Memory for so many rows."""
        total = size.tensors * size.heads * count * size.row_bytes
        return cls(Memory(workspace, max(total, 1)), size, count, count)

    def __len__(self) -> int:
        return self.count

    @property
    def nbytes(self) -> int:
        """The bytes of keys, values and state."""
        return self.memory.size + (0 if self.state is None else int(self.state.nbytes))

    @property
    def can_crop(self) -> bool:
        """Whether there are shorter prefixes: of a recurrent state there are none."""
        return self.state is None

    def prefix(self, count: int) -> DeviceRows:
        """The first `count` tokens in the same memory; of all, unless it can be cropped."""
        assert self.can_crop or count == self.count
        return DeviceRows(self.memory, self.size, self.stored, count, self.state)
