"""Drafts that are drawn at random, and the probabilities that they were drawn from.

Knows the request's sampler and a draft's logits. Knows no drafter and no accept rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import RequestError
from edgespec.runtime.sampling.sampler import NEVER, Adjusted, Sampler, gumbel, stream

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
DRAFTS = 1  # the stream of noise that draws drafts


@dataclass(frozen=True, slots=True)
class Distribution:
    """Probabilities of tokens; those that are not in `ids` have none."""

    ids: Ids  # [K], ascending
    probs: NDArray[np.float64]  # [K], adding up to 1

    @classmethod
    def point(cls, token: int) -> Distribution:
        """All of the mass on one token: that of a draft that was chosen without chance."""
        return cls(np.array([token], np.int64), np.ones(1))

    def of(self, tokens: Ids) -> NDArray[np.float64]:
        """The probability of each of `tokens`."""
        places = np.minimum(np.searchsorted(self.ids, tokens), len(self.ids) - 1)
        probs: NDArray[np.float64] = np.where(self.ids[places] == tokens, self.probs[places], 0.0)
        return probs

    def prob(self, token: int) -> float:
        """The probability of one token."""
        return float(self.of(np.array([token], np.int64))[0])


@dataclass(frozen=True, slots=True)
class DraftSampler:
    """Draws a sequence's drafts with the temperature, top-k, top-p, min-p, bias, penalties and
    grammar of its request.

    `before` are all tokens up to the pending one, which is included. The noise depends on the seed,
    on the pending token's position and on the draft's own: no two drafts share any, and none is
    shared with what the base draws.
    """

    sampler: Sampler
    before: Sequence[int]
    vocab_size: int

    def draw(
        self, logits: Floats, path: Sequence[int] = (), ids: Ids | None = None
    ) -> tuple[int, Distribution]:
        """A draft from a draft's logits [Vd], and the probabilities that it was drawn from.

        `path` are the drafts before it, from the pending token on; `ids` [Vd] are the base's ids of
        the logits, None where they are the same.
        """
        position = len(self.before) + len(path)
        candidates, log_probs = self.warped(logits, path, ids)
        noise = gumbel(stream(self.sampler.seed, DRAFTS, len(self.before)), position, candidates)
        token = int(candidates[np.argmax(log_probs + noise)])
        return token, Distribution(candidates, np.exp(log_probs))

    def warped(
        self, logits: Floats, path: Sequence[int], ids: Ids | None
    ) -> tuple[Ids, NDArray[np.float64]]:
        """The base's ids that are left, ascending, and their log p."""
        own = np.arange(len(logits)) if ids is None else ids
        sampler = self.sampler
        if not sampler.adjusts(len(self.before) + len(path)):
            places, log_probs = sampler.warped(logits)
            candidates = own[places]
        else:  # they are of the base's ids
            row = np.full(self.vocab_size, NEVER)
            row[own] = logits
            candidates, log_probs = sampler.warped(self.adjusted(row, [*self.before, *path]))
        possible = np.flatnonzero(np.isfinite(log_probs))
        order = possible[np.argsort(candidates[possible])]
        return candidates[order], log_probs[order]

    def adjusted(self, row: Floats, before: Sequence[int]) -> Adjusted:
        """Logits [V] as the request adjusts them. Where its grammar allows no token that the draft
        knows they stay unmasked: whatever is drawn is rejected then, as it has to be."""
        try:
            return self.sampler.adjusted(row, before)
        except RequestError:
            return self.sampler.shifted(row, before)
