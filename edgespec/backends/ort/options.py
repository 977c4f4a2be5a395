"""The options of `edgespec build` that are this backend's own: what becomes of weights and of the
KV cache, and whose kernels read them.

Knows formats and flags. Knows no kernel; it is read for --help, without ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from edgespec.backends.base import BuildOption, BuildOptions, OptionValue
from edgespec.backends.engine_config import (
    AS_EXPORTED,
    FLOAT32,
    GPTQ,
    LEAST_SQUARES,
    RTN,
    EngineWeights,
)
from edgespec.backends.ort.contract import CACHE_TYPES
from edgespec.backends.ort.native.library import BUILD_IT, why_missing
from edgespec.errors import EnvironmentProblem, OptionError
from edgespec.quantization.bit_budget import LARGEST_SIZE
from edgespec.quantization.block_forms import FOUR_BITS

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
SIZES = (5.0, 6.0)  # bits a weight that are proposed where int4 changes too much


@dataclass(frozen=True, slots=True)
class WeightFormat(BuildOptions):
    """What `build` makes of the weights that MatMuls read: float32 as they are, or 4 or 8 bits in
    blocks along in. With `minimums` a block of 4 bits has a minimum beside its scale
    (quantization/super_blocks).

    With `share_embedding` the quantized values of a tied lm_head serve as the embedding as well.
    `kernels` "native": those of our own where there are some, over a KV cache of any of
    CACHE_TYPES.
    """

    scheme: Scheme = FLOAT32
    block: int = DEFAULT_BLOCK  # or PER_CHANNEL
    minimums: bool = field(default=False, kw_only=True)
    size: float | None = field(default=None, kw_only=True)  # bits a weight that may be spent
    calib_data: str | None = field(default=None, kw_only=True)  # a text, for GPTQ
    # Its tokens, or for `size` alone those of the shipped text, in sequences of one length, once a
    # tokenizer has read them
    windows: tuple[tuple[int, ...], ...] | None = field(default=None, kw_only=True)
    share_embedding: bool = True
    kernels: Kernels = ONNX_RUNTIME
    kv_cache_dtype: str = FP32_CACHE

    def __post_init__(self) -> None:
        assert self.block != PER_CHANNEL or self.scheme == "int8"
        assert self.kernels == NATIVE or self.kv_cache_dtype == FP32_CACHE
        assert self.minimums or self.size is None
        assert not self.minimums or (self.scheme, self.block) == ("int4", FOUR_BITS.block)

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
            return EngineWeights(scheme=self.scheme, method=RTN, compute="int8", exact=True)
        exact = self.kernels == NATIVE or (self.scheme, self.block) == ("int4", EXACT_BLOCK)
        method = GPTQ if self.calib_data else LEAST_SQUARES if self.minimums else RTN
        return EngineWeights(scheme=self.scheme, method=method, block=self.block, exact=exact)


FP32 = WeightFormat()

OPTIONS = (
    BuildOption(
        name="weights",
        choices=SCHEMES,
        default=FLOAT32,
        help="What the weights of matrix products become, rounded on this machine.",
    ),
    BuildOption(
        name="weight_block",
        choices=tuple(map(str, BLOCKS)),
        help=(
            "Weights that share a scale: 128 (the default of int8) is faster and smaller, 32 more"
            " accurate. int4 has blocks of 32 with a scale and a minimum by default, and 6 bits in"
            " the lm_head (4.7 to 5.1 bits, by far the most accurate); with 32 or 128, a scale"
            " alone. 0, for int8 only, is one scale per channel with an int8 GEMM: exact and by far"
            " the fastest for many rows, but less accurate where activations have outliers."
        ),
    ),
    BuildOption(
        name="calib_data",
        metavar="FILE|shipped",
        help=(
            "For int4: round the base's weights by GPTQ for this text (or JSONL with messages, text"
            " or turns; shipped: the text that comes with edgespec). More accurate; takes minutes,"
            " and goes on where it was stopped."
        ),
    ),
    BuildOption(
        name="size",
        metavar="BITS",
        help=(
            "Spend so many bits a weight, such as 4.8, where they help most: int4 with some weights"
            " in 6 or 8 bits, as is measured in a few passes over a short text. All weights that"
            " are rounded count, with their scales, the lm_head too (once, where it is the"
            " embedding as well); embeddings of their own, norms and biases do not. A draft keeps"
            " int4."
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
    size = size_of(values.get("size"))
    if size is not None and scheme == FLOAT32:
        scheme = "int4"
    share = values.get("share_embedding", True)
    if scheme == FLOAT32 and block:
        message = "`weight_block` means nothing with `weights` fp32"
        raise OptionError(message, "Leave it out, or choose `weights` int8 or int4.")
    if scheme != "int8" and block == str(PER_CHANNEL):
        message = f"`weight_block` {PER_CHANNEL} is for `weights` int8"
        raise OptionError(message, "Choose a block of 32 or 128, or `weights` int8.")
    cache = str(values.get("kv_cache_dtype") or FP32_CACHE)
    kernels = chosen_kernels(values.get("kernels"), cache)
    minimums = scheme == "int4" and block is None and kernels == NATIVE
    calib_data = values.get("calib_data")
    if calib_data and not minimums:
        message = "`calib_data` is for `weights` int4 without `weight_block`"
        raise OptionError(message, "Leave it out, or choose these, on the native kernels.")
    if size is not None and not minimums:
        message = "`size` is for `weights` int4 without `weight_block`"
        raise OptionError(message, "Leave it out, or choose these, on the native kernels.")
    width = int(str(block)) if block else FOUR_BITS.block if minimums else DEFAULT_BLOCK
    return WeightFormat(
        cast(Scheme, scheme),
        width,
        minimums=minimums,
        size=size,
        calib_data=None if calib_data is None else str(calib_data),
        share_embedding=share is not False,
        kernels=kernels,
        kv_cache_dtype=cache,
    )


def size_of(asked: OptionValue) -> float | None:
    """The bits a weight that are asked for. OptionError for what is no number of them, or none that
    the formats reach."""
    if asked is None:
        return None
    least, most = FOUR_BITS.bits_per_weight, LARGEST_SIZE
    try:
        size = float(str(asked))
    except ValueError:
        size = 0.0
    if not least <= size <= most:
        message = f"`size` {asked} is no number of bits from {least} to {most:g}"
        raise OptionError(message, "Choose one of these, or `weights` int8 for more.")
    return size


def better_weights(weights: EngineWeights) -> str | None:
    """The options for weights that are rounded less; None for weights that are as exported."""
    if weights.method == AS_EXPORTED or weights.scheme not in BITS:
        return None
    if weights.scheme == "int4" and weights.method == RTN:
        return "`weights` int4 without `weight_block`"
    larger = next((size for size in SIZES if size > (weights.bits or 0) + 0.1), None)
    if weights.scheme == "int4" and larger is not None:
        return f"`size` {larger:g}"
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
