"""What the runners of tests have in common: keys and values in host memory, and the inputs of a
call by name.

Knows contracts and calls. Knows nothing that computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LaneRows, Table
from edgespec.backends.call import Call
from edgespec.backends.feeds import reader_of
from edgespec.backends.masks import attention_mask
from edgespec.contract import GraphContract, Kind, graph_inputs, past_names, present_names

Array = NDArray[Any]
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int64": np.int64,
    "bool": np.bool_,
}


@dataclass(frozen=True)
class CopiedRows(LaneRows):
    """Keys and values of a lane by input name [Hkv, tokens, D], and its recurrent state."""

    arrays: dict[str, Array]
    count: int
    state: Any = None

    @property
    def can_crop(self) -> bool:
        return self.state is None

    def __len__(self) -> int:
        return self.count

    @property
    def nbytes(self) -> int:
        kept = 0 if self.state is None else self.state.nbytes
        return kept + sum(array.nbytes for array in self.arrays.values())

    def prefix(self, count: int) -> CopiedRows:
        assert self.can_crop or count == len(self)
        rows = {name: array[:, :count] for name, array in self.arrays.items()}
        return CopiedRows(rows, count, self.state)


class HostRunner:
    """A graph's cache of `lanes` sequences with `slots` rows each; a subclass runs the graph."""

    engine_s = 0.0
    table: Table | None = None
    prefill_chunk = 256

    def __init__(self, contract: GraphContract, capacity: int, slots: int, lanes: int = 1) -> None:
        self.contract, self.capacity, self.max_rows = contract, capacity, capacity
        self.slots, self.lanes, shape = slots, lanes, contract.shape
        self.specs = {spec.name: spec for spec in (*contract.inputs, *contract.outputs)}
        self.presents = {
            past: present
            for i in shape.attention_layers
            for past, present in zip(past_names(i), present_names(i), strict=True)
        }
        dims = (lanes, shape.num_kv_heads, slots, shape.head_dim)
        self.cache = {past: np.zeros(dims, self.dtype(past)) for past in self.presents}

    def dtype(self, name: str) -> Any:
        return DTYPES[self.specs[name].dtype]

    def feeds(self, call: Call) -> dict[str, Array]:
        """The inputs of a call by name, without what layers remember."""
        feeds: dict[str, Array] = {}
        sizes = {"B": len(call.inputs_embeds), "S": call.rows, "S_base": 0, "S_draft": 0}
        for row in graph_inputs(self.contract.shape):
            if row.kind is Kind.MASK:
                kind = call.attended(row.name)
                mask = np.zeros((len(kind.lanes), 1, call.rows, self.slots), np.bool_)
                feeds[row.name] = attention_mask(call, kind, mask)
            elif (array := reader_of(row)(call)) is not None:
                feeds[row.name] = array
            else:
                dims = self.specs[row.name].dims(**sizes)
                feeds[row.name] = np.full(dims, row.default or 0, np.float32)
        return feeds

    def keep_rows(self, lane: int, slots: NDArray[np.int64], start: int) -> None:
        for rows in self.cache.values():
            rows[lane, :, start : start + len(slots)] = rows[lane][:, slots]

    def read_rows(self, lane: int, count: int) -> CopiedRows:
        rows = {name: array[lane, :, :count].copy() for name, array in self.cache.items()}
        return CopiedRows(rows, count)

    def write_rows(self, lane: int, rows: LaneRows) -> None:
        assert isinstance(rows, CopiedRows)
        for name, array in rows.arrays.items():
            self.cache[name][lane, :, : len(rows)] = array

    def free(self, lane: int) -> None:
        """Drop what a lane holds beside keys and values."""

    def zero(self, lane: int) -> None:
        for rows in self.cache.values():
            rows[lane] = 0
        self.free(lane)

    def copy_lane(self, source: int, target: int, count: int) -> None:
        self.write_rows(target, self.read_rows(source, count))
