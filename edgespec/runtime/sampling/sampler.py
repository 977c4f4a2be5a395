"""Samples a token from logits: greedily, or with noise that depends only on seed and position.

Knows one row of logits at a time. The noise is a function of (seed, absolute position, token), so
that plain and speculative decoding sample the same token from the same logits, whatever tree the
row comes from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.call import Logits
from edgespec.errors import EnvironmentProblem, RequestError
from edgespec.prompts import SamplingParams

Row = NDArray[np.float32]
Adjusted = NDArray[np.float32] | NDArray[np.float64]
Ids = NDArray[np.int64]
NEVER = np.float32(-np.inf)  # a logit that no sampling draws
NEAR_TIE = 1e-5  # nats; scores this close may swap between float32 kernels


class TokenMask(Protocol):
    """What a grammar allows: a function of the path alone, whatever was asked before."""

    def allowed(self, before: Sequence[int]) -> NDArray[np.bool_] | None:
        """The tokens [V] that may come after `before`; None: all."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Logit bias, repetition penalty, presence and frequency penalty, the grammar's mask,
    temperature, top-k, top-p, min-p in this order, then Gumbel-max.

    Temperature 0 is greedy; top_k 0, top_p 1, min_p 0, repetition_penalty 1 and the other penalties
    0 are off. `before` is the complete path of a token, prompt included: its length is the absolute
    position, on which the noise depends. The answer begins behind `num_prompt` tokens, and none of
    its first `min_tokens` is one of `end_ids`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    num_prompt: int = 0
    end_ids: frozenset[int] = frozenset()
    mask: TokenMask | None = None
    # Whether the largest logit of any position behind the least length is the token
    is_plain: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        plain = self.temperature == 0 and self.mask is None and self.repetition_penalty == 1
        plain = plain and not (self.logit_bias or self.presence_penalty or self.frequency_penalty)
        object.__setattr__(self, "is_plain", plain)

    @classmethod
    def of(
        cls,
        sampling: SamplingParams,
        num_prompt: int = 0,
        end_ids: frozenset[int] = frozenset(),
        mask: TokenMask | None = None,
    ) -> Sampler:
        """That of a request whose seed is known; a greedy one needs none. A seed below 0 is that
        which has the same 64 bits. `mask` is that of its grammar."""
        own: dict[str, Any] = {"num_prompt": num_prompt, "end_ids": end_ids, "mask": mask}
        names = [item.name for item in fields(cls) if item.init and item.name not in own]
        shared = {name: getattr(sampling, name) for name in names}
        return cls(**shared | own | {"seed": (sampling.seed or 0) % 2**64})

    def pick(self, logits: Row, before: Sequence[int]) -> int:
        """Returns the token after `before` from logits [V]; ties go to the lowest id.

        Raises EnvironmentProblem if the largest logit is NaN or Inf.
        """
        adjusted = self.checked(logits, before)
        if self.temperature == 0:
            return int(np.argmax(adjusted))
        ids, scores = self.noised(adjusted, len(before))
        return int(ids[np.argmax(scores)])

    def pick_from(self, logits: Logits, row: int, before: Sequence[int]) -> int:
        """Returns the token after `before` from a row of logits, as `pick`; a greedy one that
        nothing adjusts is found where the logits are.

        Raises EnvironmentProblem if the largest logit is NaN or Inf.
        """
        if not self.is_plain or self.is_short(len(before)):
            return self.pick(logits.row(row), before)
        best, value = logits.best(row)
        check_finite(value)
        return best

    def adjusts(self, position: int) -> bool:
        """Whether a bias, a penalty, the least length or a grammar changes a position's logits."""
        return self.mask is not None or self.shifts(position)

    def shifts(self, position: int) -> bool:
        """Whether a bias, a penalty or the least length changes the logits of a position."""
        return (
            bool(self.logit_bias or self.presence_penalty or self.frequency_penalty)
            or self.repetition_penalty != 1
            or self.is_short(position)
        )

    def is_short(self, position: int) -> bool:
        """Whether the answer must go on at a position."""
        return position - self.num_prompt < self.min_tokens

    def checked(self, logits: Row, before: Sequence[int]) -> Adjusted:
        """Returns `adjusted` logits [V], whose largest is a number.

        Raises EnvironmentProblem if it is NaN or Inf.
        """
        adjusted = self.adjusted(logits, before)
        best = int(np.argmax(adjusted))  # argmax returns the first NaN, if there is one
        check_finite(adjusted[best])
        return adjusted

    def adjusted(self, logits: Row, before: Sequence[int]) -> Adjusted:
        """Returns logits [V] with bias, penalties and, at the beginning, no end, and -inf for what
        the grammar does not allow; unchanged if all are off.

        Raises RequestError where that leaves no token.
        """
        if not self.adjusts(len(before)):
            return logits
        return self.masked(self.shifted(logits, before), before)

    def masked(self, logits: Adjusted, before: Sequence[int]) -> Adjusted:
        """Returns logits [V] with -inf for what the grammar does not allow after `before`."""
        allowed = None if self.mask is None else self.mask.allowed(before)
        if allowed is None:
            return logits
        out: Adjusted = np.where(allowed, logits, NEVER)
        if out.max() == NEVER:
            raise RequestError(
                "the grammar of the answer leaves no token to go on with",
                "Relax the grammar, or what else takes tokens away.",
                param="guided",
            )
        return out

    def shifted(self, logits: Row, before: Sequence[int]) -> Adjusted:
        """Returns logits [V] with bias, penalties and, at the beginning, no end; unchanged if all
        are off.

        The repetition penalty divides the positive and multiplies the negative logits of every
        token in `before` (arXiv 1909.05858, section 4.1, in the form of transformers). The others
        are taken off the logits of what the answer has, once a token and once a time, as OpenAI's
        API has them.
        """
        if not self.shifts(len(before)):
            return logits
        out: NDArray[np.float64] = logits.astype(np.float64)
        for token, bias in self.logit_bias.items():
            out[token] += bias
        if self.repetition_penalty != 1:
            seen = np.unique(np.fromiter(before, np.int64, len(before)))
            penalty = self.repetition_penalty
            out[seen] = np.where(out[seen] > 0, out[seen] / penalty, out[seen] * penalty)
        if self.presence_penalty or self.frequency_penalty:
            answer = np.array(before[self.num_prompt :], np.int64)
            said, times = np.unique(answer, return_counts=True)
            out[said] -= self.presence_penalty + self.frequency_penalty * times
        if self.is_short(len(before)):
            out[[*self.end_ids]] = -np.inf
        return out

    def noised(self, adjusted: Adjusted, position: int) -> tuple[Ids, NDArray[np.float64]]:
        """Returns the candidate ids after warping, ascending, and log p + Gumbel noise of each."""
        ids, log_probs = self.warped(adjusted)
        return ids, log_probs + gumbel(self.seed, position, ids)

    def warped(self, adjusted: Adjusted) -> tuple[Ids, NDArray[np.float64]]:
        """Returns the ids after temperature, top-k, top-p and min-p, ascending, and their log p."""
        scaled = self.scaled(adjusted)
        ids = np.arange(len(adjusted), dtype=np.int64)
        if 0 < self.top_k < len(adjusted):
            ids = np.sort(largest(scaled, self.top_k))
        log_probs = log_softmax(scaled[ids])
        if self.top_p < 1:
            kept = np.sort(nucleus(log_probs, self.top_p))
            ids, log_probs = ids[kept], log_softmax(log_probs[kept])
        if self.min_p > 0:
            kept = np.flatnonzero(log_probs >= log_probs.max() + np.log(self.min_p))
            ids, log_probs = ids[kept], log_softmax(log_probs[kept])
        return ids, log_probs

    def scaled(self, adjusted: Adjusted) -> NDArray[np.float64]:
        """Returns logits / temperature, shifted so that the largest is 0 and none overflows."""
        centered = adjusted.astype(np.float64) - float(adjusted.max())
        with np.errstate(over="ignore"):
            result: NDArray[np.float64] = centered / self.temperature
        return result

    def margin(self, logits: Row, before: Sequence[int], one: int, other: int) -> float:
        """Returns the smallest change of a logit with which the other of two tokens is sampled.

        The token with the higher noised score loses when the gap of the scores closes or when
        warping removes it; a token that warping has removed must first return. The change is in
        nats of the engine's logits (for top-p and a repetition penalty, a lower bound): what a
        temperature or a penalty makes of it is divided out.
        """
        adjusted = self.adjusted(logits, before)
        gain = self.magnification(before, one, other)
        if self.temperature == 0:
            return abs(float(adjusted[one]) - float(adjusted[other])) / gain
        scaled = self.scaled(adjusted)
        noise = gumbel(self.seed, len(before), np.array([one, other]))
        scores = scaled[[one, other]] + noise
        high, low = (one, other) if scores[0] >= scores[1] else (other, one)
        gap = abs(float(scores[0] - scores[1]))
        high_slack, low_slack = self.slack(scaled, high), self.slack(scaled, low)
        return max(min(gap, abs(high_slack)), -high_slack, -low_slack) / gain

    def magnification(self, before: Sequence[int], one: int, other: int) -> float:
        """Returns the largest factor from a change of a logit to that of its score: below 1 where
        the temperature is above 1."""
        penalized = one in before or other in before
        penalty = max(self.repetition_penalty, 1 / self.repetition_penalty) if penalized else 1.0
        return penalty / (self.temperature or 1)

    def slack(self, scaled: NDArray[np.float64], token: int) -> float:
        """Returns a token's distance from the edge of the candidates; negative outside."""
        slack = float("inf")
        # min_p cannot remove the most probable candidate
        if self.min_p > 0 and scaled[token] < scaled.max():
            slack = float(scaled[token] - scaled.max() - np.log(self.min_p))
        ids = np.arange(len(scaled))
        if 0 < self.top_k < len(scaled):
            ids = np.sort(largest(scaled, self.top_k))
            outside = np.delete(scaled, ids)
            if token not in ids:
                return min(slack, float(scaled[token] - scaled[ids].min()))
            slack = min(slack, float(scaled[token] - outside.max()))
        if self.top_p < 1:
            index = int(np.flatnonzero(ids == token)[0])
            slack = min(slack, self.nucleus_slack(scaled[ids], index))
        return slack

    def nucleus_slack(self, scaled: NDArray[np.float64], index: int) -> float:
        """Returns the distance from the edge of top-p, by cumulative mass or by rank.

        The nearer edge counts.
        """
        order = np.argsort(-scaled, kind="stable")
        probs = np.exp(log_softmax(scaled))[order]
        before = np.cumsum(probs) - probs
        kept = int((before < self.top_p).sum())
        rank = int(np.flatnonzero(order == index)[0])
        here = scaled[index]
        if rank >= kept:
            return max(float(self.top_p - before[rank]), float(here - scaled[order[kept - 1]]))
        # top_p always keeps the most probable candidate, which can only lose its rank
        by_mass = float(self.top_p - before[rank]) if rank else float("inf")
        by_rank = float(here - scaled[order[kept]]) if kept < len(order) else float("inf")
        return min(by_mass, by_rank)


