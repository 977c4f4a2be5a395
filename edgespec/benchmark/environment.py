"""Where a run was measured: the device, its power mode and load, versions, and the engines' hashes.

Knows the files in which Linux and Jetson tell it. What cannot be read is null, never guessed.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgespec.artifacts.provenance import installed_version
from edgespec.runtime.engine import Engine

ROOT = Path("/")
PACKAGES = ("edgespec", "numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx")
NVPMODEL = "nvpmodel"  # NVIDIA's tool for the power modes of a Jetson
NVPMODEL_S = 5.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "EDGESPEC_KERNEL_LEVEL")


def environment(root: Path = ROOT) -> dict[str, Any]:
    """What does not change while a run goes on."""
    return {
        "device": device_name(root),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": usable_cores(),
        "thread_variables": {name: os.environ.get(name) for name in THREAD_VARIABLES},
        "memory_bytes": memory_bytes(root),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in PACKAGES},
        "power_mode": power_mode(root),
        "governors": governors(root),
        "max_frequency_khz": largest(root, "scaling_max_freq"),
    }


def state(root: Path = ROOT) -> dict[str, Any]:
    """What changes meanwhile: taken before and after."""
    return {
        "load_average": load_average(),
        "temperatures_c": dict(temperatures(root)) or None,
        "frequency_khz": largest(root, "scaling_cur_freq"),
    }


# ---- the device


def device_name(root: Path) -> str | None:
    """The board's name where it has one (a Jetson), else the processor's."""
    board = text(root / "proc/device-tree/model")
    if board:
        return board.rstrip("\0")
    for key in ("model name", "Model", "Hardware"):
        for line in (text(root / "proc/cpuinfo") or "").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return platform.processor() or None


def usable_cores() -> int | None:
    """Cores that this process may run on, of which engines use all."""
    with suppress(AttributeError, OSError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def memory_bytes(root: Path) -> int | None:
    """The memory of the machine."""
    for line in (text(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return int(value.split()[0]) * 1024
    return None


def power_mode(root: Path) -> str | None:
    """The mode of a Jetson (nvpmodel), else the profile of the platform."""
    if root == ROOT and (tool := shutil.which(NVPMODEL)) is not None:
        with suppress(OSError, subprocess.SubprocessError):
            told = subprocess.run(
                [tool, "-q"], capture_output=True, text=True, timeout=NVPMODEL_S, check=True
            )
            return " ".join(told.stdout.split()) or None
    return text(root / "sys/firmware/acpi/platform_profile")


def governors(root: Path) -> list[str] | None:
    """The frequency governors of the cores, each once."""
    names = {text(path) for path in frequency_files(root, "scaling_governor")}
    return sorted(name for name in names if name) or None


def largest(root: Path, name: str) -> int | None:
    """The largest of a frequency over all cores."""
    texts = [text(path) for path in frequency_files(root, name)]
    return max((int(value) for value in texts if value and value.isdigit()), default=None)


def frequency_files(root: Path, name: str) -> list[Path]:
    """A file of cpufreq for each core."""
    return sorted((root / "sys/devices/system/cpu").glob(f"cpu[0-9]*/cpufreq/{name}"))


# ---- its state


def load_average() -> list[float] | None:
    """Of 1, 5 and 15 minutes."""
    with suppress(OSError, AttributeError):
        return [round(value, 2) for value in os.getloadavg()]
    return None


def temperatures(root: Path) -> Iterator[tuple[str, float]]:
    """Degrees Celsius by zone, as far as they can be read."""
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        value = text(zone / "temp")
        with suppress(ValueError, TypeError):
            yield text(zone / "type") or zone.name, int(value or "") / 1000


def text(path: Path) -> str | None:
    """What a file says; None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


# ---- the engines


def engines_of(engine: Engine, engine_dir: Path) -> dict[str, Any]:
    """What is measured: each engine with its hash, its weights, backend and limits."""
    from edgespec.backends.manifest import EngineManifest
    from edgespec.backends.registry import backend_of
    from edgespec.runtime.costs.cost_profile import hash_of

    manifest = EngineManifest.read(engine_dir)
    rows = {}
    for config in engine.configs.values():
        entry, role = manifest.engines[config.role], config.role
        rows[role.value] = {
            "sha256": hash_of(entry.files_dict()),
            "backend": entry.backend,
            "device": backend_of(engine_dir, role).device(),
            "weights": config.weights.scheme,
            "divergence": None if entry.divergence is None else entry.divergence.to_dict(),
            "backend_settings": dict(config.settings),
            "limits": config.limits.to_dict(role),
            "size_bytes": entry.size_bytes,
        }
    return {"directory": engine_dir.name, "method": engine.method, "engines": rows}


def served_engines(engine_dir: Path) -> dict[str, Any]:
    """What a server serves of a directory, which is not open here: the engines by their hashes.
    Raises BundleError."""
    from edgespec.backends.manifest import EngineManifest
    from edgespec.runtime.costs.cost_profile import hash_of

    return {
        role.value: {"sha256": hash_of(entry.files_dict()), "backend": entry.backend}
        for role, entry in EngineManifest.read(engine_dir).engines.items()
    }
