"""A simulated device that runs the project's own kernels: their CUDA C, compiled for the CPU as the
stand-in of a driver has it (`tests/cuda_stand_in`)."""

from __future__ import annotations

import ctypes
from functools import cache

from tests.cuda_stand_in.built import KERNELS, stand_in
from tests.tensorrt_simulator.device import HostDevice


@cache
def compiled() -> ctypes.CDLL:
    """The library of all kernels; skips the test where nothing compiles it."""
    return ctypes.CDLL(str(stand_in() / KERNELS))


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
        self.launched.append(str(kernel))
        run, seed = getattr(compiled(), f"run_{kernel}"), len(self.launched)
        sizes = ctypes.c_uint * 3

        def work() -> None:
            assert run(argument, sizes(*grid), sizes(threads, 1, 1), seed) == 0

        self.put(stream, work)


def made_device(kernels_of: str) -> HostDevice:
    """A device that runs the simulator's kernels ("simulated"), or the project's own ("source")."""
    if kernels_of == "simulated":
        return HostDevice()
    compiled()
    return CpuKernelDevice()
