"""Opens the CUDA device of this machine with the Python package of CUDA that is installed.

Knows the packages' names. Imports one when a device is opened, and not before.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from edgespec.backends.cuda.device.base import Device, DeviceProblem
from edgespec.errors import MissingDependency

logger = logging.getLogger(__name__)

REMEDY = (
    "pip install 'edgespec[cuda]', or 'edgespec[pycuda]', which is built on the device. For another"
    " CUDA than 13: pip install cuda-bindings of its version."
)
NO_DRIVER = (
    "Install NVIDIA's driver (on a Jetson it is part of JetPack; in a container: start it with the"
    " GPU)."
)


@dataclass(frozen=True, slots=True)
class Package:
    """A Python package of CUDA: its name, the module that we need, and who opens a device."""

    name: str
    module: str
    open: Callable[[], Device]


def open_cuda_python() -> Device:
    """By cuda-bindings."""
    from edgespec.backends.cuda.device.cuda_python import CudaPythonDevice

    return CudaPythonDevice()


def open_pycuda() -> Device:
    """By pycuda."""
    from edgespec.backends.cuda.device.pycuda_device import PycudaDevice

    return PycudaDevice()


PACKAGES = (
    Package("cuda-bindings", "cuda.bindings.driver", open_cuda_python),
    Package("pycuda", "pycuda.driver", open_pycuda),
)


def open_device() -> Device:
    """The first CUDA device, by the first package of PACKAGES that can be imported.
    MissingDependency without one, DeviceProblem where there is no driver or no device."""
    packages = [package for package in PACKAGES if installed(package.module)]
    if not packages:
        raise MissingDependency("no Python package of CUDA is installed", REMEDY)
    check_driver()
    problems = []
    for package in packages:
        try:
            return package.open()
        except ImportError as error:
            problems.append(f"{package.name} cannot be imported: {error}")
            logger.info("%s", problems[-1])
    remedy = "Install it again, for the CUDA of this machine: " + REMEDY
    raise MissingDependency("; ".join(problems), remedy)


def check_driver() -> None:
    """DeviceProblem where CUDA's driver is not there: each package says so in its own way."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceProblem(f"CUDA's driver is not there: {error}", NO_DRIVER) from error


def installed(module: str) -> bool:
    """Whether a module of a package is there."""
    try:
        return find_spec(module) is not None
    except ImportError:
        return False
