"""What an accept rule costs: an answer beside the exact one to the same request and seed.

Knows two responses to one request, and the base that made them. The log-likelihood of both is
computed by the base itself: their tokens are read again as a prompt would be, with no tree, no
accept rule and no drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.runtime.engine import Engine
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.loop.generation import Response
from edgespec.runtime.sampling.sampler import log_softmax

Ids = NDArray[np.int64]
ROWS = 16  # of a call whose logits are all computed: bounds their memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """An answer beside the exact one.

    `agreeing` of `compared` tokens are equal at the same place; where one answer is longer its rest
    differs. `first_difference` is the first place at which they part, None where they are equal.
    The log-likelihoods, in nats a token, are the base's at temperature 1; None for an empty answer.
    """

    compared: int
    agreeing: int
    first_difference: int | None
    tokens: int
    exact_tokens: int
    log_likelihood: float | None
    exact_log_likelihood: float | None

    @property
    def agreement(self) -> float:
        """The share of tokens that are equal; 1 for two empty answers."""
        return self.agreeing / self.compared if self.compared else 1.0

    def to_dict(self) -> dict[str, Any]:
        """What output.json says of it."""
        return {
            "agreement": self.agreement,
            "agreeing_tokens": self.agreeing,
            "compared_tokens": self.compared,
            "first_difference": self.first_difference,
            "log_likelihood_per_token": self.log_likelihood,
            "exact_log_likelihood_per_token": self.exact_log_likelihood,
        }

    @property
    def words(self) -> str:
        """The comparison in one line."""
        if self.first_difference is None:
            return "the exact answer"
        own, exact = (
            "-" if value is None else f"{value:.3f}"
            for value in (self.log_likelihood, self.exact_log_likelihood)
        )
        return (
            f"{self.agreement:.0%} of {self.compared} tokens agree with the exact answer, the first"
            f" difference is at token {self.first_difference}; log-likelihood a token {own}, exact"
            f" {exact}"
        )


def compared(engine: Engine, lossy: Response, exact: Response) -> Quality:
    """An answer beside the exact one. Raises LimitError where no lane of the engine is free."""
    a, b = lossy.token_ids, exact.token_ids
    count = max(len(a), len(b))
    equal = [x == y for x, y in zip(a, b, strict=False)]
    first = next((place for place, same in enumerate(equal) if not same), len(equal))
    return Quality(
        compared=count,
        agreeing=sum(equal),
        first_difference=None if first == count else first,
        tokens=len(a),
        exact_tokens=len(b),
        log_likelihood=log_likelihood(engine, lossy.prompt_ids, a),
        exact_log_likelihood=log_likelihood(engine, exact.prompt_ids, b),
    )


def log_likelihood(engine: Engine, prompt: Sequence[int], tokens: Sequence[int]) -> float | None:
    """The mean of log p of `tokens` after `prompt`, in nats, by the base's logits; None for no
    tokens. Raises LimitError where no lane of the engine is free."""
    if not tokens:
        return None
    with engine.free_lane() as lane:
        return fmean(read(engine.base, lane, prompt, tokens))


def read(
    base: CachedDecoder, lane: int, prompt: Sequence[int], tokens: Sequence[int]
) -> list[float]:
    """Commit a prompt and all of `tokens` but the last to a free lane; log p of each of them."""
    first = base.read(lane, prompt)
    log_probs = [log_prob(first.logits.row(0), tokens[0])]
    ids, rows = np.array(tokens[:-1], np.int64), min(ROWS, base.runner.max_rows)
    for start in range(0, len(ids), rows):
        chunk = ids[start : start + rows]
        (result,) = base.extend([base.causal(lane, chunk, np.arange(len(chunk)))])
        coming = tokens[start + 1 :]
        log_probs += map(log_prob, result.logits.rows(), coming)
    return log_probs


def log_prob(logits: NDArray[np.float32], token: int) -> float:
    """log p of a token by logits [V]."""
    return float(log_softmax(logits.astype(np.float64))[token])


def pooled(qualities: Sequence[Quality]) -> dict[str, Any]:
    """Many comparisons as one: shares of all tokens, and log-likelihoods a token of all answers."""
    tokens = sum(item.compared for item in qualities)
    places = [item.first_difference for item in qualities if item.first_difference is not None]
    own = weighted([(item.log_likelihood, item.tokens) for item in qualities])
    exact = weighted([(item.exact_log_likelihood, item.exact_tokens) for item in qualities])
    return {
        "compared": len(qualities),
        "identical": sum(item.first_difference is None for item in qualities),
        "agreement": sum(item.agreeing for item in qualities) / tokens if tokens else None,
        "first_difference_mean": fmean(places) if places else None,
        "log_likelihood_per_token": own,
        "exact_log_likelihood_per_token": exact,
        "log_likelihood_cost": None if own is None or exact is None else exact - own,
    }


def weighted(values: Sequence[tuple[float | None, int]]) -> float | None:
    """The mean of values by their weights; None where none is defined."""
    known = [(value, weight) for value, weight in values if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None
