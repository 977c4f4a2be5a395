"""Releases as `edgespec check --tensorrt` names them, and whose parser rules each has.

Knows names. What a release can do stands in `versions`, what its parser takes in `rules`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgespec.backends.tensorrt.target import Dialect
from edgespec.backends.tensorrt.versions import ROWS, RTX, Capabilities, Version
from edgespec.errors import OptionError

# TensorRT-RTX counts by itself: the TensorRT that each release was cut from, by its API
RTX_LINES: dict[Version, Version] = {
    (1, 4): (10, 16),
    (1, 5): (11, 0),
    (1, 6): (11, 2),
    (1, 7): (11, 4),
}

WHOLE = re.compile(r"((?:rtx-)?\d+\.\d+)(?:\.\d+)+")  # a release, and the numbers behind it


def named(row: Capabilities) -> str:
    """A release's name on the command line: 10.13, rtx-1.7."""
    major, minor = row.version
    return f"rtx-{major}.{minor}" if row.library is RTX else f"{major}.{minor}"


RELEASES: dict[str, Capabilities] = {named(row): row for row in ROWS}


@dataclass(frozen=True, slots=True)
class ParserVersion:
    """A release by its name: `10.13`, `11.4`, `rtx-1.7`."""

    name: str

    def __post_init__(self) -> None:
        """OptionError for a release that is not in the table."""
        if self.name not in RELEASES:
            message = f"no rules are known for TensorRT {self.name!r}"
            raise OptionError(message, f"Give one of: {', '.join(RELEASES)}.")

    @classmethod
    def of(cls, text: str) -> ParserVersion:
        """The release of a version as the library says it: 10.13.3.9, rtx-1.7.1.116. OptionError
        for one that is not in the table."""
        whole = WHOLE.fullmatch(text)
        return cls(whole[1] if whole else text)

    @property
    def line(self) -> Version:
        """Major and minor number of the TensorRT whose rules it has."""
        row = RELEASES[self.name]
        return RTX_LINES[row.version] if row.library is RTX else row.version

    @property
    def title(self) -> str:
        """The name in sentences."""
        return RELEASES[self.name].name

    @property
    def dialect(self) -> Dialect:
        """The dialect that a canonical graph is lowered to for it."""
        return RELEASES[self.name].dialect
