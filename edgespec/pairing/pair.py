"""A base and a draft as the checks see them."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.checkpoint.files import Checkpoint
from edgespec.config import ModelConfig
from edgespec.methods.dflash import DFlashConfig
from edgespec.methods.eagle3 import Eagle3Config


@dataclass(frozen=True, slots=True)
class Pair:
    """`draft` and `config` are None where the draft is the base's own MTP head."""

    base: Checkpoint
    model: ModelConfig
    draft: Checkpoint | None
    config: Eagle3Config | DFlashConfig | None
    aux_layers: tuple[int, ...] | None = None  # hidden_states indices that win over the draft's own

    def drafted(self) -> tuple[Checkpoint, Eagle3Config | DFlashConfig]:
        """The draft's checkpoint and configuration, where a method has one."""
        assert self.draft is not None
        assert self.config is not None
        return self.draft, self.config
