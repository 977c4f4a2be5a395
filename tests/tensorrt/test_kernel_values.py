"""What the project's kernels compute, against numpy, over sizes that no block or thread divides: on
a device where there is one, and on the stand-in of a driver in three orders of blocks and threads.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from edgespec.backends.cuda import kernels
from edgespec.backends.cuda.logits import TopSearch, find_top
from edgespec.backends.cuda.workspace import Workspace
from edgespec.backends.host import HostLogits
from tests.tensorrt.cuda import device, get, orders, put, workspace

__all__ = ["device", "orders", "workspace"]

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("orders")]

PART = kernels.PART_IDS
HALVES = {1: np.dtype(np.float16), 2: np.dtype(ml_dtypes.bfloat16)}
FLOATS = {0: np.dtype(np.float32), **HALVES}


# ---- float32 as a half


def edges() -> np.ndarray:
    """Numbers at which rounding turns: ties, subnormal and largest ones, zeros, Inf."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    exact = np.concatenate([halves[::97].view(kind).astype(np.float32) for kind in HALVES.values()])
    exact = exact[np.isfinite(exact)]
    near = np.nextafter(exact, np.float32(np.inf))
    ties = (exact.view(np.uint32) & 0xFFFF0000 | 0x8000).view(np.float32)  # of bfloat16
    half_ties = (exact.view(np.uint32) & 0xFFFFE000 | 0x1000).view(np.float32)  # of float16
    limits = [65504, 65519.9, 65520, 6e-8, 3e-8, 2.98e-8, 1e-45, 3.39e38, 3.4e38, np.inf, 0.0]
    found = np.concatenate([exact, near, ties, half_ties, np.float32(limits)])
    return np.concatenate([found, -found])


@pytest.mark.parametrize("kind", HALVES)
def test_every_edge_rounds_as_in_numpy(workspace: Workspace, kind: int) -> None:
    values = edges()
    values = np.resize(values, len(values) | 1)
    check_convert(workspace, values, kind, blocks=3)


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("count", [0, 1, 127, 129, 1001])
def test_any_count_is_rounded_and_no_number_more(
    workspace: Workspace, kind: int, count: int
) -> None:
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    check_convert(workspace, values, kind, blocks=2)


def check_convert(workspace: Workspace, values: np.ndarray, kind: int, blocks: int) -> None:
    source, behind = put(workspace, values), np.array([1, 2, 3], np.uint16)
    target = put(workspace, np.concatenate([np.zeros(len(values), np.uint16), behind]))
    sizes = {"count": len(values), "kind": kind}
    grid = (blocks, 1, 1)
    workspace.launch("convert", grid, kernels.THREADS, source=source, target=target, **sizes)
    found = get(workspace, target, (len(values) + 3,), np.uint16)
    with np.errstate(over="ignore"):
        expected = values.astype(HALVES[kind]).view(np.uint16)
    assert (found[: len(values)] == expected).all()
    assert (found[len(values) :] == behind).all()


@pytest.mark.parametrize("kind", HALVES)
def test_nan_stays_nan(workspace: Workspace, kind: int) -> None:
    bits = np.array([0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0xFF800001], np.uint32)
    source, target = put(workspace, bits), put(workspace, np.zeros(4, np.uint16))
    sizes = {"count": 4, "kind": kind}
    workspace.launch("convert", (1, 1, 1), 32, source=source, target=target, **sizes)
    assert np.isnan(get(workspace, target, (4,), HALVES[kind]).astype(np.float32)).all()


