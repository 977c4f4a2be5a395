"""A CUDA device by NVIDIA's own package, cuda-bindings: the driver's API, which is one for all
releases of CUDA's runtime, in the primary context, which TensorRT uses too.

Knows CUDA; knows no engine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from edgespec.backends.cuda.device.base import Device, DeviceProblem, HostBlock

NAME_BYTES = 256
OLD_DRIVER = (
    "Update NVIDIA's driver, or pip install cuda-bindings of the version of CUDA that nvidia-smi"
    " names."
)


class CudaPythonDevice(Device):
    """The first CUDA device."""

    can_capture = True

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.cuda = driver
        self.context: Any = None
        self.modules: list[Any] = []
        self.call(driver.cuInit, 0)
        device = self.call(driver.cuDeviceGet, 0)
        # Never released: objects of TensorRT may live longer than this one
        self.context = self.call(driver.cuDevicePrimaryCtxRetain, device)
        self.activate()
        name = self.call(driver.cuDeviceGetName, NAME_BYTES, device)
        self.name = name.split(b"\0")[0].decode(errors="replace")
        part = driver.CUdevice_attribute
        major, minor = (
            self.call(driver.cuDeviceGetAttribute, attribute, device)
            for attribute in (
                part.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                part.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        self.sm = 10 * major + minor

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of the driver gives; DeviceProblem where it fails."""
        try:
            error, *values = function(*arguments)
        except RuntimeError as problem:  # the package is newer than the driver
            raise DeviceProblem(f"CUDA: {problem}", OLD_DRIVER) from problem
        if error == self.cuda.CUresult.CUDA_SUCCESS:
            return values[0] if values else None
        _, text = self.cuda.cuGetErrorString(error)
        said = text.decode() if text else error.name
        full = error == self.cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        raise self.failed(f"CUDA: {function.__name__} failed: {said}", full=full)

    def works(self) -> bool:
        """Whether the context can be waited for; while a stream is captured it cannot be said."""
        if self.context is None:
            return True
        result = self.cuda.CUresult
        (error,) = self.cuda.cuCtxSynchronize()
        return error in (result.CUDA_SUCCESS, result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)

    def activate(self) -> None:
        """Make the primary context this thread's."""
        self.give_back(self.call, self.cuda.cuCtxSetCurrent, self.context)

    # ---- memory

    def alloc(self, size: int) -> int:
        """cuMemAlloc, which aligns to 256 bytes."""
        return int(self.call(self.cuda.cuMemAlloc, size))

    def free(self, address: int) -> None:
        """cuMemFree."""
        self.give_back(self.call, self.cuda.cuMemFree, address)

    def pinned(self, size: int) -> HostBlock:
        """cuMemHostAlloc."""
        address = int(self.call(self.cuda.cuMemHostAlloc, size, 0))
        memory = (ctypes.c_uint8 * size).from_address(address)
        return HostBlock(address, np.ctypeslib.as_array(memory))

    def free_pinned(self, block: HostBlock) -> None:
        """cuMemFreeHost."""
        self.give_back(self.call, self.cuda.cuMemFreeHost, block.address)

    def zero(self, address: int, size: int, stream: int) -> None:
        """cuMemsetD8Async."""
        self.call(self.cuda.cuMemsetD8Async, address, 0, size, stream)

    def upload(self, target: int, source: int, size: int, stream: int) -> None:
        """cuMemcpyHtoDAsync."""
        self.call(self.cuda.cuMemcpyHtoDAsync, target, source, size, stream)

    def download(self, target: int, source: int, size: int, stream: int) -> None:
        """cuMemcpyDtoHAsync."""
        self.call(self.cuda.cuMemcpyDtoHAsync, target, source, size, stream)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """cuMemcpyDtoDAsync."""
        self.call(self.cuda.cuMemcpyDtoDAsync, target, source, size, stream)

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
        """cuMemcpy2DAsync."""
        work, kind = self.cuda.CUDA_MEMCPY2D(), self.cuda.CUmemorytype
        work.srcMemoryType = work.dstMemoryType = kind.CU_MEMORYTYPE_DEVICE
        work.srcDevice, work.srcPitch = source, source_pitch
        work.dstDevice, work.dstPitch = target, target_pitch
        work.WidthInBytes, work.Height = width, height
        self.call(self.cuda.cuMemcpy2DAsync, work, stream)

    # ---- streams, events and graphs

    def stream(self) -> int:
        """A stream that does not wait for the default one."""
        flags = self.cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self.call(self.cuda.cuStreamCreate, flags))

    def free_stream(self, stream: int) -> None:
        """cuStreamDestroy."""
        self.give_back(self.call, self.cuda.cuStreamDestroy, stream)

    def synchronize(self, stream: int) -> None:
        """cuStreamSynchronize."""
        self.call(self.cuda.cuStreamSynchronize, stream)

    def event(self) -> int:
        """cuEventCreate."""
        return int(self.call(self.cuda.cuEventCreate, 0))

    def free_event(self, event: int) -> None:
        """cuEventDestroy."""
        self.give_back(self.call, self.cuda.cuEventDestroy, event)

    def record(self, event: int, stream: int) -> None:
        """cuEventRecord."""
        self.call(self.cuda.cuEventRecord, event, stream)

    def wait(self, event: int) -> None:
        """cuEventSynchronize."""
        self.call(self.cuda.cuEventSynchronize, event)

    def elapsed_ms(self, begin: int, end: int) -> float:
        """cuEventElapsedTime."""
        return float(self.call(self.cuda.cuEventElapsedTime, begin, end))

    def begin_capture(self, stream: int) -> None:
        """Capture of this thread alone: others may allocate meanwhile."""
        mode = self.cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call(self.cuda.cuStreamBeginCapture, stream, mode)

    def end_capture(self, stream: int) -> int | None:
        """The instantiated graph; None where the capture was broken."""
        success = self.cuda.CUresult.CUDA_SUCCESS
        error, graph = self.cuda.cuStreamEndCapture(stream)
        if error != success:
            return None
        error, made = self.cuda.cuGraphInstantiate(graph, 0)
        self.call(self.cuda.cuGraphDestroy, graph)
        return int(made) if error == success else None

    def launch_graph(self, graph: int, stream: int) -> None:
        """cuGraphLaunch."""
        self.call(self.cuda.cuGraphLaunch, graph, stream)

    def free_graph(self, graph: int) -> None:
        """cuGraphExecDestroy."""
        self.give_back(self.call, self.cuda.cuGraphExecDestroy, graph)

    # ---- kernels

    def load_kernel(self, image: bytes, name: str) -> object:
        """A function of a module."""
        module = self.call(self.cuda.cuModuleLoadData, image)
        self.modules.append(module)
        return self.call(self.cuda.cuModuleGetFunction, module, name.encode())

    def launch(
        self,
        kernel: object,
        grid: tuple[int, int, int],
        threads: int,
        argument: bytes,
        stream: int,
    ) -> None:
        """cuLaunchKernel, which copies the structure."""
        held = ctypes.create_string_buffer(argument, len(argument))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(held))
        at = ctypes.addressof(pointers)
        self.call(self.cuda.cuLaunchKernel, kernel, *grid, threads, 1, 1, 0, stream, at, 0)

    def close(self) -> None:
        """Unload the modules."""
        while self.modules:
            self.give_back(self.call, self.cuda.cuModuleUnload, self.modules.pop())
