"""A CUDA device by NVIDIA's own package, cuda-bindings.

The runtime API uses the primary context, as TensorRT does. Knows CUDA; knows no engine.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from edgespec.backends.tensorrt.device.base import (
    Device,
    DeviceMemoryFull,
    DeviceProblem,
    HostBlock,
)


class CudaPythonDevice(Device):
    """The first CUDA device."""

    can_capture = True

    def __init__(self) -> None:
        from cuda.bindings import driver, runtime

        self.cuda, self.driver = runtime, driver
        self.kinds = runtime.cudaMemcpyKind
        self.modules: list[Any] = []
        self.graphs: dict[int, Any] = {}
        self.activate()
        (properties,) = self.done(runtime.cudaGetDeviceProperties(0))
        self.name = properties.name.rstrip(b"\0").decode(errors="replace")
        self.sm = 10 * properties.major + properties.minor

    def done(self, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of an answer; DeviceProblem where it is an error."""
        error, *values = answer
        if error == self.cuda.cudaError_t.cudaSuccess:
            return tuple(values)
        self.cuda.cudaGetLastError()  # or the next launch would report it again
        _, name = self.cuda.cudaGetErrorName(error)
        _, text = self.cuda.cudaGetErrorString(error)
        kind = (
            DeviceMemoryFull
            if error == self.cuda.cudaError_t.cudaErrorMemoryAllocation
            else DeviceProblem
        )
        raise kind(f"CUDA: {name.decode()}: {text.decode()}")

    def driven(self, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same of an answer of the driver's API."""
        error, *values = answer
        if error == self.driver.CUresult.CUDA_SUCCESS:
            return tuple(values)
        raise DeviceProblem(f"CUDA: {error.name}")

    def activate(self) -> None:
        """Use the first device's primary context in this thread."""
        self.done(self.cuda.cudaSetDevice(0))

    def alloc(self, size: int) -> int:
        """Memory of cudaMalloc, which aligns to 256 bytes."""
        (address,) = self.done(self.cuda.cudaMalloc(size))
        return int(address)

    def free(self, address: int) -> None:
        """cudaFree."""
        self.done(self.cuda.cudaFree(address))

    def pinned(self, size: int) -> HostBlock:
        """Memory of cudaHostAlloc."""
        (address,) = self.done(self.cuda.cudaHostAlloc(size, self.cuda.cudaHostAllocDefault))
        memory = (ctypes.c_uint8 * size).from_address(int(address))
        return HostBlock(int(address), np.ctypeslib.as_array(memory))

    def free_pinned(self, block: HostBlock) -> None:
        """cudaFreeHost."""
        self.done(self.cuda.cudaFreeHost(block.address))

    def zero(self, address: int, size: int, stream: int) -> None:
        """cudaMemsetAsync."""
        self.done(self.cuda.cudaMemsetAsync(address, 0, size, stream))

    def upload(self, target: int, source: int, size: int, stream: int) -> None:
        """cudaMemcpyAsync from the host."""
        kind = self.kinds.cudaMemcpyHostToDevice
        self.done(self.cuda.cudaMemcpyAsync(target, source, size, kind, stream))

    def download(self, target: int, source: int, size: int, stream: int) -> None:
        """cudaMemcpyAsync to the host."""
        kind = self.kinds.cudaMemcpyDeviceToHost
        self.done(self.cuda.cudaMemcpyAsync(target, source, size, kind, stream))

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """cudaMemcpyAsync on the device."""
        kind = self.kinds.cudaMemcpyDeviceToDevice
        self.done(self.cuda.cudaMemcpyAsync(target, source, size, kind, stream))

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
        """cudaMemcpy2DAsync on the device."""
        kind = self.kinds.cudaMemcpyDeviceToDevice
        self.done(
            self.cuda.cudaMemcpy2DAsync(
                target, target_pitch, source, source_pitch, width, height, kind, stream
            )
        )

    def stream(self) -> int:
        """A stream that does not wait for the default one."""
        flags = self.cuda.cudaStreamNonBlocking
        (stream,) = self.done(self.cuda.cudaStreamCreateWithFlags(flags))
        return int(stream)

    def free_stream(self, stream: int) -> None:
        """cudaStreamDestroy."""
        self.done(self.cuda.cudaStreamDestroy(stream))

    def synchronize(self, stream: int) -> None:
        """cudaStreamSynchronize."""
        self.done(self.cuda.cudaStreamSynchronize(stream))

    def event(self) -> int:
        """cudaEventCreate."""
        (event,) = self.done(self.cuda.cudaEventCreate())
        return int(event)

    def free_event(self, event: int) -> None:
        """cudaEventDestroy."""
        self.done(self.cuda.cudaEventDestroy(event))

    def record(self, event: int, stream: int) -> None:
        """cudaEventRecord."""
        self.done(self.cuda.cudaEventRecord(event, stream))

    def wait(self, event: int) -> None:
        """cudaEventSynchronize."""
        self.done(self.cuda.cudaEventSynchronize(event))

    def elapsed_ms(self, begin: int, end: int) -> float:
        """cudaEventElapsedTime."""
        (elapsed_ms,) = self.done(self.cuda.cudaEventElapsedTime(begin, end))
        return float(elapsed_ms)

    def begin_capture(self, stream: int) -> None:
        """Capture of this thread alone: others may allocate meanwhile."""
        mode = self.cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.done(self.cuda.cudaStreamBeginCapture(stream, mode))

    def end_capture(self, stream: int) -> int | None:
        """The instantiated graph; None where the capture was broken."""
        success = self.cuda.cudaError_t.cudaSuccess
        error, graph = self.cuda.cudaStreamEndCapture(stream)
        if error != success or not int(graph):
            self.cuda.cudaGetLastError()
            return None
        error, made = self.cuda.cudaGraphInstantiate(graph, 0)
        self.cuda.cudaGraphDestroy(graph)
        if error != success:
            self.cuda.cudaGetLastError()
            return None
        self.graphs[int(made)] = made
        return int(made)

    def launch_graph(self, graph: int, stream: int) -> None:
        """cudaGraphLaunch."""
        self.done(self.cuda.cudaGraphLaunch(self.graphs[graph], stream))

    def free_graph(self, graph: int) -> None:
        """cudaGraphExecDestroy."""
        self.done(self.cuda.cudaGraphExecDestroy(self.graphs.pop(graph)))

    def load_kernel(self, image: bytes, name: str) -> object:
        """A function of a module in the primary context."""
        (module,) = self.driven(self.driver.cuModuleLoadData(image))
        self.modules.append(module)
        (function,) = self.driven(self.driver.cuModuleGetFunction(module, name.encode()))
        return function

    def launch(
        self,
        kernel: object,
        grid: tuple[int, int, int],
        threads: int,
        argument: bytes,
        stream: int,
    ) -> None:
        """cuLaunchKernel; the structure is copied by the call."""
        held = ctypes.create_string_buffer(argument, len(argument))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(held))
        at = ctypes.addressof(pointers)
        self.driven(self.driver.cuLaunchKernel(kernel, *grid, threads, 1, 1, 0, stream, at, 0))

    def close(self) -> None:
        """Unload the modules; the primary context belongs to the process."""
        while self.modules:
            self.driver.cuModuleUnload(self.modules.pop())
