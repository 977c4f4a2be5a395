"""A resolved export: every checkpoint opened once, and whose components are to be written.

Knows values. How they are found stands in `resolve`.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.artifacts.manifest import ExportSource
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.origin import Origin
from edgespec.config import DraftConfig, ModelConfig
from edgespec.export.options import ExportOptions
from edgespec.progress import Progress


@dataclass(frozen=True, slots=True)
class ExportBase:
    """A base: its checkpoint, what it was detected as, and the identity of its original."""

    checkpoint: Checkpoint
    config: ModelConfig
    origin: Origin


@dataclass(frozen=True, slots=True)
class ExportDraft:
    """A draft: its checkpoint, and what it was detected as."""

    checkpoint: Checkpoint
    config: DraftConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What is exported. `method` is None for a plain decoder.

    A base is exported where `writes_base`; `draft` is then the one that declares what the base
    must emit. Otherwise `draft` is exported, for `base` if that is known. `texts` is the sha256 of
    the settings and the tokenizer of what is exported.
    """

    options: ExportOptions
    method: str | None
    writes_base: bool
    base: ExportBase | None
    draft: ExportDraft | None
    texts: str

    def hash_while_reading(self) -> None:
        """What is read from now on of what is exported is hashed for its identity."""
        exported = self.target() if self.writes_base else self.drafted()
        exported.checkpoint.hash_while_reading()

    def source(self, progress: Progress) -> ExportSource:
        """The checkpoints by their identities. Reads what was not read yet of their weights."""
        exported = self.target() if self.writes_base else self.drafted()
        identity, other, origin = exported.checkpoint.identity(progress), None, None
        if self.base is not None:
            origin = self.base.origin.identity
            other = None if self.writes_base else self.base.checkpoint.identity(progress)
        return ExportSource(
            name=exported.checkpoint.place.name,
            identity=identity,
            texts=self.texts,
            base_identity=other,
            quantized_from=origin if self.writes_base else None,
            base_quantized_from=None if self.writes_base else origin,
        )

    def target(self) -> ExportBase:
        """The base, where the request must have one."""
        assert self.base is not None
        return self.base

    def drafted(self) -> ExportDraft:
        """The draft, where the request must have one."""
        assert self.draft is not None
        return self.draft
