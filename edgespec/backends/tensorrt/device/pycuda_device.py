"""A CUDA device by pycuda, in the primary context, which TensorRT uses too.

It has no graphs: pycuda has released no interface for them. Knows CUDA; knows no engine.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgespec.backends.tensorrt.device.base import (
    Device,
    DeviceMemoryFull,
    DeviceProblem,
    HostBlock,
)
from edgespec.errors import InternalError


class PycudaDevice(Device):
    """The first CUDA device."""

    can_capture = False

    def __init__(self) -> None:
        import pycuda.driver as cuda

        self.cuda = cuda
        # What pycuda's objects own lives as long as they do
        self.memory: dict[int, Any] = {}
        self.blocks: dict[int, Any] = {}
        self.streams: dict[int, Any] = {}
        self.events: dict[int, Any] = {}
        self.modules: list[Any] = []
        try:
            cuda.init()
            device = cuda.Device(0)
            self.context: Any = device.retain_primary_context()
        except cuda.Error as error:
            raise DeviceProblem(f"CUDA: {error}") from error
        self.activate()
        major, minor = device.compute_capability()
        self.name, self.sm = device.name(), 10 * major + minor

    def activate(self) -> None:
        """Push the primary context, where this thread has another one or none."""
        current = self.cuda.Context.get_current()
        if current is None or current != self.context:
            self.context.push()

    def alloc(self, size: int) -> int:
        """Memory of mem_alloc."""
        try:
            memory = self.cuda.mem_alloc(size)
        except self.cuda.MemoryError as error:
            raise DeviceMemoryFull(f"CUDA: {error}") from error
        self.memory[int(memory)] = memory
        return int(memory)

    def free(self, address: int) -> None:
        """Free what `alloc` gave."""
        self.memory.pop(address).free()

    def pinned(self, size: int) -> HostBlock:
        """Page-locked memory."""
        array = self.cuda.pagelocked_empty(size, np.uint8)
        self.blocks[array.ctypes.data] = array
        return HostBlock(array.ctypes.data, array)

    def free_pinned(self, block: HostBlock) -> None:
        """Free what `pinned` gave."""
        self.blocks.pop(block.address).base.free()

    def of_host(self, address: int, size: int) -> Any:
        """The bytes of page-locked memory from an address on: pycuda takes arrays."""
        for start, array in self.blocks.items():
            if start <= address and address + size <= start + len(array):
                return array[address - start : address - start + size]
        raise InternalError(f"{size} bytes at {address:#x} are not page-locked")

    def zero(self, address: int, size: int, stream: int) -> None:
        """memset."""
        self.checked(self.cuda.memset_d8_async, address, 0, size, self.streams[stream])

    def upload(self, target: int, source: int, size: int, stream: int) -> None:
        """memcpy from the host."""
        block = self.of_host(source, size)
        self.checked(self.cuda.memcpy_htod_async, target, block, self.streams[stream])

    def download(self, target: int, source: int, size: int, stream: int) -> None:
        """memcpy to the host."""
        block = self.of_host(target, size)
        self.checked(self.cuda.memcpy_dtoh_async, block, source, self.streams[stream])

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """memcpy on the device."""
        self.checked(self.cuda.memcpy_dtod_async, target, source, size, self.streams[stream])

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
        """A Memcpy2D on the device."""
        work = self.cuda.Memcpy2D()
        work.set_src_device(source)
        work.set_dst_device(target)
        work.src_pitch, work.dst_pitch = source_pitch, target_pitch
        work.width_in_bytes, work.height = width, height
        self.checked(work, self.streams[stream])

    def checked(self, call: Any, *arguments: Any) -> None:
        """Make a call; DeviceProblem where it fails."""
        try:
            call(*arguments)
        except self.cuda.Error as error:
            raise DeviceProblem(f"CUDA: {error}") from error

    def stream(self) -> int:
        """A stream that does not wait for the default one."""
        stream = self.cuda.Stream(self.cuda.stream_flags.NON_BLOCKING)
        self.streams[int(stream.handle)] = stream
        return int(stream.handle)

    def free_stream(self, stream: int) -> None:
        """Drop a stream, with which it ends."""
        del self.streams[stream]

    def synchronize(self, stream: int) -> None:
        """Wait for a stream."""
        self.checked(self.streams[stream].synchronize)

    def event(self) -> int:
        """An event; pycuda does not say its handle, so that it has a number of its own."""
        event = self.cuda.Event()
        self.events[id(event)] = event
        return id(event)

    def free_event(self, event: int) -> None:
        """Drop an event, with which it ends."""
        del self.events[event]

    def record(self, event: int, stream: int) -> None:
        """Event.record."""
        self.checked(self.events[event].record, self.streams[stream])

    def wait(self, event: int) -> None:
        """Event.synchronize."""
        self.checked(self.events[event].synchronize)

    def elapsed_ms(self, begin: int, end: int) -> float:
        """Event.time_since."""
        try:
            return float(self.events[end].time_since(self.events[begin]))
        except self.cuda.Error as error:
            raise DeviceProblem(f"CUDA: {error}") from error

    def begin_capture(self, stream: int) -> None:
        """InternalError: `can_capture` is false."""
        raise InternalError("pycuda has no graphs")

    def end_capture(self, stream: int) -> int | None:
        """InternalError: `can_capture` is false."""
        raise InternalError("pycuda has no graphs")

    def launch_graph(self, graph: int, stream: int) -> None:
        """InternalError: `can_capture` is false."""
        raise InternalError("pycuda has no graphs")

    def free_graph(self, graph: int) -> None:
        """InternalError: `can_capture` is false."""
        raise InternalError("pycuda has no graphs")

    def load_kernel(self, image: bytes, name: str) -> object:
        """A function of a module."""
        try:
            module = self.cuda.module_from_buffer(image)
            self.modules.append(module)
            return module.get_function(name)
        except self.cuda.Error as error:
            raise DeviceProblem(f"CUDA: {error}") from error

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
        try:
            function(structure, **where)
        except self.cuda.Error as error:
            raise DeviceProblem(f"CUDA: {error}") from error

    def close(self) -> None:
        """Drop what is left, and this thread's hold of the context."""
        if self.context is None:
            return
        self.modules.clear()
        self.streams.clear()
        self.events.clear()
        current = self.cuda.Context.get_current()
        if current is not None and current == self.context:
            self.cuda.Context.pop()
        self.context = None
