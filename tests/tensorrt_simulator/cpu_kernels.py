"""The project's CUDA kernels on the CPU: their own source, compiled by g++ behind a few lines that
say what CUDA's words mean. The threads of a block are fibers that take turns, from one
__syncthreads to the next."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from edgespec.backends.tensorrt import kernels
from tests import shared
from tests.tensorrt_simulator.device import HostDevice

WORDS = r"""
#include <cmath>
#include <cstring>
#include <ucontext.h>
#include <vector>

struct Index { unsigned int x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;
struct alignas(16) uint4 { unsigned int x, y, z, w; };
#define __global__
#define __device__
#define __shared__ static

static unsigned int __float_as_uint(float value) {
  unsigned int bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
static float __uint_as_float(unsigned int bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
static unsigned short rounded_to_half(float value) {
  const _Float16 half = value;
  unsigned short bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
#define asm(...) out = rounded_to_half(value)  // the one instruction that is written as such

static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::vector<char> done;
static void __syncthreads() {
  const unsigned int own = threadIdx.x;
  swapcontext(&fibers[own], &scheduler);
  threadIdx.x = own;
}

static void (*body)();
static void thread() {
  const unsigned int own = threadIdx.x;
  body();
  done[own] = 1;
  swapcontext(&fibers[own], &scheduler);
}

static void run_blocks(unsigned int x, unsigned int y, unsigned int z, unsigned int threads) {
  constexpr size_t stack = 64 << 10;
  std::vector<char> memory(threads * stack);
  gridDim = {x, y, z};
  blockDim = {threads, 1, 1};
  for (blockIdx.z = 0; blockIdx.z < z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x) {
        fibers.assign(threads, {});
        done.assign(threads, 0);
        for (unsigned int i = 0; i < threads; ++i) {
          getcontext(&fibers[i]);
          fibers[i].uc_stack.ss_sp = memory.data() + i * stack;
          fibers[i].uc_stack.ss_size = stack;
          makecontext(&fibers[i], thread, 0);
        }
        for (bool left = true; left;) {
          left = false;
          for (unsigned int i = 0; i < threads; ++i)
            if (!done[i]) {
              threadIdx = {i, 0, 0};
              swapcontext(&scheduler, &fibers[i]);
              left |= !done[i];
            }
        }
      }
}
"""
ENTRY = """
static {type} given_{name};
extern "C" void run_{name}(unsigned x, unsigned y, unsigned z, unsigned threads, const void* of) {{
  std::memcpy(&given_{name}, of, sizeof(given_{name}));
  body = [] {{ {name}(given_{name}); }};
  run_blocks(x, y, z, threads);
}}
"""


@cache
def compiled() -> ctypes.CDLL:
    """The library of all kernels."""
    found = re.findall(r"__global__ void (\w+)\(const (\w+) \w+\)", kernels.source())
    assert {name for name, _ in found} == set(kernels.STRUCTURES)
    entries = [ENTRY.format(name=name, type=kind) for name, kind in found]
    text = "\n".join([WORDS, kernels.source(), *entries])

    def make(out: Path) -> None:
        (out / "kernels.cpp").write_text(text)
        line = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", "kernels.so", "kernels.cpp"]
        subprocess.run([*line, "-Wno-unknown-pragmas"], cwd=out, check=True)

    return ctypes.CDLL(str(shared.made_once(("kernels on the CPU", text), make) / "kernels.so"))


class CpuKernelDevice(HostDevice):
    """A device in host memory that runs the kernels' own source."""

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
        run = getattr(compiled(), f"run_{name}")
        self.put(stream, lambda: run(*grid, threads, argument))


def made_device(kernels_of: str) -> HostDevice:
    """A device that runs the simulator's kernels ("simulated"), or the project's own ("source");
    skips the test where nothing compiles those."""
    if kernels_of == "simulated":
        return HostDevice()
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed, which compiles the kernels for the CPU")
    return CpuKernelDevice()
