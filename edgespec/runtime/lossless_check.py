"""The lossless check: where a run with drafts left the plain one, and whether rounding explains
it.

Knows two responses to one request. Knows no loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgespec.prompts import SamplingParams
from edgespec.runtime.engine import Engine
from edgespec.runtime.generation import Response
from edgespec.runtime.sampling import NEAR_TIE, Sampler


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which a speculative run left the plain one.

    `margin` is how near the two candidates were, `rounding` how near they must be for kernels to
    explain it.
    """

    index: int
    plain: int | None
    speculative: int | None
    margin: float
    rounding: float = NEAR_TIE

    @property
    def near_tie(self) -> bool:
        """Whether the rounding of kernels explains it."""
        return self.margin <= self.rounding


def first_difference(
    engine: Engine, plain: Response, speculative: Response, sampling: SamplingParams
) -> Difference | None:
    """Where two runs of a request part, with the margin between the two candidates there; None if
    equal."""
    ids, drafted_ids = plain.token_ids, speculative.token_ids
    if ids == drafted_ids:
        return None
    index = next(
        (i for i, (a, b) in enumerate(zip(ids, drafted_ids, strict=False)) if a != b),
        min(len(ids), len(drafted_ids)),
    )
    a, b = (found[index] if index < len(found) else None for found in (ids, drafted_ids))
    margin = float("inf")
    if a is not None and b is not None:
        before = [*plain.prompt_ids, *ids[:index]]
        sampler = Sampler.of(replace(sampling, seed=plain.seed))
        margin = sampler.margin(engine.next_logits(before), before, a, b)
    return Difference(index, a, b, margin, engine.rounding)