def check_finite(largest_logit: float) -> None:
    """Raises EnvironmentProblem if the largest logit of a row is NaN or Inf."""
    if not math.isfinite(largest_logit):
        message = f"the engine computed {largest_logit} as a logit"
        raise EnvironmentProblem(
            message, "The weights are damaged or too large for this engine: build it again."
        )


def top_log_probs(
    logits: Logits, count: int, chosen: Sequence[int]
) -> list[list[tuple[int, float]]]:
    """Returns for each row the `count` most probable ids with log p at temperature 1, descending.

    The row's chosen id is appended if it is not among them. Raises EnvironmentProblem if a row's
    largest logit is NaN or Inf.
    """
    if not chosen:
        return []
    top = logits.top(max(count, 1))
    found = []
    for row, token in enumerate(chosen):
        check_finite(float(top.values[row, 0]))
        pairs = list(zip(top.ids[row, :count].tolist(), top.values[row].tolist(), strict=False))
        if token not in top.ids[row, :count]:
            pairs.append((token, float(logits.row(row)[token])))
        total = float(top.logsumexp[row])
        found.append([(i, value - total) for i, value in pairs])
    return found


def largest(values: NDArray[np.float64], count: int) -> Ids:
    """Returns the indices of the `count` largest values, in no order; ties go to the lowest."""
    edge = np.partition(values, len(values) - count)[len(values) - count]
    above, tied = np.flatnonzero(values > edge), np.flatnonzero(values == edge)
    return np.concatenate([above, tied[: count - len(above)]])


