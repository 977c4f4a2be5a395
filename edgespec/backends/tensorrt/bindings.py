"""The Python bindings of TensorRT or TensorRT-RTX, imported where an engine is built or run.

Knows how they are found, and that bindings and library must be of one version. Knows no network.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from edgespec.backends.tensorrt.versions import Capabilities, Library, capabilities_of
from edgespec.errors import EnvironmentProblem, MissingDependency

Trt = Any  # the module: NVIDIA's bindings have no types that hold for all versions


@dataclass(frozen=True, slots=True)
class Bindings:
    """Imported bindings. `version` is theirs, all of it: "10.13.3.9"."""

    library: Library
    trt: Trt
    version: str
    capabilities: Capabilities


def load(library: Library) -> Bindings:
    """The bindings of the library. MissingDependency where they or the library are not installed,
    EnvironmentProblem where their versions differ or are not supported."""
    try:
        trt = import_module(library.module)
    except ImportError as error:
        message = f"{library.title} cannot be imported: {error}"
        raise MissingDependency(message, library.remedy) from error
    version = str(trt.__version__)
    check_skew(library, version, loaded_version(library))
    return Bindings(library, trt, version, capabilities_of(library, version))


def check_skew(library: Library, bindings: str, loaded: str | None) -> None:
    """EnvironmentProblem where the bindings are of another version than the library that they have
    loaded: that works by chance. None: it is not known which one they have loaded."""
    if loaded is not None and numbers(bindings)[:3] != numbers(loaded)[:3]:
        message = f"the bindings of {library.title} are {bindings}, the library is {loaded}"
        raise EnvironmentProblem(message, f"Install both of one version. {library.remedy}")


def numbers(version: str) -> list[int]:
    """The numbers of a version up to the first part that is none."""
    out = []
    for part in version.split("."):
        if not part.isdigit():
            break
        out.append(int(part))
    return out


def loaded_version(library: Library) -> str | None:
    """The version that the loaded shared library says it has; None where it cannot be asked."""
    path = loaded_path(library.shared_object)
    if path is None:
        return None
    try:
        shared = ctypes.CDLL(str(path))
        parts = [
            getattr(shared, f"getInferLib{name}Version")() for name in ("Major", "Minor", "Patch")
        ]
    except (OSError, AttributeError):
        return None
    return ".".join(map(str, parts))


def loaded_path(name: str, maps: Path = Path("/proc/self/maps")) -> Path | None:
    """The file of the library whose name begins so, of those that this process has loaded."""
    if not sys.platform.startswith("linux"):
        return None
    for line in maps.read_text(errors="replace").splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(name):
            return Path(path)
    return None
