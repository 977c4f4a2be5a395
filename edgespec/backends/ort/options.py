"""The options of `edgespec build` that are this backend's own: what becomes of weights.

Knows formats and flags. Knows no kernel; it is read for --help, without ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from edgespec.backends.base import BuildOption, BuildOptions, OptionValue
from edgespec.backends.engine_config import AS_EXPORTED, FLOAT32, EngineWeights
from edgespec.errors import OptionError

Scheme = Literal["fp32", "int4", "int8"]
SCHEMES: tuple[Scheme, ...] = ("fp32", "int8", "int4")
Kernels = Literal["native", "onnxruntime"]
KERNELS: tuple[Kernels, ...] = get_args(Kernels)
NATIVE, ONNX_RUNTIME = KERNELS
# the widest block of 4 bits whose kernel gives a row the same bits whatever stands beside it
EXACT_BLOCK = 32
# int8: a scale per row of activations and per channel of the weight, multiplied by an int8 GEMM
PER_CHANNEL = 0
DEFAULT_BLOCK = 128
# Largest difference from the golden outputs, relative to their largest value. Sums in float32 in
# another order differ by about 1e-6 here; a wrong mask, layout or weight by more than 1e-2.
FLOAT32_TOLERANCE = 1e-4
BLOCKS = (PER_CHANNEL, EXACT_BLOCK, DEFAULT_BLOCK)


@dataclass(frozen=True, slots=True)
class WeightFormat(BuildOptions):
    """What `build` makes of the weights that MatMuls read: float32 as they are, or 4 or 8 bits in
    blocks along in.

    With `share_embedding` the quantized values of a tied lm_head serve as the embedding as well.
    """

    scheme: Scheme = FLOAT32
    block: int = DEFAULT_BLOCK  # or PER_CHANNEL
    share_embedding: bool = True
    kernels: Kernels = ONNX_RUNTIME

    def __post_init__(self) -> None:
        assert self.block != PER_CHANNEL or self.scheme == "int8"

    @property
    def bits(self) -> Literal[4, 8] | None:
        """The bits of a quantized value; None for float32."""
        bits: dict[str, Literal[4, 8]] = {"int4": 4, "int8": 8}
        return bits.get(self.scheme)

    @property
    def is_int8_gemm(self) -> bool:
        """Whether activations are quantized too, and products are an int8 GEMM."""
        return self.block == PER_CHANNEL

    @property
    def weights(self) -> EngineWeights:
        """The weights in the form of an engine's config."""
        if self.bits is None:
            return EngineWeights(scheme=self.scheme, method=AS_EXPORTED, exact=True)
        if self.is_int8_gemm:
            return EngineWeights(scheme=self.scheme, method="rtn", compute="int8", exact=True)
        exact = self.kernels == NATIVE or (self.scheme, self.block) == ("int4", EXACT_BLOCK)
        return EngineWeights(scheme=self.scheme, method="rtn", block=self.block, exact=exact)


FP32 = WeightFormat()

OPTIONS = (
    BuildOption(
        flag="--weights",
        choices=SCHEMES,
        default=FLOAT32,
        help="What the weights of matrix products become, rounded to nearest on this machine.",
    ),
    BuildOption(
        flag="--weight-block",
        choices=tuple(map(str, BLOCKS)),
        help=(
            "Weights that share a scale: 128 (the default) is faster and smaller, 32 is more"
            " accurate, and exact in int4. 0, for int8 only, is one scale per channel with an int8"
            " GEMM: exact and by far the fastest for many rows, but less accurate where activations"
            " have outliers."
        ),
    ),
    BuildOption(
        flag="--share-embedding",
        default=True,
        help=(
            "With int8 or int4 in blocks, use the weights of a tied lm_head as the embedding too,"
            " instead of a separate file."
        ),
    ),
)


def parse_options(values: Mapping[str, OptionValue]) -> WeightFormat:
    """The weight format that the options ask for; OptionError where they contradict each other."""
    scheme, block = values.get("weights") or FLOAT32, values.get("weight_block")
    share = values.get("share_embedding", True)
    if scheme == FLOAT32 and block:
        what = "--weight-block means nothing with --weights fp32"
        raise OptionError(what, "Leave it out, or choose --weights int8 or int4.")
    if scheme != "int8" and block == str(PER_CHANNEL):
        what = f"--weight-block {PER_CHANNEL} is for --weights int8"
        raise OptionError(what, "Choose a block of 32 or 128, or --weights int8.")
    size = DEFAULT_BLOCK if block is None else int(str(block))
    return WeightFormat(cast(Scheme, scheme), size, share_embedding=share is not False)
