"""Hidden states that stay on the device: they go from the outputs of one engine to the inputs of
another, and to the host only where somebody asks for numbers.

Knows addresses and kernels. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from edgespec.backends.call import Floats, HiddenStates, Ids
from edgespec.backends.cuda.caches import RowSize, RowTable, move_rows
from edgespec.backends.cuda.workspace import Borrowed, Workspace

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype(np.int64),
    "bool": np.dtype(np.bool_),
}
KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}  # of the kernel that looks for NaN and Inf


@dataclass(frozen=True, slots=True)
class DeviceStates(HiddenStates):
    """Hidden states [rows, width] from an address on. `memory` is theirs; without it they are an
    engine's output. `known_finite`: there is no NaN and no Inf in them; else it is not known."""

    workspace: Workspace
    address: int
    rows: int
    width: int
    dtype: str
    known_finite: bool
    memory: Borrowed | None = None

    def __len__(self) -> int:
        return self.rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        return self.rows * self.row_bytes

    def new(self, rows: int, *, known_finite: bool) -> DeviceStates:
        """Memory for so many rows like these."""
        memory = Borrowed(self.workspace, rows * self.row_bytes)
        return DeviceStates(
            self.workspace,
            memory.address,
            rows,
            self.width,
            self.dtype,
            known_finite,
            memory,
        )

    def take(self, rows: Ids) -> DeviceStates:
        """A copy of some rows."""
        with self.workspace.working():
            out, places = self.new(len(rows), known_finite=self.known_finite), rows.tolist()
            first = places[0] if places else 0
            if places == [*range(first, first + len(places))]:
                if out.nbytes:
                    device, begin = self.workspace.device, self.address + first * self.row_bytes
                    device.copy(out.address, begin, out.nbytes, self.workspace.stream)
                return out
            size = RowSize(1, 1, self.row_bytes)
            source, target = RowTable(0, 0, self.address), RowTable(0, 0, out.address)
            move_rows(self.workspace, size, source, target, places, range(len(places)))
        return out

    def joined(self, others: Sequence[HiddenStates]) -> DeviceStates:
        """A copy of these rows and, behind them, those of the others."""
        parts = [self, *others]
        finite = all(isinstance(one, DeviceStates) and one.known_finite for one in parts)
        with self.workspace.working():
            out, at = self.new(sum(map(len, parts)), known_finite=finite), 0
            for part in parts:
                put(part, self.workspace, out.address + at * self.row_bytes, self.dtype)
                at += len(part)
        return out

    def finite(self) -> bool:
        """Whether they hold no NaN and no Inf."""
        return self.known_finite or bool(np.isfinite(self.numpy()).all())

    def numpy(self) -> Floats:
        """A copy on the host."""
        raw = self.workspace.down(self.address, self.nbytes)
        return raw.view(DTYPES[self.dtype]).reshape(self.rows, self.width).astype(np.float32)


def put(states: HiddenStates, workspace: Workspace, address: int, dtype: str) -> None:
    """Copy hidden states of any backend to an address, as a type."""
    if isinstance(states, DeviceStates) and (states.workspace, states.dtype) == (workspace, dtype):
        if states.nbytes:
            workspace.device.copy(address, states.address, states.nbytes, workspace.stream)
    else:
        workspace.put(address, states.numpy().astype(DTYPES[dtype]))


def on_device(states: HiddenStates, workspace: Workspace, dtype: str) -> DeviceStates:
    """Hidden states of any backend on the device, as a type: themselves where they are it."""
    if isinstance(states, DeviceStates) and (states.workspace, states.dtype) == (workspace, dtype):
        return states
    array = states.numpy().astype(DTYPES[dtype])
    memory = Borrowed(workspace, array.nbytes)
    workspace.put(memory.address, array)
    rows, width = array.shape
    return DeviceStates(workspace, memory.address, rows, width, dtype, False, memory)
