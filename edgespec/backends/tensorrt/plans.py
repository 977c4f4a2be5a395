"""How a call of one size stands in memory: what is copied to the device, what kernels make of it,
where hidden states are read, and what comes back.

Knows contracts, sizes and addresses. Knows nothing of what a call says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.cuda.bound import Bound
from edgespec.backends.cuda.kernels import CONVERT_BLOCKS, FINITE_BLOCKS, MASK_THREADS, THREADS
from edgespec.backends.cuda.logits import TopSearch, Wanted
from edgespec.backends.cuda.states import DTYPES, KINDS
from edgespec.backends.cuda.visibility import Visibility
from edgespec.backends.cuda.workspace import Launch, Workspace, aligned
from edgespec.backends.tensorrt.contract import memory_names
from edgespec.backends.tensorrt.execution import ExecutionContext
from edgespec.contract import ITEM_BYTES, GraphContract, Kind, inputs_named

HALVES = ("float16", "bfloat16")
Sizes = Mapping[str, int]  # by symbol
Shape = tuple[int, ...]
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Something in a block, `offset` bytes behind its beginning."""

    offset: int
    shape: Shape
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return prod(self.shape) * self.dtype.itemsize


class Block:
    """Parts one behind the other, each at an address that can be bound."""

    def __init__(self) -> None:
        self.parts: dict[str, MemoryPart] = {}
        self.size = 0

    def add(self, name: str, shape: Shape, dtype: np.dtype[Any]) -> None:
        """One part more."""
        self.parts[name] = part = MemoryPart(self.size, shape, dtype)
        self.size += aligned(part.nbytes)

    def addresses(self, begin: int) -> dict[str, int]:
        """Where its parts stand, by name, where it begins there."""
        return {name: begin + part.offset for name, part in self.parts.items()}


class MemoryLayout:
    """Where all of a call stands: on the device one behind the other the hidden states that it
    reads, what is copied, what kernels make of that, what a search works in, and what is copied
    back. `widths` are those of the masks, by name."""

    def __init__(
        self, contract: GraphContract, sizes: Sizes, widths: Mapping[str, int], wanted: Wanted
    ) -> None:
        self.contract, self.sizes = contract, sizes
        memory, heads = memory_names(contract.shape), max(1, contract.shape.heads)
        self.states, self.upload, self.made, self.returned = (Block() for _ in range(4))
        self.shapes = {spec.name: spec.dims(**sizes) for spec in contract.inputs}
        batch, rows = sizes["B"], sizes["S"]
        for spec in contract.inputs:
            name, shape, dtype = spec.name, self.shapes[spec.name], DTYPES[spec.dtype]
            if name in inputs_named(Kind.STATES):
                self.states.add(name, shape, dtype)
            elif name in inputs_named(Kind.MASK):
                self.upload.add(f"{name}/lengths", (batch,), np.dtype(np.int32))
                self.upload.add(f"{name}/firsts", (batch, rows), np.dtype(np.int32))
                self.upload.add(f"{name}/visible", (batch, rows, widths[name]), np.dtype(np.bool_))
                self.made.add(name, shape, dtype)
            elif name not in memory:
                half = spec.dtype in HALVES
                self.upload.add(name, shape, np.dtype(np.float32) if half else dtype)
                if half:
                    self.made.add(name, shape, dtype)
        outputs = {spec.name: spec for spec in contract.outputs}
        *places, width = outputs["logits"].dims(**sizes)
        stride = width // heads
        searched = min(wanted.ids, stride)
        count = min(wanted.count, searched)
        self.search = TopSearch(prod(places) * heads, stride, searched, count)
        self.hidden_states = outputs.get("hidden_states")
        if self.hidden_states is not None:
            self.returned.add("not finite", (batch,), np.dtype(np.int32))
        self.returned.add("top", (self.search.found_bytes,), np.dtype(np.uint8))
        self.work_at = self.states.size + self.upload.size + self.made.size
        self.returned_at = self.work_at + self.search.work_bytes

    def fit(self, workspace: Workspace) -> None:
        """Have memory for it; plans of before are void where the workspace's version changes."""
        inputs = self.returned_at + self.returned.size
        workspace.fit(inputs=inputs, upload=self.upload.size, download=self.returned.size)


