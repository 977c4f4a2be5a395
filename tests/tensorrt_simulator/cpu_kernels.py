"""The project's CUDA kernels on the CPU: their own source, as the stand-in of a driver has it
(`tests/cuda_stand_in`)."""

from __future__ import annotations

import ctypes
from functools import cache

from tests.cuda_stand_in.built import host_kernels
from tests.tensorrt_simulator.device import HostDevice

Three = ctypes.c_uint * 3


@cache
def compiled() -> ctypes.CDLL:
    """The library of all kernels."""
    return ctypes.CDLL(str(host_kernels()))


class CpuKernelDevice(HostDevice):
    """A device in host memory with the kernels' own source. Their threads run in another order with
    each launch."""

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
        run, seed = getattr(compiled(), f"run_{name}"), len(self.launched)

        def work() -> None:
            assert run(argument, Three(*grid), Three(threads, 1, 1), seed) == 0

        self.put(stream, work)


def made_device(kernels_of: str) -> HostDevice:
    """A device that runs the simulator's kernels ("simulated"), or the project's own ("source")."""
    if kernels_of == "simulated":
        return HostDevice()
    compiled()
    return CpuKernelDevice()
