"""What the engines of a pair share on a device: its stream, the memory that they work in, the
compiled kernels.

Base and draft run one after the other on one stream, so that one block of memory serves both. Knows
a device; knows no engine.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import PairDevice
from edgespec.backends.cuda import kernels
from edgespec.backends.cuda.device.base import ALIGNMENT, Device, DeviceMemoryFull, HostBlock
from edgespec.errors import EnvironmentProblem

logger = logging.getLogger(__name__)


def aligned(size: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def attempt(*steps: Callable[[], object]) -> None:
    """Do each step of an end, though others fail: after an error that CUDA does not get over, every
    call fails, and what ends then has an error already that says why."""
    for step in steps:
        try:
            step()
        except EnvironmentProblem as error:
            logger.debug("while closing: %s", error.what)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel of the project with its structure; `grid` counts blocks, `threads` those of one."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    argument: bytes

    @classmethod
    def of(cls, kernel: str, grid: tuple[int, int, int], threads: int, **values: Any) -> Launch:
        """That of a structure's values."""
        return cls(kernel, grid, threads, kernels.structure(kernel, **values))


class Workspace(PairDevice):
    """A device in use. It ends with its last user: `join` and `leave` count them. One that a pair
    shares has a user more until it is closed.

    `scratch` is the memory in which engines keep activations. What a call reads and gives goes
    through `upload` and `download`, which are page-locked, and stands in `inputs` on the device;
    nothing stays there from call to call. `version` counts the moves of all four, after which
    contexts must be told and graphs are void.
    """

    def __init__(self, device: Device, *, shared: bool = False) -> None:
        self.device, self.shared = device, shared
        self.lock = threading.RLock()
        device.activate()
        self.stream = device.stream()
        self.begin, self.end = device.event(), device.event()  # of a call
        self.version = 0
        self.kernels: dict[str, object] = {}
        self.users = int(shared)
        self.held: set[int] = set()
        self.dropped: list[int] = []  # memory that nobody refers to any more
        self.spare: dict[int, list[int]] = {}  # by size, memory that was borrowed before
        self.scratch, self.inputs = Buffer(self), Buffer(self)
        self.upload, self.download = Pinned(self), Pinned(self)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Use the stream from this thread, and no other thread does."""
        with self.lock:
            self.device.activate()
            yield

    def close(self) -> None:
        """No further engine is opened on it; closing twice is harmless."""
        if self.shared:
            self.shared = False
            self.leave()

    def join(self) -> None:
        """One user more."""
        self.users += 1

    def leave(self) -> None:
        """One user less; with the last one all is given back."""
        self.users -= 1
        if self.users:
            return
        with self.lock:
            attempt(
                self.device.activate,
                self.settle,
                self.upload.free,
                self.download.free,
                *(partial(self.free, address) for address in list(self.held)),
                partial(self.device.free_event, self.begin),
                partial(self.device.free_event, self.end),
                partial(self.device.free_stream, self.stream),
                self.kernels.clear,
                self.device.close,
            )

    # ---- memory

    def alloc(self, size: int) -> int:
        """The address of device memory, which lives as long as the workspace at most. Where there
        is none, what is borrowed no more goes back before."""
        self.give_back(self.dropped)
        try:
            address = self.device.alloc(size)
        except DeviceMemoryFull:
            if not any(self.spare.values()):
                raise
            self.give_back(*self.spare.values())
            address = self.device.alloc(size)
        self.held.add(address)
        return address

    def give_back(self, *stocks: list[int]) -> None:
        """Give back memory to which nobody refers."""
        if any(stocks):
            self.synchronize()
        for stock in stocks:
            while stock:
                self.free(stock.pop())

    def free(self, address: int) -> None:
        """Give memory back, unless the end of the workspace has done so."""
        if address in self.held:
            self.held.remove(address)
            self.device.free(address)

    def fit(self, *, scratch: int = 0, inputs: int = 0, upload: int = 0, download: int = 0) -> None:
        """Let what engines share be so large at least. DeviceMemoryFull where it cannot be: it is
        then as large as it was, so that those who are there can go on."""
        wanted = (
            *((self.scratch, scratch), (self.inputs, inputs)),
            *((self.upload, upload), (self.download, download)),
        )
        small = [(memory, size) for memory, size in wanted if size > memory.size]
        self.version += bool(small)
        for memory, size in small:
            memory.fit(size)

    def put(self, address: int, array: NDArray[Any]) -> None:
        """Copy an array to the device."""
        if not array.nbytes:
            return
        with self.working():
            self.fit(upload=array.nbytes)
            self.upload.view(0, array.shape, array.dtype)[...] = array
            self.device.upload(address, self.upload.address, array.nbytes, self.stream)
            self.synchronize()

    def down(self, address: int, size: int) -> NDArray[np.uint8]:
        """A copy of bytes of the device."""
        if not size:
            return np.empty(0, np.uint8)
        with self.working():
            self.fit(download=size)
            self.device.download(self.download.address, address, size, self.stream)
            self.synchronize()
            return self.download.view(0, (size,), np.dtype(np.uint8)).copy()

    def table(self, addresses: Sequence[int]) -> int:
        """A table of addresses on the device, for kernels; its own address."""
        table = np.array(addresses, np.uint64)
        at = self.alloc(table.nbytes)
        self.put(at, table)
        return at

    # ---- work

    def run(self, launch: Launch) -> None:
        """Put one of the project's kernels on the stream."""
        if not self.kernels:
            image = self.device.compile(kernels.source())
            self.kernels = {
                name: self.device.load_kernel(image, name) for name in kernels.STRUCTURES
            }
        kernel = self.kernels[launch.kernel]
        self.device.launch(kernel, launch.grid, launch.threads, launch.argument, self.stream)

    def launch(self, kernel: str, grid: tuple[int, int, int], threads: int, **values: Any) -> None:
        """Put a kernel with the values of its structure on the stream."""
        self.run(Launch.of(kernel, grid, threads, **values))

    def synchronize(self) -> None:
        """Wait for all that was asked."""
        self.device.synchronize(self.stream)

    def settle(self) -> None:
        """The same before something is given back; a lost device is not waited for."""
        self.device.settle(self.stream)


