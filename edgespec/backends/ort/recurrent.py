"""What recurrent layers remember of each lane: a state that cannot forget a row, and the rows it
has not taken in yet.

A call leaves its rows outside the state (`contract.canonical_contract`). Those that are kept are
pending here, one path a lane, until the next call takes them in. So a commit copies rows and
touches no state, and memory is bound by the rows of one call. Knows lanes and rows, and how to bind
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.ort.lane_rows import LayerState
from edgespec.contract import RecurrentShape, conv_names, delta_names, state_names

if TYPE_CHECKING:
    import onnxruntime as ort

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class RecurrentCache:
    """Of `lanes` sequences. `lengths` counts the rows that a lane has committed, the pending ones
    included."""

    def __init__(self, shape: RecurrentShape, lanes: int) -> None:
        self.shape, layers = shape, len(shape.layers)
        self.state = np.zeros((layers, lanes, *shape.state_dims), np.float32)
        self.conv = np.zeros((layers, lanes, shape.conv_kernel - 1, shape.conv_width), np.float32)
        self.pending = [self.no_rows() for _ in range(lanes)]
        self.lengths = [0] * lanes
        self.buffers: dict[str, Floats] = {}
        self.first_lane = 0  # of the last call
        # [layers, B, S, ...] of the last call
        self.conv_rows = self.delta_rows = np.empty((layers, 0, 0, 0), np.float32)
        self.bound: tuple[int, ...] = ()

    def no_rows(self) -> Floats:
        """Pending rows of a lane that has none: [layers, 0, row width]."""
        return np.empty((len(self.shape.layers), 0, self.shape.row_width), np.float32)

    def buffer(self, name: str, *dims: int) -> Floats:
        """An array in memory that is kept from call to call."""
        size = int(np.prod(dims))
        if name not in self.buffers or self.buffers[name].size < size:
            self.buffers[name] = np.empty(size, np.float32)
            self.bound = ()
        return self.buffers[name][:size].reshape(dims)

    def bind(self, binding: ort.IOBinding, first_lane: int, starts: list[int], rows: int) -> None:
        """Bind a call of `rows` rows from `starts` on, one start a lane; a lane that starts at 0
        begins anew."""
        lanes = range(first_lane, first_lane + len(starts))
        for lane, start in zip(lanes, starts, strict=True):
            if start == 0:
                self.free(lane)
            assert self.lengths[lane] == start
        taken = self.taken_in(lanes)
        layers, batch = len(self.shape.layers), len(starts)
        self.first_lane = first_lane
        self.conv_rows = self.buffer("conv_rows", layers, batch, rows, self.shape.conv_width)
        self.delta_rows = self.buffer("delta_rows", layers, batch, rows, self.shape.row_width)
        bound = (first_lane, batch, rows, taken.shape[2])
        if self.bound == bound:  # it takes hundreds of microseconds
            return
        self.bound = bound
        here = slice(first_lane, first_lane + batch)
        for index, layer in enumerate(self.shape.layers):
            names = conv_names(layer), state_names(layer), delta_names(layer)
            # Read before it is written: both may be the same memory
            state = self.state[index, here]
            given = self.conv[index, here], state, taken[index]
            left = self.conv_rows[index], state, self.delta_rows[index]
            for (name_in, name_out), array_in, array_out in zip(names, given, left, strict=True):
                binding.bind_input(
                    name_in, "cpu", 0, np.float32, list(array_in.shape), array_in.ctypes.data
                )
                binding.bind_output(
                    name_out, "cpu", 0, np.float32, list(array_out.shape), array_out.ctypes.data
                )

    def taken_in(self, lanes: range) -> Floats:
        """The pending rows [layers, B, P, row width], padded with zeros, which change nothing."""
        longest = max(1, *(self.pending[lane].shape[1] for lane in lanes))
        taken = self.buffer(
            "taken", len(self.shape.layers), len(lanes), longest, self.shape.row_width
        )
        for place, lane in enumerate(lanes):
            pending = self.pending[lane]
            taken[:, place, : pending.shape[1]] = pending
            taken[:, place, pending.shape[1] :] = 0.0
        return taken

    def after_call(self, batch: int) -> None:
        """Drop the pending rows of the call's lanes, which their states now hold."""
        for lane in range(self.first_lane, self.first_lane + batch):
            self.pending[lane] = self.no_rows()

    def keep(self, lane: int, path: Ids) -> None:
        """Commit rows of the last call, one path of them in its order."""
        place, conv = lane - self.first_lane, self.conv[:, lane]
        last = path[-conv.shape[1] :]
        conv[:, : conv.shape[1] - len(last)] = conv[:, len(last) :]
        conv[:, conv.shape[1] - len(last) :] = self.conv_rows[:, place, last]
        self.pending[lane] = self.delta_rows[:, place, path]
        self.lengths[lane] += len(path)

    def read(self, lane: int) -> LayerState:
        """A copy of the lane's state and pending rows."""
        return LayerState(
            self.conv[:, lane].copy(), self.state[:, lane].copy(), self.pending[lane].copy()
        )

    def write(self, lane: int, saved: LayerState, length: int) -> None:
        """Let a lane hold a copy that `read` made, `length` rows long."""
        self.conv[:, lane], self.state[:, lane], self.pending[lane] = (
            saved.conv,
            saved.state,
            saved.pending,
        )
        self.lengths[lane] = length

    def copy_lane(self, source: int, target: int) -> None:
        """Let one lane hold what another holds."""
        self.write(target, self.read(source), self.lengths[source])

    def free(self, lane: int) -> None:
        """Zero a lane's state and drop its pending rows."""
        self.conv[:, lane] = 0.0
        self.state[:, lane] = 0.0
        self.pending[lane], self.lengths[lane] = self.no_rows(), 0


def uncommitted_bytes(shape: RecurrentShape, lanes: int, rows: int) -> int:
    """The largest number of bytes of rows that wait for their commit, with `rows` rows in each of
    `lanes` lanes.

    The rows go out, wait, and are given to the next call, side by side with those of the other
    lanes.
    """
    return 4 * len(shape.layers) * lanes * rows * (shape.conv_width + 3 * shape.row_width)
