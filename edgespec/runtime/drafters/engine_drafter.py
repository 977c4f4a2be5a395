"""What drafters with an engine of their own share: its lanes, and a state beside each.

Knows the draft engine's memory. How a drafter searches stands in its own file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from numpy.typing import NDArray

from edgespec.backends.base import LaneRows, PacksRows
from edgespec.runtime.drafters.base import PacksSnapshots, Reserving, Snapshot
from edgespec.runtime.lanes.block import BlockDecoder
from edgespec.runtime.lanes.decoder import CachedDecoder

Decoder = TypeVar("Decoder", CachedDecoder, BlockDecoder)
State = TypeVar("State")


class EngineDrafter(Reserving, PacksSnapshots, Generic[Decoder, State]):
    """What of a Drafter follows from its engine. `empty` makes the state of a free lane."""

    needs_hidden_states = True

    def __init__(self, decoder: Decoder, empty: Callable[[], State]) -> None:
        self.decoder: Decoder = decoder
        self.empty = empty
        self.lanes = [empty() for _ in decoder.lanes]

    @property
    def capacity(self) -> int:
        """Tokens of a sequence that its KV cache holds."""
        return self.decoder.capacity

    @property
    def num_lanes(self) -> int:
        """Sequences that its KV cache holds."""
        return len(self.decoder.lanes)

    @property
    def engine_s(self) -> float:
        """Seconds in the draft engine so far."""
        return self.decoder.engine_s

    def begin(self, lane: int, tokens: Sequence[int], num_reused: int) -> None:
        """Nothing: the prompt comes with its hidden states, by `observe`."""

    def reserve(self, lane: int, tokens: int) -> None:
        """Choose the engine that holds so many tokens, where there are several."""
        self.decoder.reserve(lane, tokens)

    def reset(self, lane: int) -> None:
        """Forget a lane's sequence and its state."""
        self.decoder.reset(lane)
        self.lanes[lane] = self.empty()

    def move(self, source: int, target: int) -> None:
        """The KV rows and the state of `source` go to `target`."""
        self.decoder.move(source, target)
        self.lanes[target] = self.lanes[source]
        self.lanes[source] = self.empty()

    def restore(self, lane: int, snapshot: Snapshot) -> None:
        """Begin a lane with the KV rows of a snapshot."""
        self.reset(lane)
        self.decoder.restore(lane, cast(LaneRows, snapshot))  # its own

    def pack(self, snapshot: Snapshot) -> dict[str, NDArray[Any]]:
        """The arrays of the KV rows."""
        return cast(PacksRows, self.decoder.runner).pack(cast(LaneRows, snapshot))

    def unpack(self, arrays: Mapping[str, NDArray[Any]], count: int) -> Snapshot:
        """The KV rows of their arrays."""
        return cast(PacksRows, self.decoder.runner).unpack(arrays)

    def close(self) -> None:
        """Free the draft engine."""
        self.decoder.runner.close()
