"""Opens the CUDA device of this machine with the Python package of CUDA that is installed.

Knows the packages' names. Imports one when a device is opened, and not before.
"""

from __future__ import annotations

from importlib.util import find_spec

from edgespec.backends.tensorrt.device.base import Device
from edgespec.errors import MissingDependency

REMEDY = (
    "pip install 'edgespec[cuda]', or 'edgespec[pycuda]', which is built on the device. For another"
    " CUDA than 13: pip install cuda-bindings of its version."
)


def open_device() -> Device:
    """The first CUDA device, by cuda-bindings or else by pycuda. MissingDependency without both,
    DeviceProblem where there is no device."""
    if installed("cuda.bindings.runtime"):
        from edgespec.backends.tensorrt.device.cuda_python import CudaPythonDevice

        return CudaPythonDevice()
    if installed("pycuda.driver"):
        from edgespec.backends.tensorrt.device.pycuda_device import PycudaDevice

        return PycudaDevice()
    raise MissingDependency("no Python package of CUDA is installed", REMEDY)


def installed(module: str) -> bool:
    """Whether a module of a package is there."""
    try:
        return find_spec(module) is not None
    except ImportError:
        return False
