"""The timing cache: what the builder measured of its kernels, kept for the next build.

It holds for one version of the library, one device and one driver: these name its file. Read and
written whole; one that the library refuses is begun anew.
"""

from __future__ import annotations

import hashlib
import logging
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgespec.artifacts import atomic
from edgespec.backends.tensorrt.devices import DeviceModel
from edgespec.backends.tensorrt.versions import Library

logger = logging.getLogger(__name__)
DIRECTORY = "tensorrt"


def cache_path(library: Library, version: str, device: DeviceModel) -> Path | None:
    """The file of the user's cache for this version, device and driver; None where there is no
    home."""
    plain = re.sub(r"[^\w.-]+", "_", device.name)
    digest = hashlib.sha256(f"{device.name}/{device.memory_bytes}".encode()).hexdigest()[:8]
    name = f"{library.module}-{version}-{plain}-{digest}-sm{device.sm}-cuda{device.driver}.timing"
    try:
        return atomic.user_cache() / DIRECTORY / name
    except OSError:
        return None


def attach(config: Any, path: Path) -> bool:
    """Let a build use what the file holds. Whether something was there that the library took."""
    stored = b""
    with suppress(OSError):
        stored = path.read_bytes()
    if stored and set_cache(config, stored):
        return True
    if stored:
        logger.warning("%s: the timing cache does not fit, and is begun anew", path)
    set_cache(config, b"")
    return False


def set_cache(config: Any, stored: bytes) -> bool:
    """Give a build's config the cache of these bytes; whether it took them."""
    made = config.create_timing_cache(stored)
    # Never ignore_mismatch: times of another device choose kernels that are slow here
    return made is not None and bool(config.set_timing_cache(made, False))


def store(config: Any, path: Path) -> None:
    """Write what a build has measured, whole or not at all. OutputError where that is not
    possible."""
    cache = config.get_timing_cache()
    stored = None if cache is None else cache.serialize()
    if stored is None:
        return
    data = bytes(memoryview(stored))
    with atomic.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.replace_file(path, data)
