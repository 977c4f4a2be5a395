"""One lane of a decoder, for tests that follow a single sequence: results carry a batch of one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgespec.backends.base import Result
from edgespec.runtime.decoder import CachedDecoder, LaneResult, Rows


@dataclass
class OneLane:
    decoder: CachedDecoder
    lane: int = 0

    @property
    def length(self) -> int:
        return self.decoder.lanes[self.lane].length

    def causal(
        self, tokens: np.ndarray, gather: np.ndarray, base_hidden: np.ndarray | None = None
    ) -> Result:
        (result,) = self.decoder.extend(
            [self.decoder.causal(self.lane, tokens, gather, base_hidden)]
        )
        return batch_of_one(result)

    def run(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        visible: np.ndarray,
        gather: np.ndarray,
        base_hidden: np.ndarray | None = None,
        draft_hidden: np.ndarray | None = None,
    ) -> Result:
        rows = Rows(self.lane, tokens, positions, visible, gather, base_hidden, draft_hidden)
        return batch_of_one(self.decoder.run([rows])[0])

    def commit(self, path: np.ndarray) -> None:
        self.decoder.commit(self.lane, path)

    def drop_scratch(self) -> None:
        self.decoder.drop_scratch(self.lane)

    def reset(self) -> None:
        self.decoder.reset(self.lane)


def batch_of_one(result: LaneResult) -> Result:
    hidden = result.hidden_states
    return Result(result.logits[None], None if hidden is None else hidden[None])