# ---- NaN and Inf


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("count", [1, 37, 1031])
def test_lanes_with_nan_or_inf_are_found(workspace: Workspace, kind: int, count: int) -> None:
    largest = float(ml_dtypes.finfo(FLOATS[kind]).max)
    lanes = np.full((6, count), -largest).astype(FLOATS[kind])
    lanes[1, 0], lanes[2, -1], lanes[4, count // 2] = np.nan, np.inf, -np.inf
    values, flags = put(workspace, lanes), put(workspace, np.zeros(7, np.int32))
    sizes = {"values": values, "count": count, "kind": kind}
    workspace.launch("not_finite", (3, 1, 6), kernels.THREADS, flags=flags, **sizes)
    assert get(workspace, flags, (7,), np.int32).tolist() == [0, 1, 1, 0, 1, 0, 0]


# ---- the mask


def test_a_mask_is_what_its_rows_see(workspace: Workspace) -> None:
    batch, rows, width, slots = 4, 5, 7, 301
    random = np.random.default_rng(0)
    lengths = np.array([0, 100, 297, 301], np.int32)  # new rows before, in and behind the slots
    firsts = random.integers(0, 120, (batch, rows)).astype(np.int32)
    visible = random.integers(0, 2, (batch, rows, width)).astype(np.bool_)
    expected = np.zeros((batch, rows, slots), np.bool_)
    for lane in range(batch):
        for row in range(rows):
            for slot in range(slots):
                past = slot - int(lengths[lane])
                if past < 0:
                    expected[lane, row, slot] = slot >= firsts[lane, row]
                elif past < width:
                    expected[lane, row, slot] = visible[lane, row, past]
    addresses = {
        name: put(workspace, array)
        for name, array in (("lengths", lengths), ("firsts", firsts), ("visible", visible))
    }
    mask = put(workspace, np.full(expected.size, 7, np.uint8))
    threads = kernels.MASK_THREADS
    sizes = {"rows": rows, "width": width, "slots": slots}
    grid = (-(-slots // threads), rows, batch)
    workspace.launch("attention_mask", grid, threads, mask=mask, **addresses, **sizes)
    found = get(workspace, mask, expected.shape, np.uint8)
    assert (found == expected).all()


# ---- the largest logits


def logits_of(kind: str, rows: int, ids: int) -> np.ndarray:
    """Logits of a kind, [rows, ids]."""
    random = np.random.default_rng(ids)
    if kind == "equal":
        return np.full((rows, ids), -2.5, np.float32)
    if kind == "zeros of both signs":
        return np.where(random.integers(0, 2, (rows, ids)), np.float32(0), np.float32(-0.0))
    array = random.standard_normal((rows, ids)).astype(np.float16).astype(np.float32)  # with ties
    if kind == "far apart":
        array *= np.float32(1e4)
    return array


@pytest.mark.parametrize("kind", ["equal", "zeros of both signs", "with ties", "far apart"])
@pytest.mark.parametrize(
    ("rows", "ids", "stride", "count"),
    [(1, 1, 1, 1), (2, 257, 300, 9), (2, PART, PART, 5), (2, PART + 1, PART + 7, 64)],
)
def test_the_largest_logits_are_those_of_the_host(
    workspace: Workspace, kind: str, rows: int, ids: int, stride: int, count: int
) -> None:
    array = np.full((rows, stride), np.inf, np.float32)  # behind the ids that are searched
    array[:, :ids] = logits_of(kind, rows, ids)
    found = find_top(workspace, put(workspace, array), TopSearch(rows, stride, ids, count))
    expected = HostLogits(array[:, :ids]).top(count)
    assert (found.ids == expected.ids).all()
    assert (found.values == expected.values).all()
    assert np.allclose(found.logsumexp, expected.logsumexp, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("place", [0, 255, 256, PART])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_row_with_nan_or_inf_says_so(workspace: Workspace, place: int, value: float) -> None:
    ids = PART + 1
    array = logits_of("with ties", 3, ids)
    array[1, place] = value
    found = find_top(workspace, put(workspace, array), TopSearch(3, ids, ids, 2))
    assert np.isfinite(found.logsumexp).tolist() == [True, False, True]
    assert (found.ids[1, 0] == place) == (value != -np.inf)


# ---- rows


def rows_of(seed: int, tensors: int, heads: int, slots: int, row_bytes: int) -> np.ndarray:
    shape = (tensors, heads, slots, row_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def table(workspace: Workspace, address: int, array: np.ndarray) -> int:
    """The addresses of an array's first dimension."""
    starts = address + array[0].nbytes * np.arange(len(array), dtype=np.uint64)
    return put(workspace, starts.astype(np.uint64))


@pytest.mark.parametrize(("row_bytes", "wide"), [(16, 1), (48, 1), (2064, 1), (2, 0), (130, 0)])
def test_rows_move_between_tensors(workspace: Workspace, row_bytes: int, wide: int) -> None:
    """From every other tensor's rows to others, zeros where no row is named."""
    tensors, heads = 3, 2
    ours = rows_of(0, tensors, heads, 9, row_bytes)
    theirs = rows_of(1, tensors, heads, 7, row_bytes)
    source, target = put(workspace, ours), put(workspace, theirs)
    moves = {"from": np.array([8, -1, 0, 4], np.int32), "to": np.array([0, 2, 3, 5], np.int32)}
    offset = 1 * row_bytes
    workspace.launch(
        "move_rows",
        (tensors, heads, 1),
        kernels.THREADS,
        sources=table(workspace, source, ours),
        targets=table(workspace, target, theirs),
        source_offset=0,
        target_offset=offset,
        row_bytes=row_bytes,
        source_head_bytes=9 * row_bytes,
        target_head_bytes=7 * row_bytes,
        count=4,
        wide=wide,
        tables=1,
        **moves,
    )
    expected = theirs.copy()
    for origin, place in zip(moves["from"], moves["to"], strict=True):
        expected[:, :, 1 + place] = 0 if origin < 0 else ours[:, :, origin]
    assert (get(workspace, target, theirs.shape, np.uint8) == expected).all()
    assert (get(workspace, source, ours.shape, np.uint8) == ours).all()


@pytest.mark.parametrize(("row_bytes", "wide"), [(32, 1), (34, 0)])
def test_rows_of_a_tensor_close_up(workspace: Workspace, row_bytes: int, wide: int) -> None:
    """As many as a launch takes; a row goes to where a later one has left."""
    count = kernels.MAX_MOVES
    array = rows_of(2, 1, 1, 2 * count, row_bytes)
    address = put(workspace, array)
    origins = np.sort(np.random.default_rng(3).choice(2 * count, count, replace=False))
    moves: dict[str, Any] = {"from": origins.astype(np.int32), "to": np.arange(count)}
    ends = {"source_offset": address, "target_offset": address}
    sizes = {"row_bytes": row_bytes, "count": count, "wide": wide}
    workspace.launch("move_rows", (1, 1, 1), kernels.THREADS, **moves, **ends, **sizes)
    expected = array.copy()
    expected[:, :, :count] = array[:, :, origins]
    assert (get(workspace, address, array.shape, np.uint8) == expected).all()


@pytest.mark.parametrize(("rows", "row_bytes", "wide"), [(5, 48, 1), (1, 16, 1), (3, 130, 0)])
def test_rows_are_copied_by_several_blocks(
    workspace: Workspace, rows: int, row_bytes: int, wide: int
) -> None:
    tensors, heads = 3, 2
    ours, theirs = (
        rows_of(4, tensors, heads, 9, row_bytes),
        rows_of(5, tensors, heads, 7, row_bytes),
    )
    source, target = put(workspace, ours), put(workspace, theirs)
    workspace.launch(
        "copy_rows",
        (tensors, heads, kernels.COPY_BLOCKS),
        32,
        sources=table(workspace, source, ours),
        targets=table(workspace, target, theirs),
        source_offset=2 * row_bytes,
        target_offset=row_bytes,
        size=rows * row_bytes,
        source_head_bytes=9 * row_bytes,
        target_head_bytes=7 * row_bytes,
        wide=wide,
    )
    expected = theirs.copy()
    expected[:, :, 1 : 1 + rows] = ours[:, :, 2 : 2 + rows]
    assert (get(workspace, target, theirs.shape, np.uint8) == expected).all()
