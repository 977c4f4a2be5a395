"""A device in host memory. It is lazy: what is put on a stream happens when somebody waits for it,
so that whoever reads too early reads old bytes. New memory holds NaN.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.cuda.device.base import (
    ALIGNMENT,
    Device,
    DeviceLost,
    DeviceMemoryFull,
    DeviceProblem,
    HostBlock,
)
from edgespec.backends.cuda.kernels import PART_IDS, STRUCTURES, TOP_THREADS

Bytes = NDArray[np.uint8]
POISON = 0xFF  # NaN in every floating-point type
LAST_ID = np.uint64(0x7FFFFFFF)
SIGN, ALL = np.uint32(0x80000000), np.uint32(0xFFFFFFFF)


def best_first(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """The places of logits, NaN first, then the largest, equal ones by their places."""
    return np.lexsort((np.arange(len(logits)), -logits, ~np.isnan(logits)))


def key_of(values: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """What the kernels compare: larger for a larger logit, of equal ones for a smaller id."""
    bits = np.where(np.isnan(values), np.uint32(0x7FFFFFFF), (values + 0.0).view(np.uint32))
    bits ^= np.where(bits & SIGN, ALL, SIGN)
    return bits.astype(np.uint64) << np.uint64(32) | LAST_ID - ids.astype(np.uint64)


def value_of(keys: NDArray[np.uint64]) -> NDArray[np.float32]:
    """The logits of such keys."""
    bits = (keys >> np.uint64(32)).astype(np.uint32)
    return (bits ^ np.where(bits & SIGN, SIGN, ALL)).view(np.float32)


@dataclass
class Stream:
    """Work in its order. While it is captured, work goes to `kept`."""

    work: list[Callable[[], None]] = field(default_factory=list)
    kept: list[Callable[[], None]] | None = None
    broken: bool = False


@dataclass
class Event:
    """On which stream it was put last, and when the stream came to it."""

    stream: int | None = None
    reached_s: float | None = None


class HostDevice(Device):
    """Memory, streams, graphs and kernels on the host. `limit` is its memory in bytes. One that is
    `idle` does nothing of what it is asked: so the host's own time is measured. The last one that
    was made is `HostDevice.current`."""

    name, sm, can_capture = "simulated device", 120, True
    current: HostDevice | None = None
    work_left: int | None = None  # what it does until something fails, after which it is lost

    def __init__(self, limit: int = 1 << 40, *, idle: bool = False) -> None:
        self.limit, self.idle = limit, idle
        self.memory: dict[int, tuple[Bytes, int]] = {}
        self.blocks: dict[int, Bytes] = {}
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.handles = count(0x5000)
        self.active, self.closed = False, False
        self.launched: list[str] = []  # graphs and kernels, in their order
        HostDevice.current = self

    def activate(self) -> None:
        self.active = True

    def works(self) -> bool:
        return self.lost is None

    def do(self, step: Callable[[], None]) -> None:
        """Do a piece of work. What fails on a device is seen by whoever waits, and ends it."""
        self.must_work()
        try:
            if self.work_left is not None:
                self.work_left -= 1
                if self.work_left < 0:
                    raise DeviceProblem("CUDA: an illegal memory access was encountered")
            step()
        except DeviceProblem as error:
            self.lost = DeviceLost(error.what)
            raise self.lost from error

    def must_work(self) -> None:
        """DeviceLost where nothing works any more."""
        if self.lost is not None:
            raise DeviceLost(self.lost.what)

    # ---- memory

    def alloc(self, size: int) -> int:
        self.no_capture("memory is allocated")
        self.must_work()
        assert self.active
        assert size > 0
        if size + sum(held for _, held in self.memory.values()) > self.limit:
            raise DeviceMemoryFull("CUDA: cudaErrorMemoryAllocation: out of memory")
        array = np.empty(size + ALIGNMENT, np.uint8)
        if not self.idle:
            array.fill(POISON)
        address = -(-array.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.memory[address] = array, size
        return address

    def free(self, address: int) -> None:
        self.no_capture("memory is freed")
        if address not in self.memory:
            raise DeviceProblem(f"CUDA: {address:#x} is freed and was not allocated")
        del self.memory[address]

    def pinned(self, size: int) -> HostBlock:
        block = np.full(size, POISON, np.uint8)
        self.blocks[block.ctypes.data] = block
        return HostBlock(block.ctypes.data, block)

    def free_pinned(self, block: HostBlock) -> None:
        del self.blocks[block.address]

    def at(self, address: int, size: int) -> Bytes:
        """The bytes of device memory; DeviceProblem where some are not allocated."""
        for start, (_, held) in self.memory.items():
            if start <= address and address + size <= start + held:
                return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
        raise DeviceProblem(f"CUDA: an illegal access to {size} bytes at {address:#x}")

    def on_host(self, address: int, size: int) -> Bytes:
        for start, block in self.blocks.items():
            if start <= address and address + size <= start + len(block):
                return block[address - start : address - start + size]
        raise DeviceProblem(f"CUDA: {size} bytes at {address:#x} are not page-locked")

    def zero(self, address: int, size: int, stream: int) -> None:
        self.put(stream, lambda: self.at(address, size).fill(0))

    def upload(self, target: int, source: int, size: int, stream: int) -> None:
        def work() -> None:
            self.at(target, size)[:] = self.on_host(source, size)

        self.put(stream, work)

    def download(self, target: int, source: int, size: int, stream: int) -> None:
        def work() -> None:
            self.on_host(target, size)[:] = self.at(source, size)

        self.put(stream, work)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        def work() -> None:
            self.at(target, size)[:] = self.at(source, size)

        self.put(stream, work)

    def copy_2d(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        stream: int,
    ) -> None:
        assert width <= min(target_pitch, source_pitch)

        def work() -> None:
            for i in range(height):
                piece = self.at(source + i * source_pitch, width)
                self.at(target + i * target_pitch, width)[:] = piece

        self.put(stream, work)

    # ---- streams and graphs

    def put(self, stream: int, work: Callable[[], None]) -> None:
        """Put work on a stream, or into what is captured there."""
        assert self.active
        self.must_work()
        found = self.streams[stream]
        (found.work if found.kept is None else found.kept).append(work)

    def stream(self) -> int:
        handle = next(self.handles)
        self.streams[handle] = Stream()
        return handle

    def free_stream(self, stream: int) -> None:
        del self.streams[stream]

    def synchronize(self, stream: int) -> None:
        self.must_work()
        self.no_capture("a stream is waited for")
        found = self.streams[stream]
        work, found.work = found.work, []
        for step in work if not self.idle else ():
            self.do(step)

    def event(self) -> int:
        handle = next(self.handles)
        self.events[handle] = Event()
        return handle

    def free_event(self, event: int) -> None:
        del self.events[event]

    def record(self, event: int, stream: int) -> None:
        self.no_capture("an event is recorded")
        found = self.events[event]
        found.stream, found.reached_s = stream, None

        def work() -> None:
            found.reached_s = time.perf_counter()

        self.put(stream, work)
        if self.idle:
            work()

    def wait(self, event: int) -> None:
        """What stands on the stream behind the event stays there."""
        self.must_work()
        self.no_capture("an event is waited for")
        found = self.events[event]
        if found.stream is None:  # never recorded: CUDA does not wait
            return
        work = self.streams[found.stream].work
        while found.reached_s is None:
            self.do(work.pop(0))

    def elapsed_ms(self, begin: int, end: int) -> float:
        first, last = self.events[begin].reached_s, self.events[end].reached_s
        if first is None or last is None:
            raise DeviceProblem("CUDA: cudaErrorNotReady: device not ready")
        return 1000 * (last - first)

    def no_capture(self, what: str) -> None:
        """What must not happen while a stream is captured breaks the capture."""
        for stream in self.streams.values():
            if stream.kept is not None:
                stream.broken = True
                raise DeviceProblem(f"CUDA: {what} while a stream is captured")

    def begin_capture(self, stream: int) -> None:
        found = self.streams[stream]
        assert found.kept is None
        found.kept, found.broken = [], False

    def end_capture(self, stream: int) -> int | None:
        found = self.streams[stream]
        assert found.kept is not None
        kept, found.kept = found.kept, None
        if found.broken:
            return None
        graph = next(self.handles)
        self.graphs[graph] = kept
        return graph

    def launch_graph(self, graph: int, stream: int) -> None:
        self.launched.append("graph")
        for work in self.graphs[graph]:
            self.put(stream, work)

    def free_graph(self, graph: int) -> None:
        del self.graphs[graph]

    # ---- kernels

    def compile(self, source: str) -> bytes:
        assert all(f"__global__ void {name}(" in source for name in STRUCTURES)
        return b"compiled"

    def load_kernel(self, image: bytes, name: str) -> object:
        assert image == b"compiled"
        return name

    def launch(
        self,
        kernel: object,
        grid: tuple[int, int, int],
        threads: int,
        argument: bytes,
        stream: int,
    ) -> None:
        name = str(kernel)
        self.launched.append(name)
        if self.idle:
            return
        values = np.frombuffer(argument, STRUCTURES[name])[0]
        kernels = (
            self.move_rows,
            self.copy_rows,
            self.attention_mask,
            self.not_finite,
            self.convert,
            self.top_parts,
            self.top_rows,
        )
        run = {work.__name__: work for work in kernels}[name]
        self.put(stream, lambda: run(values, grid, threads))

    def ends(self, values: np.void, grid: tuple[int, int, int]) -> list[tuple[int, int]]:
        """Source and target address of each block."""
        if "tables" in (values.dtype.names or ()) and not values["tables"]:
            assert grid[:2] == (1, 1)
            return [(int(values["source_offset"]), int(values["target_offset"]))]
        tables = [
            self.at(int(values[name]), 8 * grid[0]).view(np.uint64)
            for name in ("sources", "targets")
        ]
        return [
            (
                int(source)
                + int(values["source_offset"])
                + head * int(values["source_head_bytes"]),
                int(target)
                + int(values["target_offset"])
                + head * int(values["target_head_bytes"]),
            )
            for source, target in zip(*tables, strict=True)
            for head in range(grid[1])
        ]

    def move_rows(self, values: np.void, grid: tuple[int, int, int], threads: int) -> None:
        size = int(values["row_bytes"])
        assert not values["wide"] or size % 16 == 0
        for source, target in self.ends(values, grid):
            for i in range(values["count"]):
                origin, place = int(values["from"][i]), int(values["to"][i])
                row = self.at(target + place * size, size)
                row[:] = 0 if origin < 0 else self.at(source + origin * size, size)

    def copy_rows(self, values: np.void, grid: tuple[int, int, int], threads: int) -> None:
        size = int(values["size"])
        assert not values["wide"] or size % 16 == 0
        for source, target in self.ends(values, grid):
            self.at(target, size)[:] = self.at(source, size)

    def convert(self, values: np.void, grid: tuple[int, int, int], threads: int) -> None:
        count, dtype = int(values["count"]), (None, np.float16, ml_dtypes.bfloat16)[values["kind"]]
        assert dtype is not None
        source = self.at(int(values["source"]), 4 * count).view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            target = source.astype(dtype)
        self.at(int(values["target"]), 2 * count)[:] = target.view(np.uint8)

    def not_finite(self, values: np.void, grid: tuple[int, int, int], threads: int) -> None:
        count, lanes = int(values["count"]), grid[2]
        bits = (np.dtype(np.uint32), np.dtype(np.uint16), np.dtype(np.uint16))[values["kind"]]
        mask = (0x7F800000, 0x7C00, 0x7F80)[values["kind"]]
        found = self.at(int(values["values"]), lanes * count * bits.itemsize).view(bits)
        flags = self.at(int(values["flags"]), 4 * lanes).view(np.int32)
        flags |= ((found.reshape(lanes, count) & mask) == mask).any(1)

    def top_parts(self, values: np.void, grid: tuple[int, int, int], threads: int) -> None:
        stride, ids, parts, count = (int(values[n]) for n in ("stride", "ids", "parts", "count"))
        rows = grid[1]
        assert (grid[0], threads) == (parts, TOP_THREADS)
        assert (parts - 1) * PART_IDS < ids <= min(stride, parts * PART_IDS)
        logits = self.at(int(values["logits"]), 4 * rows * stride).view(np.float32)
        keys = self.at(int(values["keys"]), 8 * rows * parts * count).view(np.uint64)
        sums = self.at(int(values["sums"]), 4 * rows * parts).view(np.float32)
        keys[:] = 0
        for row, part in np.ndindex(rows, parts):
            own = logits.reshape(rows, stride)[row, part * PART_IDS : (part + 1) * PART_IDS]
            own = own[: ids - part * PART_IDS]
            place, order = row * parts + part, best_first(own)[:count]
            keys[place * count :][: len(order)] = key_of(own[order], part * PART_IDS + order)
            finite = np.isfinite(own).all()
            sums[place] = np.exp(own - own[order[0]]).sum() if finite else np.nan

    def top_rows(self, values: np.void, grid: tuple[int, int, int], threads: int) -> None:
        rows, parts, count = grid[0], int(values["parts"]), int(values["count"])
        assert parts <= threads == TOP_THREADS
        keys = self.at(int(values["keys"]), 8 * rows * parts * count).view(np.uint64)
        keys = np.sort(keys.reshape(rows, parts * count))[:, ::-1]
        sums = self.at(int(values["sums"]), 4 * rows * parts).view(np.float32)
        size = 4 * rows * count
        ids = self.at(int(values["ids"]), size).view(np.int32).reshape(rows, count)
        best = self.at(int(values["values"]), size).view(np.float32).reshape(rows, count)
        ids[:], best[:] = LAST_ID - (keys[:, :count] & LAST_ID), value_of(keys[:, :count])
        own = self.at(int(values["keys"]), 8 * rows * parts * count).view(np.uint64)
        peaks = value_of(own.reshape(rows, parts, count)[:, :, 0])
        with np.errstate(invalid="ignore"):
            shares = sums.reshape(rows, parts) * np.exp(peaks - best[:, :1])
            found = best[:, 0] + np.log(shares.sum(1))
        self.at(int(values["logsumexp"]), 4 * rows).view(np.float32)[:] = found

    def attention_mask(self, values: np.void, grid: tuple[int, int, int], threads: int) -> None:
        rows, width, slots = (int(values[name]) for name in ("rows", "width", "slots"))
        batch = grid[2]
        assert grid[0] * threads >= slots
        lengths = self.at(int(values["lengths"]), 4 * batch).view(np.int32)
        firsts = self.at(int(values["firsts"]), 4 * batch * rows).view(np.int32)
        visible = self.at(int(values["visible"]), batch * rows * width).reshape(batch, rows, width)
        mask = self.at(int(values["mask"]), batch * rows * slots).reshape(batch, rows, slots)
        columns = np.arange(slots)
        for lane, length in enumerate(lengths.tolist()):
            mask[lane] = 0
            sees = columns[:length] >= firsts.reshape(batch, rows)[lane][:, None]
            mask[lane, :, :length] = sees
            end = min(slots, length + width)
            mask[lane, :, length:end] = visible[lane, :, : end - length]

    def close(self) -> None:
        self.closed = True
