"""What each version of TensorRT and of TensorRT-RTX can do: the table that build and runner read.

Knows libraries, versions and compilers with known faults. Imports no library; the rules of their
parsers stand in `rules`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from edgespec.backends.tensorrt.target import Dialect
from edgespec.errors import EnvironmentProblem, OptionError

logger = logging.getLogger(__name__)

Version = tuple[int, int]  # major and minor


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """One of NVIDIA's two engine libraries. `backend` is its name after --backend, `module` that of
    its Python bindings. `remedy` says where it comes from."""

    backend: str
    module: str
    title: str
    tool: str  # builds an engine on a command line
    remedy: str


LICENCE = "NVIDIA's proprietary licence (docs.nvidia.com/deeplearning/tensorrt-rtx) applies"

TENSORRT = Library(
    backend="tensorrt",
    module="tensorrt",
    title="NVIDIA TensorRT",
    tool="trtexec",
    remedy=(
        "On a Jetson install JetPack's python3-libnvinfer and let the virtual environment see it"
        " (python3 -m venv --system-site-packages); elsewhere pip install"
        " tensorrt-cu13==11.4.0.106, or the version that your driver takes."
    ),
)
RTX = Library(
    backend="tensorrt-rtx",
    module="tensorrt_rtx",
    title="NVIDIA TensorRT-RTX",
    tool="tensorrt_rtx",
    remedy=(
        "pip install --no-deps tensorrt-rtx-cu13-libs==1.7.1.116"
        " tensorrt-rtx-cu13-bindings==1.7.1.116 tensorrt-rtx-cu13==1.7.1.116."
        f" {LICENCE}."
    ),
)
LIBRARIES = {library.backend: library for library in (TENSORRT, RTX)}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a minor version of a library can do. `compiles_for` are the compute capabilities (times
    ten) that it compiles for without such a device; none: only for the device that it runs on."""

    library: Library
    version: Version
    compiles_for: tuple[int, ...] = ()

    @property
    def dialect(self) -> Dialect:
        """The dialect that graphs are lowered to: the cache's update came with 10.15."""
        return Dialect.NATIVE if self.line >= (10, 15) else Dialect.PORTABLE

    @property
    def has_attention(self) -> bool:
        """Whether the parser has an importer of its own for Attention."""
        return self.line >= (10, 14)

    @property
    def typed_by_flag(self) -> bool:
        """Whether networks are strongly typed only where a flag of the network asks for it; later
        versions always are, and accept the flag."""
        return self.line < (11, 0)

    @property
    def timing_cache(self) -> bool:
        """Whether what was timed is kept for the next build. TensorRT-RTX tunes on the user's
        machine."""
        return self.library is TENSORRT

    @property
    def quantized_without_device(self) -> bool:
        """Whether quantized weights are compiled for an absent device."""
        return self.version != (1, 4)

    @property
    def name(self) -> str:
        """The library and its version in words: "NVIDIA TensorRT 10.13"."""
        return f"{self.library.title} {self.version[0]}.{self.version[1]}"

    @property
    def release(self) -> str:
        """Its name on the command line: 10.13, rtx-1.7."""
        major, minor = self.version
        return f"rtx-{major}.{minor}" if self.library is RTX else f"{major}.{minor}"

    @property
    def line(self) -> Version:
        """Major and minor number of the TensorRT whose parser's rules it has."""
        return RTX_LINES[self.version] if self.library is RTX else self.version

    @property
    def own_graphs(self) -> bool:
        """Whether the library makes CUDA graphs of its calls by itself. TensorRT-RTX compiles the
        kernels of a shape while others run in their place, and alone knows when they are there."""
        return self.library is RTX


