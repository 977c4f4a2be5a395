"""What recurrent layers remember of each lane on a device: states that an engine reads in one place
and writes in another, and the rows that were committed and are not taken in yet.

Knows lanes, addresses and kernels. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.cuda.bound import Bound
from edgespec.backends.cuda.caches import RowSize, RowTable, copy_rows, move_rows
from edgespec.backends.cuda.workspace import Memory, Workspace, aligned
from edgespec.contract import ITEM_BYTES, RecurrentShape, conv_names, delta_names, state_names

Ids = NDArray[np.int64]
ITEM = ITEM_BYTES["float32"]  # states stay in float32, whatever the engine computes in
FIRST, ZEROS = (0,), (-1,)  # a row, and as the origin of one that is made of zeros
ALL = ("conv", "pending", "state")  # what lanes of one call have side by side


class Tensors:
    """Zero-filled memory [layers, lanes, rows, row_bytes], and a table of its layers. Each lane
    begins at an address that can be bound: behind its rows there may be a gap."""

    def __init__(
        self, workspace: Workspace, layers: int, lanes: int, rows: int, row_bytes: int
    ) -> None:
        self.workspace, self.layers = workspace, layers
        self.row_bytes, self.size = row_bytes, rows * row_bytes
        self.lane_bytes = aligned(self.size)
        self.layer_bytes = lanes * self.lane_bytes
        total = layers * self.layer_bytes
        self.memory = workspace.alloc(total)
        workspace.device.zero(self.memory, total, workspace.stream)
        self.table = workspace.table([self.address(layer, 0) for layer in range(layers)])

    def address(self, layer: int, lane: int) -> int:
        """Where a lane begins in a layer."""
        return self.memory + layer * self.layer_bytes + lane * self.lane_bytes

    @property
    def has_gaps(self) -> bool:
        """Whether lanes do not stand one directly behind the other."""
        return self.lane_bytes > self.size

    def rows(self, lane: int) -> RowTable:
        """The rows of a lane in all layers."""
        return RowTable(self.table, 0, lane * self.lane_bytes)

    def zero(self, lane: int) -> None:
        """Make a lane zeros."""
        for layer in range(self.layers):
            at = self.address(layer, lane)
            self.workspace.device.zero(at, self.lane_bytes, self.workspace.stream)

    def free(self) -> None:
        """Give the memory back."""
        self.workspace.free(self.table)
        self.workspace.free(self.memory)


@dataclass(frozen=True, slots=True)
class SavedState:
    """A copy of what a lane's recurrent layers hold: of each layer the rows before the convolution,
    the state, and `pending` rows, one behind the other."""

    memory: Memory
    pending: int

    @property
    def nbytes(self) -> int:
        """The bytes of all three."""
        return self.memory.size


class RecurrentCache:
    """Of `lanes` sequences and calls of at most `rows` rows; `lengths` counts the rows that a lane
    has committed, the pending ones included.

    `side` says for each lane in which of two places its state stands: a call reads there, and
    writes the other one.
    """

    def __init__(self, workspace: Workspace, shape: RecurrentShape, lanes: int, rows: int) -> None:
        self.workspace, self.shape = workspace, shape
        self.layers, self.lanes, self.most = len(shape.layers), lanes, rows
        self.conv_bytes, self.row_bytes = shape.conv_width * ITEM, shape.row_width * ITEM
        self.kept = shape.conv_kernel - 1
        state_bytes = int(np.prod(shape.state_dims)) * ITEM
        sizes = {
            "state": (2 * lanes, 1, state_bytes),  # lanes of one side, then those of the other
            "conv": (lanes, self.kept, self.conv_bytes),
            "pending": (lanes, rows, self.row_bytes),
            # Of a call: all its lanes side by side
            "conv_rows": (1, lanes * rows, self.conv_bytes),
            "delta_rows": (1, lanes * rows, self.row_bytes),
        }
        if lanes > 1:
            sizes["conv of all"] = (1, lanes * self.kept, self.conv_bytes)
            sizes["pending of all"] = (1, lanes * rows, self.row_bytes)
            sizes["state of all"] = sizes["state after all"] = (1, lanes, state_bytes)
        self.tensors = {
            name: Tensors(workspace, self.layers, *dims) for name, dims in sizes.items()
        }
        self.pending, self.lengths, self.side = [0] * lanes, [0] * lanes, [0] * lanes
        self.first_lane, self.rows = 0, 0  # of the last call

    def prepare(self, first_lane: int, starts: list[int], rows: int) -> int:
        """Make lanes ready for a call of `rows` rows from `starts` on, one start a lane; a lane
        that starts at 0 begins anew. The number P of committed rows that the call takes in."""
        lanes = range(first_lane, first_lane + len(starts))
        for lane, start in zip(lanes, starts, strict=True):
            if start == 0:
                self.free(lane)
            assert self.lengths[lane] == start
            self.turn(lane, self.side[first_lane])
        self.first_lane, self.rows = first_lane, rows
        longest = max(1, *(self.pending[lane] for lane in lanes))
        if len(lanes) == 1:
            filling = range(self.pending[first_lane], longest)  # rows of zeros change nothing
            into = self.tensors["pending"].rows(first_lane)
            self.move("pending", first_lane, into, ZEROS * len(filling), filling)
            return longest
        for place, lane in enumerate(lanes):
            own = self.pending[lane]
            self.stack("pending", lane, place, [*range(own), *ZEROS * (longest - own)])
            self.stack("conv", lane, place, range(self.kept))
            if self.tensors["state"].has_gaps:
                row = self.side[lane] * self.lanes + lane
                self.stack("state", row, place, FIRST)
        return longest

    def stack(self, name: str, lane: int, place: int, origins: Sequence[int]) -> None:
        """Put rows of a lane to its place among those of all lanes of a call."""
        of_all = self.tensors[f"{name} of all"]
        into = of_all.rows(0).at(place * len(origins) * of_all.row_bytes)
        self.move(name, lane, into, origins, range(len(origins)))

    def move(
        self, name: str, lane: int, into: RowTable, origins: Sequence[int], places: Sequence[int]
    ) -> None:
        """Move rows of a lane in all layers."""
        source = self.tensors[name]
        size = RowSize(self.layers, 1, source.row_bytes)
        move_rows(self.workspace, size, source.rows(lane), into, origins, places)

    def turn(self, lane: int, side: int) -> None:
        """Let a lane's state stand on a side: lanes of one call are read and written together."""
        if self.side[lane] != side:
            state = self.tensors["state"]
            size = RowSize(self.layers, 1, state.row_bytes)
            here, there = (state.rows(one * self.lanes + lane) for one in (self.side[lane], side))
            copy_rows(self.workspace, size, here, there, 1)
            self.side[lane] = side

    def bound(self, batch: int, taken: int) -> list[Bound]:
        """What a call of `batch` lanes binds after `prepare`, which gave `taken`."""
        first, side, shape = self.first_lane, self.side[self.first_lane], self.shape
        state, before, after = self.tensors["state"], side * self.lanes, (1 - side) * self.lanes
        all_of = {name: self.tensors[f"{name} of all"] for name in ALL if batch > 1}
        conv, pending, at = self.tensors["conv"], self.tensors["pending"], first
        if batch > 1:
            conv, pending, at = all_of["conv"], all_of["pending"], 0
        read, written, reads, writes = state, state, before + first, after + first
        if batch > 1 and state.has_gaps:
            read, written = all_of["state"], self.tensors["state after all"]
            reads = writes = 0
        out = []
        for index, layer in enumerate(shape.layers):
            (conv_in, conv_out), (state_in, state_out) = conv_names(layer), state_names(layer)
            committed, delta = delta_names(layer)
            conv_dims = (batch, self.kept, shape.conv_width)
            out += [
                Bound(conv_in, conv.address(index, at), conv_dims),
                Bound(state_in, read.address(index, reads), (batch, *shape.state_dims)),
                Bound(committed, pending.address(index, at), (batch, taken, shape.row_width)),
                Bound(conv_out, self.tensors["conv_rows"].address(index, 0)),
                Bound(state_out, written.address(index, writes)),
                Bound(delta, self.tensors["delta_rows"].address(index, 0)),
            ]
        return out

    def after_call(self, batch: int) -> None:
        """The states of the call's lanes now hold their pending rows, on the other side."""
        state = self.tensors["state"]
        for place in range(batch):
            lane = self.first_lane + place
            self.pending[lane], self.side[lane] = 0, 1 - self.side[lane]
            if batch > 1 and state.has_gaps:
                into = state.rows(self.side[lane] * self.lanes + lane)
                self.move("state after all", 0, into, [place], FIRST)

    def keep(self, lane: int, path: Ids) -> None:
        """Commit rows of the last call, one path of them in its order."""
        place = lane - self.first_lane
        assert place >= 0
        last = path[max(0, len(path) - self.kept) :].tolist()
        staying = self.kept - len(last)
        conv = self.tensors["conv"].rows(lane)
        self.move("conv", lane, conv, range(len(last), self.kept), range(staying))
        size = RowSize(self.layers, 1, self.conv_bytes)
        made = RowTable(self.tensors["conv_rows"].table, 0, place * self.rows * self.conv_bytes)
        move_rows(self.workspace, size, made, conv, last, range(staying, self.kept))
        size = RowSize(self.layers, 1, self.row_bytes)
        made = RowTable(self.tensors["delta_rows"].table, 0, place * self.rows * self.row_bytes)
        pending = self.tensors["pending"].rows(lane)
        move_rows(self.workspace, size, made, pending, path.tolist(), range(len(path)))
        self.pending[lane] = len(path)
        self.lengths[lane] += len(path)

    # ---- copies

    def parts(self, lane: int, pending: int) -> list[tuple[int, int]]:
        """Address and bytes of all that a lane holds with so many pending rows, layer by layer."""
        state = self.tensors["state"]
        here = self.side[lane] * self.lanes + lane
        conv, rows = self.tensors["conv"], self.tensors["pending"]
        return [
            part
            for layer in range(self.layers)
            for part in (
                (conv.address(layer, lane), conv.size),
                (state.address(layer, here), state.size),
                (rows.address(layer, lane), pending * self.row_bytes),
            )
            if part[1]
        ]

    def read(self, lane: int) -> SavedState:
        """A copy of what a lane holds."""
        parts = self.parts(lane, self.pending[lane])
        memory = Memory(self.workspace, sum(size for _, size in parts))
        at = memory.address
        for address, size in parts:
            self.workspace.device.copy(at, address, size, self.workspace.stream)
            at += size
        return SavedState(memory, self.pending[lane])

    def write(self, lane: int, saved: SavedState, length: int) -> None:
        """Let a lane hold a copy that `read` made, `length` rows long."""
        at = saved.memory.address
        for address, size in self.parts(lane, saved.pending):
            self.workspace.device.copy(address, at, size, self.workspace.stream)
            at += size
        self.pending[lane], self.lengths[lane] = saved.pending, length

    def copy_lane(self, source: int, target: int) -> None:
        """Let one lane hold what another holds."""
        pending = self.pending[source]
        sources, targets = self.parts(source, pending), self.parts(target, pending)
        for (origin, size), (place, _) in zip(sources, targets, strict=True):
            self.workspace.device.copy(place, origin, size, self.workspace.stream)
        self.pending[target], self.lengths[target] = pending, self.lengths[source]

    def free(self, lane: int) -> None:
        """Zero a lane's state and drop its pending rows."""
        self.tensors["conv"].zero(lane)
        self.tensors["state"].zero(self.side[lane] * self.lanes + lane)
        self.pending[lane] = self.lengths[lane] = 0

    def close(self) -> None:
        """Give the memory back."""
        for tensors in self.tensors.values():
            tensors.free()
