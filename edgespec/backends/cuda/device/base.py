"""What a runner asks of a CUDA device: memory, copies, a stream, events, graphs, kernels.

Addresses, streams, events and graphs are plain integers, as TensorRT takes them. Knows no CUDA
package: each implementation is a file of its own, and `opening` chooses.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import EnvironmentProblem, InternalError

logger = logging.getLogger(__name__)
NO_GRAPHS = "this package of CUDA has no graphs: `can_capture` is false"
ALIGNMENT = 256  # of a tensor's address, in bytes


class DeviceProblem(EnvironmentProblem):
    """A call of CUDA failed."""

    usual_remedy = "Check the device with nvidia-smi, and that no other program has filled it."


class DeviceMemoryFull(DeviceProblem):
    """The device has not so much free memory."""


class DeviceLost(DeviceProblem):
    """A call of CUDA failed so that the device does nothing more for this process."""

    usual_remedy = (
        "Run the command again: nothing else revives the device. If it fails again, report it with"
        " the config files of the engines."
    )


@dataclass(frozen=True, slots=True)
class HostBlock:
    """Page-locked host memory, which a device copies from and to while the host goes on."""

    address: int
    array: NDArray[np.uint8]


class Device(ABC):
    """A CUDA device. Calls with a stream return at once; `synchronize` waits for what was asked
    before. DeviceProblem where CUDA fails, DeviceMemoryFull where memory does not do, DeviceLost
    where nothing works any more, in each call from then on. What gives something back never raises
    DeviceLost: whoever closes must not hide why.

    `can_capture` says whether what is put on a stream can be kept as a graph. All calls come from
    threads that have called `activate`.
    """

    name: str
    sm: int  # compute capability, times ten
    can_capture: bool
    lost: DeviceLost | None = None  # the first error after which nothing works

    @abstractmethod
    def activate(self) -> None:
        """Make the device that of the calling thread, where it is not."""

    # ---- errors

    @abstractmethod
    def works(self) -> bool:
        """Whether the device does what it is asked, once a call has failed; waits for it."""

    def failed(self, message: str, *, full: bool = False) -> DeviceProblem:
        """The error to raise where a call has failed; `full`: memory does not do. Once the device
        is lost it is the first one."""
        if full:
            return DeviceMemoryFull(message)
        if self.lost is None and not self.works():
            self.lost = DeviceLost(message)
        return DeviceProblem(message) if self.lost is None else DeviceLost(self.lost.what)

    def give_back(self, free: Callable[..., Any], *arguments: Any) -> None:
        """Free something, unless the device is lost: then the end of the process does."""
        if self.lost is None:
            try:
                free(*arguments)
            except DeviceLost as error:
                logger.warning("%s", error.what)

    def settle(self, stream: int) -> None:
        """Wait for a stream before something is given back that it may use."""
        self.give_back(self.synchronize, stream)

    # ---- memory

    @abstractmethod
    def alloc(self, size: int) -> int:
        """The address of `size` bytes, a multiple of ALIGNMENT."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Give memory back; nothing on a stream may use it any more."""

    @abstractmethod
    def pinned(self, size: int) -> HostBlock:
        """Page-locked host memory."""

    @abstractmethod
    def free_pinned(self, block: HostBlock) -> None:
        """Give page-locked memory back."""

    @abstractmethod
    def zero(self, address: int, size: int, stream: int) -> None:
        """Make bytes zero."""

    @abstractmethod
    def upload(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy from the host to the device."""

    @abstractmethod
    def download(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy from the device to the host."""

    @abstractmethod
    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy on the device; the two places do not overlap."""

    @abstractmethod
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
        """Copy `height` pieces of `width` bytes on the device; the pitch is the distance from one
        piece to the next."""

    # ---- streams, events and graphs

    @abstractmethod
    def stream(self) -> int:
        """A new stream beside the default one."""

    @abstractmethod
    def free_stream(self, stream: int) -> None:
        """End a stream."""

    @abstractmethod
    def synchronize(self, stream: int) -> None:
        """Wait until all that was put on a stream is done; what failed there is raised here."""

    @abstractmethod
    def event(self) -> int:
        """A new event: a mark on a stream, with the time at which the stream came to it."""

    @abstractmethod
    def free_event(self, event: int) -> None:
        """End an event."""

    @abstractmethod
    def record(self, event: int, stream: int) -> None:
        """Put an event behind what is on a stream; not while the stream is captured."""

    @abstractmethod
    def wait(self, event: int) -> None:
        """Wait until the stream has come to an event; what failed before it is raised here."""

    @abstractmethod
    def elapsed_ms(self, begin: int, end: int) -> float:
        """Milliseconds from one event to another; DeviceProblem where a stream has not come to
        both."""

    def begin_capture(self, stream: int) -> None:
        """From now on keep what this thread puts on the stream, instead of doing it."""
        raise InternalError(NO_GRAPHS)

    def end_capture(self, stream: int) -> int | None:
        """The graph of what was kept; None where something in it cannot be captured."""
        raise InternalError(NO_GRAPHS)

    def launch_graph(self, graph: int, stream: int) -> None:
        """Do all that a graph keeps."""
        raise InternalError(NO_GRAPHS)

    def free_graph(self, graph: int) -> None:
        """Drop a graph."""
        raise InternalError(NO_GRAPHS)

    # ---- kernels

    @abstractmethod
    def load_kernel(self, image: bytes, name: str) -> object:
        """A function of a compiled module."""

    @abstractmethod
    def launch(
        self,
        kernel: object,
        grid: tuple[int, int, int],
        threads: int,
        argument: bytes,
        stream: int,
    ) -> None:
        """Run a kernel that takes one structure by value; `argument` are its bytes."""

    def compile(self, source: str) -> bytes:
        """A module for this device, of CUDA C. MissingDependency without CUDA's compiler."""
        from edgespec.backends.cuda.device.nvrtc import compiled

        return compiled(source, self.sm)

    @abstractmethod
    def close(self) -> None:
        """Give the device back; closing twice is harmless."""