class Buffer:
    """Device memory that grows where more is asked for; `address` moves then."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.address, self.size = workspace, 0, 0

    def fit(self, size: int) -> None:
        """Have room for so many bytes, zeros. DeviceMemoryFull where there is none: what was there
        is then there again."""
        if size <= self.size:
            return
        before = self.size
        self.free()
        try:
            self.take(size)
        except DeviceMemoryFull:
            if before:
                self.take(before)
            raise

    def take(self, size: int) -> None:
        """Have so many bytes."""
        self.address, self.size = self.workspace.alloc(size), size
        self.workspace.device.zero(self.address, size, self.workspace.stream)

    def free(self) -> None:
        """Give the memory back."""
        address, self.address, self.size = self.address, 0, 0
        if address:
            self.workspace.settle()
            self.workspace.free(address)


class Pinned:
    """Page-locked host memory that grows where more is asked for."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.block: HostBlock | None = None

    @property
    def address(self) -> int:
        """Where it stands on the host."""
        assert self.block is not None
        return self.block.address

    @property
    def size(self) -> int:
        """Its bytes."""
        return 0 if self.block is None else len(self.block.array)

    def fit(self, size: int) -> None:
        """Have room for so many bytes."""
        if size > self.size:
            block = self.workspace.device.pinned(size)
            self.free()
            self.block = block

    def view(self, offset: int, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """An array of some of its bytes."""
        assert self.block is not None
        size = int(np.prod(shape)) * dtype.itemsize
        return self.block.array[offset : offset + size].view(dtype).reshape(shape)

    def free(self) -> None:
        """Give the memory back."""
        block, self.block = self.block, None
        if block is not None:
            self.workspace.settle()
            self.workspace.device.free_pinned(block)


class Memory:
    """Device memory that ends with its last reference. Which thread drops that, and when, nobody
    knows: the workspace gives the memory back as it is asked for more."""

    def __init__(self, workspace: Workspace, size: int) -> None:
        self.size = size
        self.address = workspace.alloc(size)
        weakref.finalize(self, workspace.dropped.append, self.address)


class Borrowed:
    """Memory for what lives some steps: it comes from a stock, and goes back with its last
    reference. What is asked of it on the stream is in order, so nobody waits for it."""

    def __init__(self, workspace: Workspace, size: int) -> None:
        self.size = max(ALIGNMENT, 1 << (size - 1).bit_length()) if size else ALIGNMENT
        spare = workspace.spare.setdefault(self.size, [])
        self.address = spare.pop() if spare else workspace.alloc(self.size)
        weakref.finalize(self, spare.append, self.address)
