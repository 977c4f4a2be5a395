"""A CUDA device by pycuda, in the primary context, which TensorRT uses too.

It has no graphs: pycuda has released no interface for them. Knows CUDA; knows no engine.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from edgespec.backends.cuda.device.base import Device, HostBlock
from edgespec.errors import InternalError

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, for which pycuda has no name


class PycudaDevice(Device):
    """The first CUDA device. What pycuda's objects own ends with them: they are kept here under
    their addresses and handles."""

    can_capture = False

    def __init__(self) -> None:
        import pycuda.driver as cuda

        self.cuda = cuda
        self.context: Any = None
        self.memory: dict[int, Any] = {}
        self.blocks: dict[int, Any] = {}
        self.streams: dict[int, Any] = {}
        self.events: dict[int, Any] = {}
        self.modules: list[Any] = []
        self.threads = threading.local()
        self.call(cuda.init)
        device = self.call(cuda.Device, 0)
        self.context = self.call(primary_context)
        self.activate()
        major, minor = self.call(device.compute_capability)
        self.name, self.sm = self.call(device.name), 10 * major + minor

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What a function of pycuda gives; DeviceProblem where it fails."""
        try:
            return function(*arguments, **options)
        except self.cuda.Error as error:
            full = isinstance(error, self.cuda.MemoryError)
            raise self.failed(f"CUDA: {error}", full=full) from error

    def works(self) -> bool:
        """Whether the context can be waited for."""
        try:
            if self.context is not None:
                self.cuda.Context.synchronize()
        except self.cuda.Error:
            return False
        return True

    def activate(self) -> None:
        """Push the primary context, where this thread has another one or none."""
        current = self.cuda.Context.get_current()
        if current is None or current != self.context:
            self.give_back(self.hold)

    def hold(self) -> None:
        """Push the context until this thread ends or `leave_thread`."""
        holds = self.threads.__dict__.setdefault("holds", [])
        holds.append(Hold(self.cuda, self.context, self.call))

    def leave_thread(self) -> None:
        """Drop this thread's hold of the context; of a lost one all that is left, where pycuda
        would complain of each object."""
        if self.lost is not None and self.context is not None:
            abandon(self.cuda, self.context)
            self.context = None
        self.threads.__dict__.clear()

    # ---- memory

    def alloc(self, size: int) -> int:
        """Memory of mem_alloc."""
        memory = self.call(self.cuda.mem_alloc, size)
        self.memory[int(memory)] = memory
        return int(memory)

    def free(self, address: int) -> None:
        """Free what `alloc` gave."""
        self.give_back(lambda: self.memory.pop(address).free())

    def pinned(self, size: int) -> HostBlock:
        """Page-locked memory."""
        array = self.call(self.cuda.pagelocked_empty, size, np.uint8)
        self.blocks[array.ctypes.data] = array
        return HostBlock(array.ctypes.data, array)

    def free_pinned(self, block: HostBlock) -> None:
        """Free what `pinned` gave."""
        self.give_back(lambda: self.blocks.pop(block.address).base.free())

    def of_host(self, address: int, size: int) -> Any:
        """The bytes of page-locked memory from an address on: pycuda takes arrays."""
        for start, array in self.blocks.items():
            if start <= address and address + size <= start + len(array):
                return array[address - start : address - start + size]
        raise InternalError(f"{size} bytes at {address:#x} are not page-locked")

    def zero(self, address: int, size: int, stream: int) -> None:
        """memset_d8_async."""
        self.call(self.cuda.memset_d8_async, address, 0, size, self.streams[stream])

    def upload(self, target: int, source: int, size: int, stream: int) -> None:
        """memcpy_htod_async."""
        block = self.of_host(source, size)
        self.call(self.cuda.memcpy_htod_async, target, block, self.streams[stream])

    def download(self, target: int, source: int, size: int, stream: int) -> None:
        """memcpy_dtoh_async."""
        block = self.of_host(target, size)
        self.call(self.cuda.memcpy_dtoh_async, block, source, self.streams[stream])

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """memcpy_dtod_async."""
        self.call(self.cuda.memcpy_dtod_async, target, source, size, self.streams[stream])

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
        """A Memcpy2D."""
        work = self.cuda.Memcpy2D()
        work.set_src_device(source)
        work.set_dst_device(target)
        work.src_pitch, work.dst_pitch = source_pitch, target_pitch
        work.width_in_bytes, work.height = width, height
        self.call(work, self.streams[stream])

    # ---- streams and events

    def stream(self) -> int:
        """A stream that does not wait for the default one."""
        stream = self.call(self.cuda.Stream, NON_BLOCKING)
        self.streams[int(stream.handle)] = stream
        return int(stream.handle)

    def free_stream(self, stream: int) -> None:
        """Drop a stream, with which it ends."""
        self.give_back(self.streams.pop, stream)

    def synchronize(self, stream: int) -> None:
        """Stream.synchronize."""
        self.call(self.streams[stream].synchronize)

    def event(self) -> int:
        """An event; pycuda does not say its handle, so that it has a number of its own."""
        event = self.call(self.cuda.Event)
        self.events[id(event)] = event
        return id(event)

    def free_event(self, event: int) -> None:
        """Drop an event, with which it ends."""
        self.give_back(self.events.pop, event)

    def record(self, event: int, stream: int) -> None:
        """Event.record."""
        self.call(self.events[event].record, self.streams[stream])

    def wait(self, event: int) -> None:
        """Event.synchronize."""
        self.call(self.events[event].synchronize)

    def elapsed_ms(self, begin: int, end: int) -> float:
        """Event.time_since."""
        return float(self.call(self.events[end].time_since, self.events[begin]))

    # ---- kernels

    def load_kernel(self, image: bytes, name: str) -> object:
        """A function of a module."""
        module = self.call(self.cuda.module_from_buffer, image)
        self.modules.append(module)
        return self.call(module.get_function, name)

    def launch(
        self,
        kernel: object,
        grid: tuple[int, int, int],
        threads: int,
        argument: bytes,
        stream: int,
    ) -> None:
        """Run a kernel; pycuda passes a value of numpy's void type as the structure itself."""
        structure = np.frombuffer(argument, np.dtype((np.void, len(argument))))[0]
        function: Any = kernel
        where = {"grid": grid, "block": (threads, 1, 1), "stream": self.streams[stream]}
        self.call(function, structure, **where)

    def close(self) -> None:
        """Drop what is left, and this thread's hold of the context."""
        if self.lost is not None:
            self.leave_thread()
        for owned in (self.modules, self.streams, self.events):
            owned.clear()
        self.leave_thread()


class Hold:
    """A thread's hold of a context. It must end with the thread: pycuda aborts the process where it
    finds one that has not."""

    def __init__(self, cuda: Any, context: Any, call: Callable[..., Any]) -> None:
        self.cuda, self.context = cuda, context
        call(context.push)

    def __del__(self) -> None:
        if self.cuda.Context.get_current() is not None:
            try:
                self.cuda.Context.pop()
            except self.cuda.Error:
                abandon(self.cuda, self.context)


def abandon(cuda: Any, context: Any) -> None:
    """End a context that the driver has lost. What pycuda holds of an invalid one, its threads'
    holds too, goes without a call."""
    atexit.unregister(context.detach)
    context.detach()
    cuda.Context.get_current()


@cache
def primary_context() -> Any:
    """The context, one object for the process: pycuda compares objects where it uses one from
    another thread. Released with the process: objects of TensorRT may live longer than a
    device, and pycuda itself would try to destroy it."""
    import pycuda.driver as cuda

    context = cuda.Device(0).retain_primary_context()
    atexit.register(context.detach)
    return context
