"""What a build's own process is told, and what it reports: one JSON object in, lines of JSON out.

Knows the two sides' words. Knows no library and no process.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from edgespec.backends.tensorrt.profiles import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildJob:
    """An engine to build. Paths are absolute; `engine` must not be there yet.

    `compute_capability` (times ten) is that of another device than the one that is here. None in
    `workspace_bytes`, `optimization_level`: the library's own; in `timing_cache`: none is kept.
    `decompose_attention` allows attention without a fused kernel.
    """

    backend: str
    model: str
    engine: str
    profiles: tuple[Profile, ...]
    compute_capability: int | None = None
    workspace_bytes: int | None = None
    optimization_level: int | None = None
    timing_cache: str | None = None
    decompose_attention: bool = False

    def to_json(self) -> str:
        """The job as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BuildJob:
        """The job of such a line."""
        raw = json.loads(text)
        profiles = tuple(Profile.of(**row) for row in raw.pop("profiles"))
        return cls(profiles=profiles, **raw)


@dataclass(frozen=True, slots=True)
class BuildReport:
    """A built engine: its bytes, layers of its network, seconds of both parts, and the most memory
    that the process had."""

    engine_bytes: int
    layers: int
    parse_s: float
    build_s: float
    peak_bytes: int