@dataclass
class MemoryPlan:
    """A call of one size, in memory that has room for it. `uses` counts the calls; `graph` is what
    they come to, once captured."""

    layout: MemoryLayout
    context: ExecutionContext
    bound: Sequence[Bound]
    arrays: dict[str, Array]  # of the page-locked block, by input or part of a mask
    masks: dict[str, Visibility]  # the same arrays
    states: dict[str, int]  # addresses
    upload: tuple[int, int, int]  # device, host, bytes
    before: list[Launch]
    flags: tuple[int, int]  # address and bytes of what is set where NaN or Inf is
    after: list[Launch]
    download: tuple[int, int, int]  # host, device, bytes
    returned: dict[str, Array]  # of the page-locked block
    uses: int = 0
    graph: int | None = None
    can_capture: bool = True


def plan_of(
    layout: MemoryLayout,
    workspace: Workspace,
    context: ExecutionContext,
    outputs: Mapping[str, int],
    memory: Sequence[Bound],
) -> MemoryPlan:
    """The plan of a call that stands so, in memory that `layout` fits. `outputs` are addresses,
    `memory` what is bound of caches and states."""
    begin = workspace.inputs.address
    states = layout.states.addresses(begin)
    copied = layout.upload.addresses(begin + layout.states.size)
    made = layout.made.addresses(begin + layout.states.size + layout.upload.size)
    back = layout.returned.addresses(begin + layout.returned_at)
    read = states | copied | made
    bound = [
        Bound(
            spec.name,
            read[spec.name],
            layout.shapes[spec.name] if spec.name in context.varying else None,
        )
        for spec in layout.contract.inputs
        if spec.name in read
    ]
    up, down = workspace.upload, workspace.download
    arrays = {
        name: up.view(part.offset, part.shape, part.dtype)
        for name, part in layout.upload.parts.items()
    }
    masks = {
        name: Visibility(*(arrays[f"{name}/{part}"] for part in ("lengths", "firsts", "visible")))
        for name in inputs_named(Kind.MASK)
        if name in made
    }
    after = layout.search.launches(outputs["logits"], begin + layout.work_at, back["top"])
    flags = (back.get("not finite", 0), 4 * layout.sizes["B"])
    if layout.hidden_states is not None:
        after.append(finite_launch(layout, outputs["hidden_states"], flags[0]))
    return MemoryPlan(
        layout=layout,
        context=context,
        bound=(*bound, *memory, *(Bound(name, at) for name, at in outputs.items())),
        arrays=arrays,
        masks=masks,
        states=states,
        upload=(begin + layout.states.size, up.address if arrays else 0, layout.upload.size),
        before=[
            mask_launch(layout, name, copied, made[name])
            if name in masks
            else convert_launch(layout, name, copied[name], made[name])
            for name in made
        ],
        flags=flags,
        after=after,
        download=(down.address, begin + layout.returned_at, layout.returned.size),
        returned={
            name: down.view(part.offset, part.shape, part.dtype)
            for name, part in layout.returned.parts.items()
        },
    )


# ---- the kernels of a call


def mask_launch(layout: MemoryLayout, name: str, copied: Mapping[str, int], mask: int) -> Launch:
    """The kernel that makes a mask."""
    batch, _, rows, slots = layout.shapes[name]
    parts = {part: copied[f"{name}/{part}"] for part in ("lengths", "firsts", "visible")}
    width = layout.upload.parts[f"{name}/visible"].shape[2]
    sizes = {"rows": rows, "width": width, "slots": slots, "mask": mask}
    grid = (-(-slots // MASK_THREADS), rows, batch)
    return Launch.of("attention_mask", grid, MASK_THREADS, **parts, **sizes)


def convert_launch(layout: MemoryLayout, name: str, source: int, target: int) -> Launch:
    """The kernel that rounds an input, which comes in float32."""
    part = layout.made.parts[name]
    kind = KINDS["bfloat16" if part.dtype == DTYPES["bfloat16"] else "float16"]
    values = {"source": source, "target": target, "count": prod(part.shape), "kind": kind}
    return Launch.of("convert", (CONVERT_BLOCKS, 1, 1), THREADS, **values)


def finite_launch(layout: MemoryLayout, states: int, flags: int) -> Launch:
    """The kernel that looks for NaN and Inf among the hidden states of each lane."""
    spec, batch = layout.hidden_states, layout.sizes["B"]
    assert spec is not None
    count = spec.num_bytes(**layout.sizes) // ITEM_BYTES[spec.dtype] // batch
    values = {"values": states, "flags": flags, "count": count, "kind": KINDS[spec.dtype]}
    return Launch.of("not_finite", (FINITE_BLOCKS, 1, batch), THREADS, **values)
