"""A stand-in of CUDA's driver, for tests: a `libcuda.so.1` in host memory, compiled from
`driver.cpp` when a test wants it, behind which the real Python packages of CUDA run. The project's
kernels run on it as well, from their own source, compiled for the host behind `kernels.h`.

It is not a GPU. It shows that the packages take the calls that we make, in an order and with
arguments that the driver's documents allow, that our structures are those of the kernels, and that
the kernels compute what they should; not that a device does.
"""
