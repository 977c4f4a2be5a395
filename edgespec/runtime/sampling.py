"""Chooses a token from logits: greedily, or sampled with noise that hangs on seed and position alone.

Knows one row of logits at a time. Because the noise is a function of (seed, absolute position, token), plain and
speculative decoding draw the same token from the same logits, whatever tree the row came from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Ids = NDArray[np.int64]
NEAR_TIE = 1e-5  # two candidates this close in warped, noised score may swap between kernels in float32


@dataclass(frozen=True, slots=True)
class Sampler:
    """Temperature, top-k, top-p in this order, then Gumbel-max.

    Temperature 0 is greedy; top_k 0 and top_p 1 are off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def pick(self, logits: Row, position: int) -> int:
        """The token for absolute `position`, from logits [V]; ties go to the lowest id."""
        if self.temperature == 0:
            return int(np.argmax(logits))
        ids, scores = self.noised(logits, position)
        return int(ids[np.argmax(scores)])

    def noised(self, logits: Row, position: int) -> tuple[Ids, NDArray[np.float64]]:
        """The candidates that warping leaves, ascending, and their noised scores: log p + Gumbel noise."""
        ids, log_probs = self.warped(logits)
        return ids, log_probs + gumbel(self.seed, position, ids)

    def warped(self, logits: Row) -> tuple[Ids, NDArray[np.float64]]:
        """Candidates left by temperature, top-k and top-p, ascending, with their log-probabilities."""
        scaled = self.scaled(logits)
        ids = np.arange(len(logits), dtype=np.int64)
        if 0 < self.top_k < len(logits):
            ids = np.sort(largest(scaled, self.top_k))
        log_probs = log_softmax(scaled[ids])
        if self.top_p < 1:
            kept = np.sort(nucleus(log_probs, self.top_p))
            ids, log_probs = ids[kept], log_softmax(log_probs[kept])
        return ids, log_probs

    def scaled(self, logits: Row) -> NDArray[np.float64]:
        """Logits over temperature, the largest at 0, so that the smallest temperature cannot overflow upwards."""
        centred = logits.astype(np.float64) - float(logits.max())
        with np.errstate(over="ignore"):
            result: NDArray[np.float64] = centred / self.temperature
        return result

    def margin(self, logits: Row, position: int, one: int, other: int) -> float:
        """How far apart two tokens are at `position`: the change of score that would swap them.

        Where warping has removed one of them, the distance is that of its (temperature-scaled) logit from the least
        candidate kept, or the noised one if that is larger.
        """
        if self.temperature == 0:
            return abs(float(logits[one]) - float(logits[other]))
        ids, scores = self.noised(logits, position)
        found = {int(i): float(s) for i, s in zip(ids, scores, strict=True) if i in (one, other)}
        if len(found) == 2:
            return abs(found[one] - found[other])
        scaled = self.scaled(logits)
        edge = float(scaled[ids].min())
        return max((edge - float(scaled[t]) for t in (one, other) if t not in found), default=float("inf"))


def largest(values: NDArray[np.float64], count: int) -> Ids:
    """Indices of the `count` largest values; ties go to the lowest index."""
    edge = np.partition(values, len(values) - count)[len(values) - count]
    above, tied = np.flatnonzero(values > edge), np.flatnonzero(values == edge)
    return np.concatenate([above, tied[: count - len(above)]])


def nucleus(log_probs: NDArray[np.float64], top_p: float) -> Ids:
    """The smallest set of most probable candidates whose mass reaches top_p; never empty."""
    order = np.argsort(-log_probs, kind="stable")
    before = np.cumsum(np.exp(log_probs[order])) - np.exp(log_probs[order])
    return order[before < top_p]


def log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = x - x.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def gumbel(seed: int, position: int, ids: Ids) -> NDArray[np.float64]:
    """Standard Gumbel noise for each token id, a pure function of (seed, position, id).

    The counter is hashed by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) twice over; the top 52 bits are the
    uniform, shifted by half a unit so that it is never 0 or 1 (of 53 bits the largest would round up to 1).
    """
    with np.errstate(over="ignore"):
        stream = splitmix(splitmix(np.array([seed], np.uint64)) ^ np.array([position], np.uint64))
        bits = splitmix(stream ^ splitmix(ids.astype(np.uint64)))
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
