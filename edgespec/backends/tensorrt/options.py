"""The options of `edgespec build` that engines of TensorRT have.

Knows flags. Imports no engine library: it is read for --help.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from edgespec.backends.base import BuildOption, BuildOptions, OptionValue
from edgespec.backends.tensorrt.target import Compute
from edgespec.backends.tensorrt.versions import (
    RTX,
    TENSORRT,
    Library,
    known_versions,
    parsed,
)
from edgespec.errors import OptionError

COMPUTES: dict[str, Compute] = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
SHORT = {compute: name for name, compute in COMPUTES.items()}
LEVELS = tuple(map(str, range(6)))  # of the builder
NO_CACHE = "none"
MIB = 1 << 20
assert set(COMPUTES.values()) == set(get_args(Compute))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRTOptions(BuildOptions):
    """What the user chose. None: by the checkpoint (`compute`), by the library (level, workspace),
    the device that is here (`sm`, a compute capability times ten), the installed library
    (`library_version`), the user's cache (`timing_cache`; `keep_times` False: none).

    With `emit_onnx` the lowered graph is written there, and no engine is built.
    """

    compute: Compute | None = None
    sm: int | None = None
    optimization_level: int | None = None
    workspace_bytes: int | None = None
    timing_cache: Path | None = None
    keep_times: bool = True
    library_version: str | None = None
    emit_onnx: Path | None = None


COMMON = (
    BuildOption(
        name="compute",
        choices=tuple(COMPUTES),
        help=(
            "The type of products, hidden states and KV cache; logits and what overflows stay"
            " float32. [default: the checkpoint's]"
        ),
    ),
    BuildOption(
        name="opt_level",
        choices=LEVELS,
        help="How long the builder looks for faster kernels. [default: the library's, 3]",
    ),
    BuildOption(
        name="workspace_mib",
        metavar="MIB",
        help="Memory that kernels may take for their work, in MiB. [default: what there is]",
    ),
    BuildOption(
        name="emit_onnx",
        metavar="DIR",
        help=(
            "Write the graph for this library to the new directory DIR with its weights, print the"
            " command that builds it on a device, and build nothing here."
        ),
    ),
)
TIMING = BuildOption(
    name="timing_cache",
    metavar="FILE",
    help=(
        "The file that keeps what the builder measured, so that the next build is faster;"
        f" {NO_CACHE}: none. [default: in the user's cache, one per version, device and driver]"
    ),
)


TARGET_HELP = {
    RTX.backend: (
        "The device that the engine is for, such as SM120; it need not be here."
        " [default: the device of this machine]"
    ),
    TENSORRT.backend: (
        "With `dry_run` or `emit_onnx`: the device that the graph is for, such as SM110"
        " (Jetson Thor). Engines are built on the device itself."
    ),
}


def options_of(library: Library) -> tuple[BuildOption, ...]:
    """The options of a library's engines."""
    target = TARGET_HELP[library.backend]
    version = (
        "With `dry_run` or `emit_onnx`: the version that the graph is for"
        f" ({known_versions(library)}), instead of the installed one."
    )
    return (
        *COMMON,
        BuildOption(name="compute_capability", metavar="SM", help=target),
        *((TIMING,) if library is TENSORRT else ()),
        BuildOption(name="library_version", metavar="VERSION", help=version),
    )


def parse_options(values: Mapping[str, OptionValue]) -> TensorRTOptions:
    """The options of a build. OptionError names a flag with a wrong value."""

    def text(name: str) -> str | None:
        value = values.get(name)
        return None if value is None else str(value)

    compute, level, cache = text("compute"), text("opt_level"), text("timing_cache")
    version, emit = text("library_version"), text("emit_onnx")
    if version is not None and parsed(version) is None:
        raise OptionError(f"`library_version` {version} is no version", "Write it as 10.13.")
    return TensorRTOptions(
        compute=None if compute is None else COMPUTES[compute],
        sm=sm_of(text("compute_capability")),
        optimization_level=None if level is None else int(level),
        workspace_bytes=workspace_of(text("workspace_mib")),
        timing_cache=None if cache in (None, NO_CACHE) else Path(str(cache)).expanduser(),
        keep_times=cache != NO_CACHE,
        library_version=version,
        emit_onnx=None if emit is None else Path(emit).expanduser(),
    )


def sm_of(text: str | None) -> int | None:
    """The compute capability times ten of "SM120", "sm_120", "120" or "12.0"; OptionError
    otherwise."""
    if text is None:
        return None
    match = re.fullmatch(r"(?:sm_?)?(\d{2,3})|(\d{1,2})\.(\d)", text.strip(), re.IGNORECASE)
    if match is None:
        message = f"`compute_capability` {text} is no compute capability"
        raise OptionError(message, "Write it as SM120, or as 12.0.")
    return int(match[1] or match[2] + match[3])


def workspace_of(text: str | None) -> int | None:
    """Bytes of so many MiB; OptionError where it is no positive whole number."""
    if text is None:
        return None
    if not text.isdigit() or not int(text):
        raise OptionError(
            f"`workspace_mib` {text} is no size", "Give a whole number of MiB from 1."
        )
    return int(text) * MIB