def nucleus(log_probs: NDArray[np.float64], top_p: float) -> Ids:
    """Returns the indices of the smallest set of most probable candidates with mass top_p or more.

    It is never empty (arXiv 1904.09751, section 3.1).
    """
    order = np.argsort(-log_probs, kind="stable")
    before = np.cumsum(np.exp(log_probs[order])) - np.exp(log_probs[order])
    return order[before < top_p]


def log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns x - logsumexp(x) of a row."""
    shifted = x - x.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def gumbel(seed: int, position: int, ids: Ids) -> NDArray[np.float64]:
    """Returns standard Gumbel noise for each id, a pure function of (seed, position, id)."""
    noise: NDArray[np.float64] = -np.log(-np.log(uniform(seed, position, ids)))
    return noise


def uniform(seed: int, position: int, ids: Ids) -> NDArray[np.float64]:
    """Returns a number above 0 and below 1 for each id, a pure function of (seed, position, id).

    The counter is hashed with SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). The top 52 bits are
    the uniform number, plus half a unit so that it is never 0 or 1 (with 53 bits the largest would
    round to 1).
    """
    with np.errstate(over="ignore"):
        key = splitmix(splitmix(np.array([seed], np.uint64)) ^ np.array([position], np.uint64))
        bits = splitmix(key ^ splitmix(ids.astype(np.uint64)))
    number: NDArray[np.float64] = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return number


def stream(seed: int, *keys: int) -> int:
    """Returns a seed whose noise is independent of that of `seed`, and of that of other keys."""
    state = np.array([seed], np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            state = splitmix(splitmix(state) + np.array([key], np.uint64))
    return int(splitmix(~state)[0])


def splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns one step of SplitMix64 for each element (Steele, Lea and Flood, OOPSLA 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
