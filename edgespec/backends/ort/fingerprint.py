"""What an engine of this backend is bound to: the ONNX Runtime version and the CPU's vector
features."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.artifacts.provenance import installed_version
from edgespec.errors import EngineMismatch, EnvironmentProblem, MissingDependency

# What kernels are chosen by; other flags change with kernel versions and mean nothing here.
VECTOR_FLAGS = re.compile(r"(sse4|avx|fma|f16c|amx|asimd|sve|sme|i8mm|bf16|dotprod|fphp)")


PACKAGES = ("onnxruntime-gpu", "onnxruntime")


def ort_version() -> str:
    """The version of the installed ONNX Runtime, without importing it. MissingDependency where
    there is none, EnvironmentProblem where both packages are: they write the same files."""
    found = {name: version for name in PACKAGES if (version := installed_version(name))}
    if not found:
        raise MissingDependency(
            "ONNX Runtime is not installed", "pip install onnxruntime-gpu (or onnxruntime)"
        )
    if len(found) > 1:
        both, one = (" and ".join(map(" ".join, found.items())), " (or ".join(found))
        raise EnvironmentProblem(
            f"{both} are both installed, and each has overwritten files of the other",
            f"Keep one: pip uninstall -y {' '.join(found)}, then pip install {one}).",
        )
    return next(iter(found.values()))


def fingerprint() -> dict[str, Any]:
    """The version of ONNX Runtime, the machine and its CPU features, as JSON. MissingDependency
    without ONNX Runtime."""
    return {
        "onnxruntime": ort_version(),
        "machine": platform.machine(),
        "cpu_features": cpu_features(),
    }


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Vector instruction sets of the first CPU; empty where the system does not list them."""
    if not cpuinfo.is_file():
        return []
    match = re.search(
        r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo.read_text(errors="replace"), re.MULTILINE
    )
    return sorted(
        flag for flag in (match.group(1).split() if match else []) if VECTOR_FLAGS.search(flag)
    )


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The name of the first CPU; None where the system does not say it."""
    text = cpuinfo.read_text(errors="replace") if cpuinfo.is_file() else ""
    match = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return match.group(1) if match else platform.processor() or None


def check(stored: Mapping[str, Any], name: str) -> None:
    """EngineMismatch if the engine was built by another ONNX Runtime or for another CPU."""
    features, remedy = stored.get("cpu_features"), "Run edgespec build again on this machine."
    if not isinstance(features, list) or not all(isinstance(flag, str) for flag in features):
        raise EngineMismatch(f"{name} does not say for which machine it was built", remedy)
    here = fingerprint()
    if stored.get("onnxruntime") != here["onnxruntime"]:
        message = (
            f"{name} was built with ONNX Runtime {stored.get('onnxruntime')}, here is"
            f" {here['onnxruntime']}"
        )
        raise EngineMismatch(message, remedy)
    if stored.get("machine") != here["machine"]:
        raise EngineMismatch(
            f"{name} was built on {stored.get('machine')}, this is {here['machine']}", remedy
        )
    before, now = set(features), set(here["cpu_features"])
    if before != now:
        changed = sorted(before ^ now)
        raise EngineMismatch(
            f"{name} was built for another CPU (features that differ: {', '.join(changed)})", remedy
        )
