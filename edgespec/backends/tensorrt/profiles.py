"""The optimization profiles of an engine: which sizes each input may have, in two ways of running.

*prefill* reads a chunk of a prompt, *generation* verifies or makes a tree. Kernels are chosen for a
profile's middle sizes, so one profile for both would be slow in one of them. Knows contracts and
limits; knows no library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgespec.backends.engine_config import EngineLimits
from edgespec.contract import RECURRENT_CHUNK, Contract, GraphContract, GraphShape, TensorSpec
from edgespec.errors import ContractError

PREFILL_ROWS = 1024  # of a prompt in one call: enough to fill a device, and bounds activations
LEVEL_ROWS = 8  # what a draft's call has most often: one level of a tree
SLOT_MULTIPLE = 64  # of the cache, for attention kernels

Range = tuple[int, int, int]  # the least, the most frequent, the most
Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """The least, the most frequent and the largest shape of each input whose shape varies."""

    name: str
    shapes: Mapping[str, tuple[Dims, Dims, Dims]]

    @classmethod
    def of(cls, name: str, shapes: Mapping[str, Sequence[Sequence[int]]]) -> Profile:
        """The profile of shapes as JSON has them. ValueError where an input has not three."""
        return cls(name, {key: (tuple(a), tuple(b), tuple(c)) for key, (a, b, c) in shapes.items()})

    def most(self, name: str, dim: int) -> int:
        """The largest size of one dimension of an input."""
        return self.shapes[name][2][dim]


def tree_rows(limits: EngineLimits) -> int:
    """Rows of a call that verifies or makes the largest tree."""
    return limits.max_draft_tree_size or limits.verify_tree_size


def prefill_rows(shape: GraphShape, limits: EngineLimits) -> int:
    """Tokens of a prompt that one call reads at most."""
    chunk = RECURRENT_CHUNK if shape.recurrent else PREFILL_ROWS
    return min(chunk, limits.max_input_len)


def max_rows(shape: GraphShape, limits: EngineLimits) -> int:
    """The most rows of a sequence in one call, of all profiles."""
    return max(prefill_rows(shape, limits), tree_rows(limits))


def slots_of(limits: EngineLimits) -> int:
    """Slots of a lane's cache: room behind the last token for rows that only fill up a call of a
    fixed size, and a multiple that kernels like."""
    slots = limits.max_kv_cache_capacity + tree_rows(limits)
    return -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE


def profiles_of(contract: GraphContract, limits: EngineLimits) -> tuple[Profile, ...]:
    """The profiles of a lowered graph; heads over a state, which read no prompt, have one."""
    shape = contract.shape
    generation = made("generation", contract, generation_ranges(shape, limits))
    if shape.heads:
        return (generation,)
    return made("prefill", contract, prefill_ranges(shape, limits)), generation


def prefill_ranges(shape: GraphShape, limits: EngineLimits) -> dict[str, Range]:
    """Sizes by symbol where a prompt is read. A block draft reads it as context, and its block of
    one row stands behind."""
    chunk, tree = prefill_rows(shape, limits), tree_rows(limits)
    rows: Range = (1, 1, tree) if shape.block else (1, chunk, chunk)
    return {
        "B": (1, 1, limits.max_batch_size),  # one prompt after the other
        **dict.fromkeys(("S", "S_base", "S_draft"), rows),
        "G": (1, 1, tree),  # its last row alone goes through the head
        "L": (1, chunk, chunk),
        "P": (1, chunk, max(chunk, tree)),
    }


def generation_ranges(shape: GraphShape, limits: EngineLimits) -> dict[str, Range]:
    """Sizes by symbol where drafts are verified or made."""
    tree, batch = tree_rows(limits), limits.max_batch_size
    levels = limits.max_draft_tree_size is not None and not shape.block
    rows: Range = (1, min(LEVEL_ROWS, tree) if levels else tree, tree)
    return {
        "B": (1, batch, batch),
        **dict.fromkeys(("S", "S_base", "S_draft", "G"), rows),
        "L": (1, min(LEVEL_ROWS, tree), tree),
        "P": (1, min(LEVEL_ROWS, tree), max(prefill_rows(shape, limits), tree)),
    }


def made(name: str, contract: Contract, ranges: Mapping[str, Range]) -> Profile:
    """The profile in which each symbol has its range."""
    varying = [spec for spec in contract.inputs if any(isinstance(d, str) for d in spec.shape)]
    return Profile(name, {spec.name: shapes_of(spec, ranges) for spec in varying})


def shapes_of(spec: TensorSpec, ranges: Mapping[str, Range]) -> tuple[Dims, Dims, Dims]:
    """The three shapes of an input; ContractError where a dimension is of an unknown symbol."""
    for dim in spec.shape:
        if isinstance(dim, str) and dim not in ranges:
            raise ContractError(f"{spec.name}: its dimension {dim} has no range")
    least, often, most = (
        tuple(ranges[dim][i] if isinstance(dim, str) else dim for dim in spec.shape)
        for i in range(3)
    )
    return least, often, most
