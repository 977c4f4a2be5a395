"""What the engines of a pair share on a device: its stream, the memory that they work in, the
compiled kernels.

Base and draft run one after the other on one stream, so that one block of memory serves both. Knows
a device; knows no engine.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from edgespec.backends.base import PairDevice
from edgespec.backends.tensorrt import kernels
from edgespec.backends.tensorrt.device.base import ALIGNMENT, Device, HostBlock


def aligned(size: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Workspace(PairDevice):
    """A device in use. It ends with its last user: `join` and `leave` count them. One that a pair
    shares has a user more until it is closed.

    `scratch` is the memory in which engines keep activations; `version` counts its moves, after
    which contexts must be told and graphs are void.
    """

    def __init__(self, device: Device, *, shared: bool = False) -> None:
        self.device, self.shared = device, shared
        self.lock = threading.RLock()
        device.activate()
        self.stream = device.stream()
        self.scratch, self.scratch_size, self.version = 0, 0, 0
        self.kernels: dict[str, object] = {}
        self.users = int(shared)
        self.held: set[int] = set()
        self.spare: dict[int, list[int]] = {}  # by size, memory that was borrowed before

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
        with self.working():
            self.device.settle(self.stream)
            for address in list(self.held):
                self.free(address)
            self.device.free_stream(self.stream)
            self.kernels.clear()
            self.device.close()

    def alloc(self, size: int) -> int:
        """The address of device memory, which lives as long as the workspace at most."""
        address = self.device.alloc(size)
        self.held.add(address)
        return address

    def free(self, address: int) -> None:
        """Give memory back, unless the end of the workspace has done so."""
        if address in self.held:
            self.held.remove(address)
            self.device.free(address)

    def reserve(self, size: int) -> None:
        """Let the scratch memory be so large at least."""
        if size <= self.scratch_size:
            return
        self.device.synchronize(self.stream)
        if self.scratch:
            self.free(self.scratch)
            self.scratch, self.scratch_size = 0, 0
        self.scratch = self.alloc(size)
        self.scratch_size, self.version = size, self.version + 1

    def launch(self, kernel: str, grid: tuple[int, int, int], threads: int, **values: Any) -> None:
        """Run one of the project's kernels with the values of its structure."""
        if not self.kernels:
            image = self.device.compile(kernels.source())
            self.kernels = {
                name: self.device.load_kernel(image, name) for name in kernels.STRUCTURES
            }
        argument = kernels.structure(kernel, **values)
        self.device.launch(self.kernels[kernel], grid, threads, argument, self.stream)

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

    def fit(self, size: int) -> bool:
        """Have room for so many bytes, zeros where they are new; whether the memory moved."""
        if size <= self.size:
            return False
        self.free()
        self.address, self.size = self.workspace.alloc(size), size
        self.workspace.device.zero(self.address, size, self.workspace.stream)
        return True

    def free(self) -> None:
        """Give the memory back."""
        if self.size:
            self.workspace.settle()
            self.workspace.free(self.address)
            self.address = self.size = 0


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

    def fit(self, size: int) -> bool:
        """Have room for so many bytes; whether the memory moved."""
        if self.block is not None and size <= len(self.block.array):
            return False
        self.free()
        self.block = self.workspace.device.pinned(size)
        return True

    def view(self, offset: int, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """An array of some of its bytes."""
        assert self.block is not None
        size = int(np.prod(shape)) * dtype.itemsize
        return self.block.array[offset : offset + size].view(dtype).reshape(shape)

    def free(self) -> None:
        """Give the memory back."""
        if self.block is not None:
            self.workspace.settle()
            self.workspace.device.free_pinned(self.block)
            self.block = None


class Borrowed:
    """Memory for what lives some steps: it comes from a stock, and goes back with its last
    reference. What is asked of it on the stream is in order, so nobody waits for it."""

    def __init__(self, workspace: Workspace, size: int) -> None:
        self.size = max(ALIGNMENT, 1 << (size - 1).bit_length()) if size else ALIGNMENT
        spare = workspace.spare.setdefault(self.size, [])
        self.address = spare.pop() if spare else workspace.alloc(self.size)
        weakref.finalize(self, spare.append, self.address)


def put_table(workspace: Workspace, addresses: Sequence[int]) -> int:
    """A table of addresses on the device, for kernels; its own address."""
    table = np.array(addresses, np.uint64)
    pinned = Pinned(workspace)
    pinned.fit(table.nbytes)
    pinned.view(0, table.shape, table.dtype)[...] = table
    at = workspace.alloc(table.nbytes)
    workspace.device.upload(at, pinned.address, table.nbytes, workspace.stream)
    workspace.synchronize()
    pinned.free()
    return at