# TensorRT-RTX counts by itself: the TensorRT that each release was cut from, by its API
RTX_LINES: dict[Version, Version] = {
    (1, 4): (10, 16),
    (1, 5): (11, 0),
    (1, 6): (11, 2),
    (1, 7): (11, 4),
}
RTX_TARGETS = (75, 80, 86, 89, 120)
ROWS = (
    *(Capabilities(TENSORRT, (10, minor)) for minor in range(13, 17)),
    *(Capabilities(TENSORRT, (11, minor)) for minor in range(5)),
    Capabilities(RTX, (1, 4), RTX_TARGETS),
    *(Capabilities(RTX, (1, minor), (*RTX_TARGETS, 121)) for minor in (5, 6, 7)),
)
RELEASES: dict[str, Capabilities] = {row.release: row for row in ROWS}
WHOLE = re.compile(r"((?:rtx-)?\d+\.\d+)(?:\.\d+)+")  # a release, and the numbers behind it


def release_of(text: str) -> Capabilities:
    """The row of a release as `edgespec check --tensorrt` names it, or as the library says its
    version: 10.13, 10.13.3.9, rtx-1.7.1.116. OptionError for one that is not in the table."""
    whole = WHOLE.fullmatch(text)
    row = RELEASES.get(whole[1] if whole else text)
    if row is None:
        message = f"no rules are known for TensorRT {text!r}"
        raise OptionError(message, f"Give one of: {', '.join(RELEASES)}.")
    return row


def capabilities_of(library: Library, text: str) -> Capabilities:
    """The row of a version such as "10.13.3.9" or "10.13"; a newer minor version of a known major
    one is taken for the newest known. EnvironmentProblem where it is too old, or unknown."""
    version = parsed(text)
    rows = {row.version: row for row in ROWS if row.library is library}
    if version in rows:
        return rows[version]
    known = f"This version of edgespec builds with {library.title} {known_versions(library)}."
    if version is None:
        raise EnvironmentProblem(f"{text!r} is no version of {library.title}", known)
    below = [row for row in rows if row[0] == version[0] and row < version]
    if not below:
        raise EnvironmentProblem(f"{library.title} {text} is not supported", known)
    newest = rows[max(below)]
    logger.warning(
        "%s %s is newer than the versions known here; built as for %s",
        library.title,
        text,
        newest.name,
    )
    return newest


def parsed(text: str) -> Version | None:
    """Major and minor of a version's text; None where it has none."""
    match = re.match(r"(\d+)\.(\d+)(?:[.\w-]*)$", text)
    return (int(match[1]), int(match[2])) if match else None


def known_versions(library: Library) -> str:
    """The versions of a library in the table, as a sentence has them: "10.13 to 10.16, 11.0 to
    11.4"."""
    minors: dict[int, list[int]] = {}
    for row in ROWS:
        if row.library is library:
            minors.setdefault(row.version[0], []).append(row.version[1])
    return ", ".join(f"{major}.{min(m)} to {major}.{max(m)}" for major, m in minors.items())


# ---- compilers with known faults


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFault:
    """A fault of one build of a library's compiler, and the environment variables that avoid it."""

    library: Library
    version: str  # all of it
    effect: str
    environment: Mapping[str, str] = field(default_factory=dict)


KNOWN_FAULTS = (
    KnownFault(
        library=TENSORRT,
        version="10.13.3.9",  # of JetPack 7.0 and 7.1
        effect="its compiler's fusion fc_h_fusion gives wrong results for one sequence",
        environment={"__LUNOWUD": "-peep:fc_h_fusion=off"},
    ),
)


def faults_of(library: Library, version: str) -> tuple[KnownFault, ...]:
    """The known faults of a version; where it is named by its first numbers alone ("10.13"), of
    all that begin so."""
    named = version.split("+")[0].split(".post")[0]
    rows = (row for row in KNOWN_FAULTS if row.library is library)
    return tuple(row for row in rows if f"{row.version}.".startswith(f"{named}."))


def build_environment(faults: tuple[KnownFault, ...], given: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process that builds: those that are `given`, with what avoids the faults
    behind what the user has set."""
    out = dict(given)
    for fault in faults:
        for name, value in fault.environment.items():
            if value not in out.get(name, ""):
                out[name] = f"{out[name]} {value}" if out.get(name) else value
    return out
