"""What goes to the device of a mask makes the mask that the host would make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgespec.backends.call import Attention, Call, LaneAttention
from edgespec.backends.cuda import kernels
from edgespec.backends.cuda.visibility import Visibility, width_of
from edgespec.backends.cuda.workspace import Workspace
from edgespec.backends.host import HostStates
from edgespec.backends.masks import attention_mask
from tests.tensorrt_simulator.cpu_kernels import made_device
from tests.tensorrt_simulator.device import HostDevice

SLOTS = 48


def call_of(lanes: list[tuple[int, int, int]], context: int = 0, new: int = 0) -> Call:
    """Lanes of (committed, scratch, rows) with random visibility; where there is context, the first
    lane has all of it and the others `new`."""
    rng = np.random.default_rng(3)
    rows = max(lane[2] for lane in lanes)
    attended, starts = [], []
    for i, (length, scratch, count) in enumerate(lanes):
        own = context if i == 0 else new
        visible = rng.random((count, scratch + count)) < 0.5
        visible[np.arange(count), scratch + np.arange(count)] = True
        positions = length + own + np.arange(scratch + count)
        attended.append(LaneAttention(length + own, visible, positions))
        starts.append(length + scratch)
    embeds = np.zeros((len(lanes), rows, 4), np.float32)
    block: dict[str, Any] = {}
    if context:
        states = [HostStates(np.zeros((context, 2), np.float32))] * len(lanes)
        rope = np.zeros((len(lanes), context, 2), np.float32)
        block = {"target_hidden": states, "context_cos": rope, "context_sin": rope}
    gather = [np.zeros(1, np.int64)] * len(lanes)
    indices = np.array(starts, np.int64)
    return Call(embeds, embeds, embeds, Attention(attended), indices, gather, block)


CALLS = {
    "chain": call_of([(9, 0, 5)]),
    "one row": call_of([(9, 0, 1)]),
    "first": call_of([(0, 0, 7)]),
    "scratch": call_of([(9, 6, 4)]),
    "lanes of other lengths": call_of([(9, 0, 5), (30, 0, 2), (0, 3, 1)]),
    "block": call_of([(9, 0, 5)], context=3),
    "blocks": call_of([(9, 0, 5), (4, 0, 2)], context=3, new=1),
}


@pytest.fixture(params=["simulated", "source"])
def device(request: pytest.FixtureRequest) -> HostDevice:
    return made_device(request.param)


@pytest.mark.parametrize("window", [None, 1, 4, 12])
@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_makes_the_mask_of_the_host(
    device: HostDevice, name: str, window: int | None
) -> None:
    call = CALLS[name]
    attention = replace(call.attention, window=window)
    rows, batch = call.rows, len(call.attention.lanes)
    expected = np.empty((batch, 1, rows, SLOTS), bool)
    attention_mask(call, attention, expected)
    width = width_of(call, attention)
    of = Visibility(
        np.full(batch, -1, np.int32),
        np.full((batch, rows), -1, np.int32),
        np.ones((batch, rows, width), bool),
    )
    of.fill(call, attention)
    workspace = Workspace(device)
    at = {}
    for part in ("lengths", "firsts", "visible"):
        array = getattr(of, part)
        at[part] = workspace.alloc(array.nbytes)
        workspace.put(at[part], array)
    mask = workspace.alloc(expected.nbytes)
    grid = (-(-SLOTS // kernels.MASK_THREADS), rows, batch)
    sizes = {"rows": rows, "width": width, "slots": SLOTS}
    workspace.launch("attention_mask", grid, kernels.MASK_THREADS, mask=mask, **at, **sizes)
    workspace.synchronize()
    found = device.at(mask, expected.nbytes).view(bool).reshape(expected.shape)
    assert (found == expected).all()
