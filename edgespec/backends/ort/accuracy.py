"""How close engines of this backend come to the golden outputs, by the weights that they have.

Knows what was measured on these kernels. Knows no graph: it is given the lowered weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.backends.base import AccuracySpec, RoundingMargin
from edgespec.backends.engine_config import AS_EXPORTED, EngineWeights
from edgespec.backends.ort.contract import CacheType
from edgespec.backends.ort.data_file import (
    AnyWeight,
    DequantizedWeight,
    Int8GemmWeight,
    LowBitWeight,
    PackedWeight,
)
from edgespec.backends.ort.options import EXACT_BLOCK, FLOAT32_TOLERANCE, WeightFormat
from edgespec.backends.ort.quantized_values import QuantizedValues
from edgespec.errors import BuildError
from edgespec.quantization.schemes import EMULATED, SCHEMES, Scheme

# The largest difference between a batch and a sequence alone on an engine whose kernels round
# activations to 8 bits: up to 0.02 was measured; sequences that are mixed up differ by more than
# 0.3.
QUANTIZED_TOLERANCE = 0.1

# The cosine that a quantized engine's outputs must have with the golden ones, by bits. Measured:
# 0.96 and 0.9996 on the demo base, 0.86 and 0.997 on random weights of seven layers, the worst
# case, and 0.79 where the embedding is of 4 bits too. Each weight is proven by itself before.
MIN_COSINE = {4: 0.65, 8: SCHEMES["int8_wo"].min_logits_cosine}
# The same where the export is quantized: the golden outputs have its weights and its static
# roundings of activations, but no dynamic ones. Measured on random weights, the worst case, of 2, 8
# and 24 layers: nvfp4 0.935, 0.803, 0.785; mxfp8 0.991, 0.975, 0.972; fp8_token 0.996, 0.986,
# 0.989; int8_token 0.999, 0.997, 0.997. Static ones: above 0.999. Each rounding is proven by itself
# before.
EXPORTED_COSINE = {"nvfp4": 0.7, "mxfp8": 0.95, "fp8_token": 0.95, "int8_token": 0.98}
STATIC_COSINE = 0.99
# Where layers are recurrent: what they read of their state is normed, however small it is, and so
# is its error. Measured on random weights of 4 and 24 layers: int4 0.54 and 0.48, int8 0.97 and
# more.
RECURRENT_COSINE = {4: 0.3, 8: 0.9}

# Where keys and values are rounded, and weights are not. Measured on random weights of 7 layers,
# with windows and without, and on the demo base: float16 above 0.9999998, int8 above 0.9999.
CACHE_COSINE: dict[CacheType, float] = {"float32": 1.0, "float16": 0.9999, "int8": 0.999}

NOISE = 1e-5  # of each embedding: less than any difference that counts
# Where edges of activations are few, 1e-5 met none on a golden prompt, and another prompt did: of
# FP4's sixteen values, and of a static scale, where one step of one value moved logits by a nat.
NOISE_BY_SCHEME = {"nvfp4": 1e-3, "fp8": 1e-4, "int8_sq": 1e-4, "w4a8_awq": 1e-4}
# Float32, where a state sums up the whole text: it was off by 1.5 to 6 times as much on 137 tokens
# as on the prompt
RECURRENT_MARGIN = RoundingMargin(times=20.0, min_nats=1e-4, noise=0.0)

COMPUTE: dict[type[AnyWeight], str] = {DequantizedWeight: "float32", Int8GemmWeight: "int8"}


@dataclass(frozen=True, slots=True)
class ExportedWeight:
    """A quantized weight of the export, and what it was lowered to."""

    scheme: Scheme
    lowered: AnyWeight

    @property
    def rounds_rows(self) -> bool:
        """Whether activations are rounded, so that one row and one among many may differ."""
        emulated = isinstance(self.lowered, DequantizedWeight)
        return not emulated or self.scheme.activations != "none"

    @property
    def is_emulated(self) -> bool:
        """Whether the CPU has no kernel of the scheme."""
        dynamic = self.scheme.activations.startswith("dynamic")
        emulated = self.scheme.cpu == EMULATED or dynamic
        return emulated and isinstance(self.lowered, DequantizedWeight)

    @property
    def keeps_bits(self) -> bool:
        """Whether a row of the product has the same bits in every call of at least two rows
        (decision 0006)."""
        if isinstance(self.lowered, PackedWeight):
            return True
        if isinstance(self.lowered, LowBitWeight):
            kernel = self.lowered.kernel
            return (kernel.bits, kernel.block, kernel.zero_points) == (4, EXACT_BLOCK, False)
        return isinstance(self.lowered, Int8GemmWeight)


def exported_weights(weights: Sequence[AnyWeight]) -> list[ExportedWeight]:
    """The weights that the export quantized, out of the lowered ones."""
    return [
        ExportedWeight(weight.source.scheme, weight)
        for weight in weights
        if isinstance(weight.source, QuantizedValues)
    ]


def weights_of(
    exported: Sequence[ExportedWeight], weight_format: WeightFormat, export: str
) -> EngineWeights:
    """The format of an engine's weights, quantized here or by the export.

    Raises BundleError where both are asked for; `export` names the directory in the message.
    """
    if not exported:
        return weight_format.weights
    names = scheme_names(exported)
    if weight_format.bits is not None:
        message = (
            f"{export} is quantized already ({names}), and `weights` asks for"
            f" {weight_format.scheme}"
        )
        raise BuildError(message, "Leave `weights` out, or export the unquantized checkpoint.")
    lowered = [weight.lowered for weight in exported]
    blocks = {block for weight in lowered if (block := block_of(weight)) is not None}
    compute = sorted({name for weight in lowered if (name := compute_of(weight)) is not None})
    return EngineWeights(
        scheme=names,
        method=AS_EXPORTED,
        block=blocks.pop() if len(blocks) == 1 and "," not in names else None,
        compute=", ".join(compute) or None,
        emulated=EMULATED if any(weight.is_emulated for weight in exported) else None,
        exact=all(weight.keeps_bits for weight in exported),
    )


def block_of(weight: AnyWeight) -> int | None:
    """How many weights share a scale in a kernel that reads quantized values; None: it has no
    blocks."""
    if isinstance(weight, PackedWeight):
        return weight.layout.block if weight.rounding.in_blocks else None
    return weight.kernel.block if isinstance(weight, LowBitWeight) else None


def compute_of(weight: AnyWeight) -> str | None:
    """The type in which products are computed where it is not that of the scheme: int8 where
    activations of FP4 are rounded to 8 bits."""
    if isinstance(weight, PackedWeight):
        scheme = weight.source.scheme if isinstance(weight.source, QuantizedValues) else None
        rounded = scheme is not None and scheme.activations != "none"
        return "int8" if rounded or not weight.rounding.in_blocks else None
    return COMPUTE.get(type(weight))


def scheme_names(exported: Sequence[ExportedWeight]) -> str:
    """The names of the schemes, sorted, without repeats and separated by commas."""
    return ", ".join(sorted({weight.scheme.name for weight in exported}))


def is_rounded(exported: Sequence[ExportedWeight], weight_format: WeightFormat) -> bool:
    """Whether one row and one among many may differ by what an engine rounds."""
    return weight_format.bits is not None or any(weight.rounds_rows for weight in exported)


def accuracy_of(
    weights: EngineWeights, *, rounded: bool, recurrent: bool, cache: CacheType = "float32"
) -> AccuracySpec:
    """The tolerance, cosine and margin that an engine with these weights and this type of KV cache
    must keep; `rounded`: whether rows differ by what it rounds."""
    if rounded:
        cosine, noise = rounded_cosine(weights, recurrent=recurrent), NOISE
        if weights.method == AS_EXPORTED:
            noise = max(NOISE_BY_SCHEME.get(name, NOISE) for name in weights.scheme.split(", "))
        return quantized_spec(min(cosine, CACHE_COSINE[cache]), noise)
    if cache != "float32":
        return quantized_spec(CACHE_COSINE[cache], NOISE)
    return AccuracySpec(tolerance=FLOAT32_TOLERANCE, margin=RECURRENT_MARGIN if recurrent else None)


def quantized_spec(min_cosine: float, noise: float) -> AccuracySpec:
    """The accuracy of quantized weights.

    Two logits may move apart, so the margin is twice what was measured. A short prompt may have met
    no edge of the activations by chance, so it is a tenth of a nat at least.
    """
    return AccuracySpec(
        tolerance=QUANTIZED_TOLERANCE,
        min_cosine=min_cosine,
        margin=RoundingMargin(times=2.0, min_nats=0.1, noise=noise),
    )


def rounded_cosine(weights: EngineWeights, *, recurrent: bool) -> float:
    """The cosine with the golden outputs that rounded weights must reach over a float32 cache."""
    if weights.method != AS_EXPORTED:
        bits = 4 if weights.scheme.startswith("int4") else 8
        return (RECURRENT_COSINE if recurrent else MIN_COSINE)[bits]
    names = weights.scheme.split(", ")
    lowest = min(EXPORTED_COSINE.get(name, STATIC_COSINE) for name in names)
    if recurrent:
        lowest = min(lowest, RECURRENT_COSINE[4 if "nvfp4" in names else 8])
    return lowest
