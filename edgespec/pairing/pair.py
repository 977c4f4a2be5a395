"""A base and a draft as the checks see them."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.checkpoint.files import Checkpoint
from edgespec.config import DraftConfig, ModelConfig
from edgespec.methods import BaseSide, DraftSide, Mismatch, mismatches


@dataclass(frozen=True, slots=True)
class Pair:
    """`draft` and `config` are None where the draft stands in the base's checkpoint.

    `aux_layers` are hidden_states indices that win over the draft's own.
    """

    method: str
    base: Checkpoint
    model: ModelConfig
    draft: Checkpoint | None
    config: DraftConfig | None
    aux_layers: tuple[int, ...] | None = None

    def drafted(self) -> tuple[Checkpoint, DraftConfig]:
        """The draft's checkpoint and configuration, where a method has one."""
        assert self.draft is not None
        assert self.config is not None
        return self.draft, self.config

    def mismatch(self, topic: str) -> Mismatch | None:
        """In what the two do not fit, by the rules of `methods`; None where they fit."""
        _, config = self.drafted()
        base = BaseSide.of_checkpoint(self.model)
        draft = DraftSide.of_checkpoint(config, self.aux_layers)
        return next(
            (mismatch for mismatch in mismatches(base, draft) if mismatch.topic == topic), None
        )
