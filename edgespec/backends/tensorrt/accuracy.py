"""How close engines of TensorRT must come to the golden outputs, by the type of their products and
the scheme of their weights.

Nothing here was measured on a device yet: the bounds are those of the arithmetic, and of schemes as
`schemes` has them.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgespec.backends.base import AccuracySpec, RoundingMargin
from edgespec.backends.tensorrt.options import SHORT
from edgespec.backends.tensorrt.target import Compute
from edgespec.schemes import SCHEMES

# Largest difference relative to the largest value: sums in another order, and TF32 products
FLOAT32_TOLERANCE = 1e-2
# Halves keep 11 and 8 bits; a wrong mask, layout or weight turns outputs by more than 0.1
COSINE: dict[Compute, float] = {"float16": 0.999, "bfloat16": 0.99}
BATCH_TOLERANCE = 0.1  # between a batch and a sequence alone, where rows may round otherwise
MARGIN = RoundingMargin(times=2.0, min_nats=0.1, noise=1e-3)


def accuracy_of(schemes: Iterable[str], compute: Compute) -> AccuracySpec:
    """What the outputs of an engine of these weights must keep."""
    cosines = [SCHEMES[name].min_logits_cosine for name in schemes]
    if compute in COSINE:
        cosines.append(COSINE[compute])
    if not cosines:
        return AccuracySpec(tolerance=FLOAT32_TOLERANCE, margin=MARGIN)
    return AccuracySpec(tolerance=BATCH_TOLERANCE, min_cosine=min(cosines), margin=MARGIN)


def schemes_in(scheme: str) -> list[str]:
    """The quantized schemes in what a config.json says of an engine's weights."""
    return [name for name in scheme.split(", ") if name not in SHORT.values()]
