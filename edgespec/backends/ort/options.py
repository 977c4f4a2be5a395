"""The options of `edgespec build` that are this backend's own: what becomes of weights and of the
KV cache, and whose kernels read them.

Knows formats and flags. Knows no kernel; it is read for --help, without ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from edgespec.backends.base import BuildOption, BuildOptions, OptionValue
from edgespec.backends.engine_config import AS_EXPORTED, FLOAT32, EngineWeights
from edgespec.backends.ort.contract import CACHE_TYPES
from edgespec.backends.ort.native.library import BUILD_IT, why_missing
from edgespec.errors import EnvironmentProblem, OptionError

Scheme = Literal["fp32", "int4", "int8"]
SCHEMES: tuple[Scheme, ...] = ("fp32", "int8", "int4")
BITS: dict[str, Literal[4, 8]] = {"int4": 4, "int8": 8}
Kernels = Literal["native", "onnxruntime"]
KERNELS: tuple[Kernels, ...] = get_args(Kernels)
NATIVE, ONNX_RUNTIME = KERNELS
FP32_CACHE = "fp32"
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
    `kernels` "native": those of our own where there are some, over a KV cache of any of
    CACHE_TYPES.
    """

    scheme: Scheme = FLOAT32
    block: int = DEFAULT_BLOCK  # or PER_CHANNEL
    share_embedding: bool = True
    kernels: Kernels = ONNX_RUNTIME
    kv_cache_dtype: str = FP32_CACHE

    def __post_init__(self) -> None:
        assert self.block != PER_CHANNEL or self.scheme == "int8"
        assert self.kernels == NATIVE or self.kv_cache_dtype == FP32_CACHE

    @property
    def bits(self) -> Literal[4, 8] | None:
        """The bits of a quantized value; None for float32."""
        return BITS.get(self.scheme)

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
        name="weights",
        choices=SCHEMES,
        default=FLOAT32,
        help="What the weights of matrix products become, rounded to nearest on this machine.",
    ),
    BuildOption(
        name="weight_block",
        choices=tuple(map(str, BLOCKS)),
        help=(
            "Weights that share a scale: 128 (the default) is faster and smaller, 32 is more"
            " accurate, and exact in int4. 0, for int8 only, is one scale per channel with an int8"
            " GEMM: exact and by far the fastest for many rows, but less accurate where activations"
            " have outliers."
        ),
    ),
    BuildOption(
        name="share_embedding",
        default=True,
        help=(
            "With int8 or int4 in blocks, use the weights of a tied lm_head as the embedding too,"
            " instead of a separate file."
        ),
    ),
    BuildOption(
        name="kernels",
        choices=KERNELS,
        help=(
            "Whose kernels the engine runs on: native, edgespec's own, which give a row the same"
            " bits in every call (the default where they were compiled), or ONNX Runtime's."
        ),
    ),
    BuildOption(
        name="kv_cache_dtype",
        choices=tuple(CACHE_TYPES),
        default=FP32_CACHE,
        help=(
            "The type of keys and values in the cache: fp16 and int8 (a scale per token and head)"
            " take less memory and are read sooner, but are rounded. For `kernels` native."
        ),
    ),
)


def parse_options(values: Mapping[str, OptionValue]) -> WeightFormat:
    """The weight format that the options ask for; OptionError where they contradict each other."""
    scheme, block = values.get("weights") or FLOAT32, values.get("weight_block")
    share = values.get("share_embedding", True)
    if scheme == FLOAT32 and block:
        message = "`weight_block` means nothing with `weights` fp32"
        raise OptionError(message, "Leave it out, or choose `weights` int8 or int4.")
    if scheme != "int8" and block == str(PER_CHANNEL):
        message = f"`weight_block` {PER_CHANNEL} is for `weights` int8"
        raise OptionError(message, "Choose a block of 32 or 128, or `weights` int8.")
    size = DEFAULT_BLOCK if block is None else int(str(block))
    cache = str(values.get("kv_cache_dtype") or FP32_CACHE)
    return WeightFormat(
        cast(Scheme, scheme),
        size,
        share_embedding=share is not False,
        kernels=chosen_kernels(values.get("kernels"), cache),
        kv_cache_dtype=cache,
    )


def better_weights(weights: EngineWeights) -> str | None:
    """The options for weights that are rounded less; None for weights that are as exported."""
    if weights.method == AS_EXPORTED or weights.scheme not in BITS:
        return None
    if weights.scheme == "int4" and weights.block != EXACT_BLOCK:
        return f"`weight_block` {EXACT_BLOCK}"
    return f"`weights` {SCHEMES[SCHEMES.index(cast(Scheme, weights.scheme)) - 1]}"


def chosen_kernels(asked: OptionValue, cache: str) -> Kernels:
    """The kernels that are asked for, or those of our own where there are some. OptionError where
    they do not know the type of the cache, EnvironmentProblem where ours are asked for and were not
    compiled."""
    missing = why_missing()
    if asked == NATIVE and missing:
        raise EnvironmentProblem(missing, f"{BUILD_IT} Or leave `kernels` native out.")
    kernels = asked or (ONNX_RUNTIME if missing else NATIVE)
    if kernels != NATIVE and cache != FP32_CACHE:
        message = f"`kv_cache_dtype` {cache} is for `kernels` native"
        why = f", and {missing}" if missing and asked is None else ""
        raise OptionError(
            f"{message}{why}", "Leave `kv_cache_dtype` out, or use the native kernels."
        )
    return cast(Kernels, kernels)
