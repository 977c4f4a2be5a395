"""How far quantized weights took an engine from what was exported, as figures that a manifest keeps
and a user reads.

Knows figures and words. How they are measured stands in `runtime/measuring/quantization_loss`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from edgespec.backends.call import Floats
from edgespec.backends.engine_config import EngineFields

LARGEST = 2.0**63  # of a figure
MAX_INCREASE = 0.05  # of the perplexity; from here on the user is warned
# Nats a token; from here on the user is warned too. Of text that a model predicts badly anyway the
# perplexity hardly rises. Measured: GPTQ 0.02 to 0.03, int4 without a text 0.04 to 0.07; int4/32 of
# a model that talks nonsense with it 0.44.
MAX_KL = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """An engine beside its export in float32, on `tokens` of the text that comes with edgespec.

    `perplexity` and `exported_perplexity` are exp of the mean negative log-likelihood of a token,
    `kl` the mean divergence of its distribution, KL(exported || engine), in nats, with the standard
    error `kl_error`; `top1` is how often both have the same most likely token.
    """

    tokens: int
    perplexity: float
    exported_perplexity: float
    kl: float
    kl_error: float
    top1: float

    @classmethod
    def read(cls, fields: EngineFields) -> Divergence:
        """The figures of the keys of `divergence` in manifest.json. BundleError names a wrong
        key."""
        share = fields.any_number("top1")
        if not 0 <= share <= 1:
            raise fields.wrong("top1", "a number from 0 to 1")
        return cls(
            tokens=fields.size("tokens"),
            perplexity=fields.number("perplexity"),
            exported_perplexity=fields.number("exported_perplexity"),
            kl=fields.any_number("kl"),
            kl_error=fields.any_number("kl_error"),
            top1=share,
        )

    def to_dict(self) -> dict[str, Any]:
        """The keys of manifest.json."""
        return asdict(self)

    @property
    def is_finite(self) -> bool:
        """Whether all figures are numbers that a file can have."""
        return all(abs(figure) < LARGEST for figure in asdict(self).values())

    @property
    def increase(self) -> float:
        """By which share the perplexity rose."""
        return self.perplexity / self.exported_perplexity - 1

    def text(self, scheme: str) -> str:
        """What it means, in one line."""
        other = 1 - self.top1
        words = f"1 word in {1 / other:.0f}" if other > 0 else f"no word of {self.tokens}"
        return (
            f"{scheme} changes {words} (top-1 {self.top1:.3f}), perplexity {self.perplexity:.4g}"
            f" instead of {self.exported_perplexity:.4g} ({100 * self.increase:+.1f} %), KL"
            f" {self.kl:.2g} +- {self.kl_error:.1g} nats a token"
        )

    def warnings(self, scheme: str, better: str | None) -> Iterator[str]:
        """What is said of a loss that a user would notice; `better` is the next better format."""
        remedy = "" if better is None else f": {better} is closer to the model"
        # a NaN is not within any bound
        if not self.increase < MAX_INCREASE:
            yield f"{scheme} raises the perplexity by {100 * self.increase:.0f} %{remedy}"
        elif not self.kl < MAX_KL:
            yield (
                f"{scheme} moves the model's predictions by {self.kl:.2g} nats a token, which the"
                f" perplexity of this text hides{remedy}"
            )


def log_softmax(logits: Floats) -> Floats:
    """The log-probabilities [N, V] of logits."""
    shifted = logits - logits.max(-1, keepdims=True)
    sums = np.exp(shifted).sum(-1, dtype=np.float64, keepdims=True)
    return np.asarray(shifted - np.log(sums).astype(np.float32), np.float32)
