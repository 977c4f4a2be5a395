"""What an engine of TensorRT is bound to: the library's version, the compute capability, the
system.

Knows devices and versions. Needs no engine library to say that an engine is not for this machine.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from edgespec.backends.tensorrt.devices import device_here, title_of
from edgespec.backends.tensorrt.versions import Library
from edgespec.errors import EngineMismatch, MissingDependency

KEYS = ("library", "version", "compute_capability", "system", "machine")
AGAIN = "Run edgespec build again on this machine."


def fingerprint_of(library: Library, version: str, sm: int) -> dict[str, Any]:
    """What an engine is bound to, as JSON; `sm` is the compute capability (times ten)."""
    return {
        "library": library.module,
        "version": version,
        "compute_capability": sm,
        "system": sys.platform,
        "machine": platform.machine(),
    }


def check(stored: Mapping[str, Any], library: Library, name: str) -> None:
    """EngineMismatch if the engine `name` was built for another machine, MissingDependency without
    the library."""
    if set(stored) != set(KEYS):
        raise EngineMismatch(f"{name} does not say for which machine it was built", AGAIN)
    for key, here in (("system", sys.platform), ("machine", platform.machine())):
        if stored[key] != here:
            raise EngineMismatch(f"{name} was built for {stored[key]}, this is {here}", AGAIN)
    device, sm = device_here(), stored["compute_capability"]
    if device is None:
        message = f"{name} was built for {title_of(sm)}, and no CUDA device is here"
        raise EngineMismatch(message, "Copy the engines to such a device.")
    if device.sm != sm:
        message = f"{name} was built for {title_of(sm)}, this is SM{device.sm} ({device.name})"
        raise EngineMismatch(message, AGAIN)
    version = installed_version(library)
    if version is None:
        raise MissingDependency(f"{library.title} is not installed", library.remedy)
    if version != stored["version"]:
        message = f"{name} was built with {library.title} {stored['version']}, here is {version}"
        raise EngineMismatch(message, AGAIN)


def installed_version(library: Library) -> str | None:
    """The version of the installed bindings, without importing them; None where there are none."""
    for suffix in ("-cu13", "-cu12", ""):
        base = library.module.replace("_", "-")
        for package in (f"{base}{suffix}-bindings", f"{base}{suffix}_bindings", f"{base}{suffix}"):
            try:
                return metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
    return None
