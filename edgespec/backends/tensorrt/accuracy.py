"""How close engines of TensorRT must come to the golden outputs, by the type of their products, the
scheme of their weights, and whether layers are recurrent.

The bounds are multiples of what `scripts/measure_accuracy.py` measured on lowered graphs of random
weights, the worst case, whose values were rounded on the CPU (docs/tensorrt.md). Nothing here was
measured on a device. Knows no graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from edgespec.backends.base import AccuracySpec, RoundingMargin
from edgespec.backends.tensorrt.options import SHORT
from edgespec.backends.tensorrt.target import Compute

# Largest difference relative to the largest value: sums in another order, and TF32 products. The
# lowered graphs differ by 2e-6 on the CPU
FLOAT32_TOLERANCE = 1e-2
BATCH_TOLERANCE = 0.1  # between a batch and a sequence alone, where rows may round otherwise
MARGIN = RoundingMargin(times=2.0, min_nats=0.1, noise=1e-3)


@dataclass(frozen=True, slots=True)
class Error:
    """The largest that was measured: what a cosine lacks of 1, which grows with the square of the
    error, and how far the size of an output is from 1."""

    angle: float
    scale: float

    def times(self, count: int) -> Error:
        """That of an error so many times as large."""
        return Error(count**2 * self.angle, count * self.scale)


NONE = Error(0.0, 0.0)
# By the compute type: two to 36 layers, hidden sizes of 64 to 512
ROUNDED: Mapping[Compute, Error] = {
    "float16": Error(7.5e-6, 2.5e-4),
    "bfloat16": Error(6.2e-4, 3.6e-3),
}
# How many times that may be. TensorRT may sum products of float16 in float16, the CPU did not
ROUNDED_TIMES: Mapping[Compute, int] = {"float16": 10, "bfloat16": 2}
# Where layers are recurrent: what they read of their state is normed, however small it is, and so
# is its error. Of 4 to 24 layers in bfloat16; float16 has the same bounds, by what it may sum in
RECURRENT = Error(3.3e-2, 4.9e-2)
RECURRENT_TIMES = 2
# Of schemes that round activations: a value between two quantized ones may fall to either side, and
# golden outputs have no dynamic roundings. Of 2 to 24 layers. Other schemes round weights alone,
# here, and golden outputs have those
ACTIVATIONS: Mapping[str, Error] = {
    "fp8": Error(4.6e-2, 6.2e-2),
    "int8_sq": Error(3.8e-3, 4.7e-3),
    "mxfp8": Error(4.8e-2, 5.9e-2),
    "nvfp4": Error(3.1e-1, 3.1e-1),
    "w4a8_awq": Error(1.8e-2, 2.1e-2),
}
ACTIVATIONS_TIMES = 2
MIN_COSINE = 0.5  # below it an output points elsewhere


def accuracy_of(schemes: Iterable[str], compute: Compute, *, recurrent: bool) -> AccuracySpec:
    """What the outputs of an engine of these weights must keep."""
    errors = [ACTIVATIONS[name] for name in schemes if name in ACTIVATIONS]
    if compute not in ROUNDED and not errors:
        return AccuracySpec(tolerance=FLOAT32_TOLERANCE, margin=MARGIN)
    if recurrent and errors:  # not measured: a state passes on what activations lose
        return AccuracySpec(tolerance=BATCH_TOLERANCE, min_cosine=MIN_COSINE, margin=MARGIN)
    allowed = [error.times(ACTIVATIONS_TIMES) for error in errors] or [NONE]
    rounded = rounding_of(compute, recurrent=recurrent)
    angle = rounded.angle + max(error.angle for error in allowed)
    return AccuracySpec(
        tolerance=BATCH_TOLERANCE,
        min_cosine=max(MIN_COSINE, round(1 - angle, 6)),
        max_scale=round(rounded.scale + max(error.scale for error in allowed), 5),
        margin=MARGIN,
    )


def rounding_of(compute: Compute, *, recurrent: bool) -> Error:
    """The error that a compute type may make."""
    if compute not in ROUNDED:
        return NONE
    if recurrent:
        return RECURRENT.times(RECURRENT_TIMES)
    return ROUNDED[compute].times(ROUNDED_TIMES[compute])


def schemes_in(scheme: str) -> list[str]:
    """The quantized schemes in what a config.json says of an engine's weights."""
    return [name for name in scheme.split(", ") if name not in SHORT.values()]
