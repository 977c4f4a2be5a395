"""Versions of the parsers that `edgespec check --tensorrt` knows: TensorRT's and TensorRT-RTX's.

Knows names and the order of releases. Imports neither.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.backends.tensorrt.target import Dialect
from edgespec.errors import OptionError

# Releases by the name that the command line takes -> the TensorRT whose rules they have
# (TensorRT-RTX counts by itself; its API says which TensorRT it was cut from)
LINES: dict[str, tuple[int, int]] = {
    "10.13": (10, 13),
    "10.14": (10, 14),
    "10.15": (10, 15),
    "10.16": (10, 16),
    "11.0": (11, 0),
    "11.1": (11, 1),
    "11.2": (11, 2),
    "11.3": (11, 3),
    "11.4": (11, 4),
    "rtx-1.4": (10, 16),
    "rtx-1.5": (11, 0),
    "rtx-1.6": (11, 2),
    "rtx-1.7": (11, 4),
}
FIRST_NATIVE = (10, 15)


@dataclass(frozen=True, slots=True)
class ParserVersion:
    """A release by its name: `10.13`, `11.4`, `rtx-1.7`."""

    name: str

    def __post_init__(self) -> None:
        """OptionError for a release that is not in LINES."""
        if self.name not in LINES:
            what = f"no rules are known for TensorRT {self.name!r}"
            raise OptionError(what, f"Give one of: {', '.join(LINES)}.")

    @property
    def line(self) -> tuple[int, int]:
        """Major and minor number of the TensorRT whose rules it has."""
        return LINES[self.name]

    @property
    def title(self) -> str:
        """The name in sentences."""
        rtx = self.name.startswith("rtx-")
        return f"TensorRT-RTX {self.name.removeprefix('rtx-')}" if rtx else f"TensorRT {self.name}"

    @property
    def dialect(self) -> Dialect:
        """The dialect that a canonical graph is lowered to for it."""
        return Dialect.NATIVE if self.line >= FIRST_NATIVE else Dialect.PORTABLE
