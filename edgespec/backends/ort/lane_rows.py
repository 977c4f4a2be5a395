"""What a lane holds of a sequence, copied out of the caches of this backend.

Knows the arrays. Nobody outside `ort/` looks into it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LaneRows

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerState:
    """A copy of what a lane's recurrent layers remember."""

    conv: Floats  # [layers, K-1, C]
    state: Floats  # [layers, Hv, dk, dv]
    pending: Floats  # [layers, P, row width]

    @property
    def nbytes(self) -> int:
        """The bytes of all three arrays."""
        return self.conv.nbytes + self.state.nbytes + self.pending.nbytes


@dataclass(frozen=True, slots=True)
class OrtLaneRows(LaneRows):
    """Keys and values of a lane's first tokens, and the state of its recurrent layers."""

    kv: NDArray[Any]  # [2*attention layers, Hkv, tokens, D], as the cache has them
    state: LayerState | None = None

    def __len__(self) -> int:
        return int(self.kv.shape[2])

    @property
    def nbytes(self) -> int:
        """The bytes of keys, values and state."""
        return self.kv.nbytes + (self.state.nbytes if self.state is not None else 0)

    @property
    def can_crop(self) -> bool:
        """Whether there are shorter prefixes: keys and values have them, a recurrent state has
        none."""
        return self.state is None

    def prefix(self, count: int) -> OrtLaneRows:
        """A view of the first `count` tokens; of all of them, unless it can be cropped."""
        assert self.can_crop or count == len(self)
        return OrtLaneRows(self.kv[:, :, :count], self.state)
