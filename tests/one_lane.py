"""One lane of a decoder, for tests that follow a single sequence: arrays carry a batch of one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgespec.backends.host import HostStates
from edgespec.runtime.lanes.decoder import CachedDecoder, DecoderRows
from tests.calls import Outputs, outputs_of


@dataclass
class OneLane:
    decoder: CachedDecoder
    lane: int = 0

    @property
    def length(self) -> int:
        return self.decoder.lanes[self.lane].length

    def causal(
        self, tokens: np.ndarray, gather: np.ndarray, base_hidden: np.ndarray | None = None
    ) -> Outputs:
        rows = self.decoder.causal(self.lane, tokens, gather, given(base_hidden))
        return outputs_of(self.decoder.extend([rows]))

    def run(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        visible: np.ndarray,
        gather: np.ndarray,
        base_hidden: np.ndarray | None = None,
        draft_hidden: np.ndarray | None = None,
    ) -> Outputs:
        states = given(base_hidden), given(draft_hidden)
        rows = DecoderRows(self.lane, tokens, positions, visible, gather, *states)
        return outputs_of(self.decoder.run([rows]))

    def commit(self, path: np.ndarray) -> None:
        self.decoder.commit(self.lane, path)

    def drop_scratch(self) -> None:
        self.decoder.drop_scratch(self.lane)

    def reset(self) -> None:
        self.decoder.reset(self.lane)


def given(states: np.ndarray | None) -> HostStates | None:
    return None if states is None else HostStates(states)
