"""A resolved export: every checkpoint opened once, and whose components are to be written.

Knows values. How they are found stands in `resolve`.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.origin import Origin
from edgespec.config import DraftConfig, ModelConfig
from edgespec.export.options import ExportOptions
from edgespec.manifest import ExportSource


@dataclass(frozen=True, slots=True)
class OpenBase:
    """A base: its checkpoint, what it was detected as, its identity and that of its original."""

    checkpoint: Checkpoint
    config: ModelConfig
    identity: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """A draft: its checkpoint, what it was detected as, and its identity."""

    checkpoint: Checkpoint
    config: DraftConfig
    identity: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What is exported. `method` is None for a plain decoder.

    A base is exported where `writes_base`; `draft` is then the one that declares what the base
    must emit. Otherwise `draft` is exported, for `base` if that is known.
    """

    options: ExportOptions
    method: str | None
    writes_base: bool
    base: OpenBase | None
    draft: OpenDraft | None
    source: ExportSource

    def target(self) -> OpenBase:
        """The base, where the request must have one."""
        assert self.base is not None
        return self.base

    def drafted(self) -> OpenDraft:
        """The draft, where the request must have one."""
        assert self.draft is not None
        return self.draft
