"""The Python bindings of TensorRT or TensorRT-RTX, imported where an engine is built or run.

Knows how they are found. Knows no network.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from edgespec.backends.tensorrt.versions import Capabilities, Library, capabilities_of
from edgespec.errors import MissingDependency

Trt = Any  # the module: NVIDIA's bindings have no types that hold for all versions


@dataclass(frozen=True, slots=True)
class TrtBindings:
    """Imported bindings. `version` is theirs, all of it: "10.13.3.9"."""

    library: Library
    trt: Trt
    version: str
    capabilities: Capabilities


def load(library: Library) -> TrtBindings:
    """The bindings of the library. MissingDependency where they or the library are not installed,
    EnvironmentProblem where their version is not supported."""
    try:
        trt = import_module(library.module)
    except ImportError as error:
        message = f"{library.title} cannot be imported: {error}"
        raise MissingDependency(message, library.remedy) from error
    version = str(trt.__version__)
    return TrtBindings(library, trt, version, capabilities_of(library, version))
