"""The table of quantization schemes: weights, scales, activations, and the devices that run them.

Knows ModelOpt's name and the error limits of each scheme. Knows no bytes: checkpoint/layouts reads
files. Hub formats such as AWQ and GPTQ are layouts of the scheme int4_wo, not schemes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from edgespec.errors import UnsupportedModel

# Names of ml_dtypes
WeightType = Literal[
    "float32",
    "float16",
    "bfloat16",
    "int4",
    "uint4",
    "int8",
    "uint8",
    "float8_e4m3fn",
    "float4_e2m1fn",
]
# The weights that share a scale; block: along in, square: along in and out
Scaling = Literal["none", "tensor", "channel", "block", "square"]
Activations = Literal["none", "static tensor", "dynamic block", "dynamic token"]

EMULATED = "emulated: correctness only"  # the CPU engine's words
PACKED = "LowBitMatMul"  # our own kernel; without it float32


@dataclass(frozen=True, slots=True)
class Scheme:
    """One quantization scheme. `block` is the default; a checkpoint's settings may state another.

    A result worse than `min_logits_cosine` or `max_weight_error` (relative RMS error per Linear,
    with smoothing divided out) is broken. Random weights, the worst case, were measured at
    0.996 / 0.026 (fp8), 0.959 / 0.118 (int4_awq), 0.946 / 0.095 (nvfp4), 0.996 / 0.027 (mxfp8) and
    0.9996 / 0.013 (int8_sq).
    """

    name: str  # on our command line
    description: str  # one line for --help
    weight: WeightType  # in the graph; int4_wo and int8_wo with zero points: unsigned
    bits: int  # of one stored weight, without its scales
    scaling: Scaling
    block: int = 1  # weights along in (square: along out too) that share a scale; 1: no blocks
    activations: Activations = "none"
    signed_scales: bool = False  # whether scales may be negative or zero
    pre_quant_scale: bool = False  # whether activations may first be multiplied by a vector [in]
    out_multiple: int = 1  # `out` must be a multiple of it: two rows may share a byte
    made: bool = False  # whether `quantize` makes it; the others are read only
    preset: str = ""  # ModelOpt's configuration
    # ModelOpt's passes over the calibration data, each by its cost relative to the first
    passes: tuple[int, ...] = (1,)
    algos: tuple[str, ...] = ()  # quant_algo as ModelOpt writes it
    min_sm: int = 0  # the first compute capability (times ten) with native support in TensorRT
    cpu: str = "float32"  # how the CPU engine runs it
    min_logits_cosine: float = 0.0
    max_weight_error: float = 0.0

    @property
    def quantized(self) -> bool:
        """Whether weights have scales."""
        return self.scaling != "none"

    @property
    def in_multiple(self) -> int:
        """`in` must be a multiple of it; squares may be partial at the edge."""
        return self.block if self.scaling == "block" else 1

    def runs_on(self, target: str) -> bool:
        """Returns whether TensorRT runs the scheme natively on a target of TARGETS."""
        return TARGETS[target] >= self.min_sm


TARGETS = {"orin": 87, "thor": 110, "spark": 121}  # compute capability times ten

_GGUF: tuple[tuple[str, WeightType, int, int], ...] = (
    ("q4_0", "int4", 4, 32),
    ("q4_1", "uint4", 4, 32),
    ("q5_0", "int8", 5, 32),
    ("q5_1", "uint8", 5, 32),
    ("q8_0", "int8", 8, 32),
    ("q4_k", "uint4", 4, 32),
    ("q5_k", "uint8", 5, 32),
    ("q6_k", "int8", 6, 16),
    ("iq4_nl", "int8", 4, 32),
    ("iq4_xs", "int8", 4, 32),
    ("mxfp4", "float4_e2m1fn", 4, 32),
)

_ROWS = (
    Scheme("fp32", "float32, unquantized", "float32", 32, "none"),
    Scheme("fp16", "float16, unquantized", "float16", 16, "none"),
    Scheme("bf16", "bfloat16, unquantized", "bfloat16", 16, "none", min_sm=80),
    Scheme(
        "fp8",
        "FP8 weights and activations, a scale per tensor",
        "float8_e4m3fn",
        8,
        "tensor",
        activations="static tensor",
        made=True,
        preset="FP8_DEFAULT_CFG",
        algos=("FP8",),
        min_sm=89,
        cpu=EMULATED,
        min_logits_cosine=0.98,
        max_weight_error=0.04,
    ),
    Scheme(
        "int4_awq",
        "INT4 weights in blocks of 128, activation-aware",
        "int4",
        4,
        "block",
        128,
        pre_quant_scale=True,
        out_multiple=2,
        made=True,
        preset="INT4_AWQ_CFG",
        passes=(1, 4),
        algos=("W4A16_AWQ",),
        min_sm=80,
        cpu="MatMulNBits int4",
        min_logits_cosine=0.85,
        max_weight_error=0.20,
    ),
    Scheme(
        "int8_sq",
        "INT8 weights and activations with SmoothQuant, a scale per channel",
        "int8",
        8,
        "channel",
        activations="static tensor",
        pre_quant_scale=True,
        made=True,
        preset="INT8_SMOOTHQUANT_CFG",
        algos=("W8A8_SQ_PER_CHANNEL",),
        min_sm=75,
        cpu="MatMulInteger int8",
        min_logits_cosine=0.98,
        max_weight_error=0.04,
    ),
    Scheme(
        "nvfp4",
        "FP4 weights and activations in blocks of 16, FP8 scales",
        "float4_e2m1fn",
        4,
        "block",
        16,
        activations="dynamic block",
        made=True,
        preset="NVFP4_DEFAULT_CFG",
        algos=("NVFP4",),
        min_sm=100,
        cpu=EMULATED,
        min_logits_cosine=0.90,
        max_weight_error=0.15,
    ),
    Scheme(
        "mxfp8",
        "FP8 weights and activations in blocks of 32, power-of-two scales",
        "float8_e4m3fn",
        8,
        "block",
        32,
        activations="dynamic block",
        made=True,
        preset="MXFP8_DEFAULT_CFG",
        algos=("MXFP8",),
        min_sm=100,
        cpu=EMULATED,
        min_logits_cosine=0.98,
        max_weight_error=0.04,
    ),
    # Read only
    Scheme(
        "int4_wo",
        "INT4 weights in blocks: AWQ, GPTQ and compressed-tensors of the hub",
        "int4",
        4,
        "block",
        128,
        min_sm=80,
        cpu="MatMulNBits int4",
        min_logits_cosine=0.92,
        max_weight_error=0.20,
    ),
    Scheme(
        "int8_wo",
        "INT8 weights, a scale per channel or block",
        "int8",
        8,
        "channel",
        preset="INT8_WEIGHT_ONLY_CFG",
        algos=("W8A16",),
        min_sm=75,
        cpu="MatMulNBits int8",
        min_logits_cosine=0.98,
        max_weight_error=0.04,
    ),
    Scheme(
        "w4a8_awq",
        "INT4 weights in blocks of 128, FP8 activations",
        "int4",
        4,
        "block",
        128,
        activations="static tensor",
        pre_quant_scale=True,
        out_multiple=2,
        preset="W4A8_AWQ_BETA_CFG",
        algos=("W4A8_AWQ",),
        min_sm=89,
        cpu=EMULATED,
        min_logits_cosine=0.92,
        max_weight_error=0.20,
    ),
    Scheme(
        "w4a16_nvfp4",
        "FP4 weights in blocks of 16, FP8 scales",
        "float4_e2m1fn",
        4,
        "block",
        16,
        preset="W4A16_NVFP4_CFG",
        algos=("W4A16_NVFP4",),
        min_sm=100,
        cpu=PACKED,
        min_logits_cosine=0.90,
        max_weight_error=0.15,
    ),
    Scheme(
        "fp8_block",
        "FP8 weights, a scale per square of 128 by 128",
        "float8_e4m3fn",
        8,
        "square",
        128,
        preset="FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
        algos=("fp8_pb_wo",),
        min_sm=89,
        cpu=EMULATED,
        min_logits_cosine=0.98,
        max_weight_error=0.04,
    ),
    Scheme(
        "fp8_token",
        "FP8 weights a scale per channel, and per token of the activations",
        "float8_e4m3fn",
        8,
        "channel",
        activations="dynamic token",
        algos=("FP8_PER_CHANNEL_PER_TOKEN",),
        min_sm=89,
        cpu=EMULATED,
        min_logits_cosine=0.98,
        max_weight_error=0.04,
    ),
    Scheme(
        "int8_token",
        "INT8 weights a scale per channel, and per token of the activations",
        "int8",
        8,
        "channel",
        activations="dynamic token",
        min_sm=75,
        cpu="MatMulInteger int8",
        min_logits_cosine=0.98,
        max_weight_error=0.04,
    ),
    # llama.cpp's types in GGUF files
    *(
        Scheme(
            name,
            f"llama.cpp's {name.upper()}",
            weight,
            bits,
            "block",
            block,
            signed_scales=True,
            cpu=PACKED,
            min_logits_cosine=0.92 if bits == 4 else 0.98,
            max_weight_error=0.20 if bits == 4 else 0.08,
        )
        for name, weight, bits, block in _GGUF
    ),
)

SCHEMES = {row.name: row for row in _ROWS}
MADE = tuple(row.name for row in _ROWS if row.made)  # what --quantization offers


def scheme(name: str) -> Scheme:
    """Returns the scheme called `name`. Raises UnsupportedModel with the nearest name."""
    if name not in SCHEMES:
        raise UnsupportedModel(
            f"there is no quantization scheme {name!r}.", _suggestion(name, SCHEMES)
        )
    return SCHEMES[name]


def scheme_to_make(name: str) -> Scheme:
    """Returns a scheme that `quantize` can make. Raises UnsupportedModel for other names."""
    scheme = SCHEMES.get(name)
    if scheme is None or not scheme.made:
        known = "is read but not made here" if scheme else "is not a quantization scheme"
        raise UnsupportedModel(f"{name!r} {known}.", _suggestion(name, MADE))
    return scheme


def scheme_of_algo(algo: str, where: str) -> Scheme:
    """Returns the scheme that ModelOpt calls `algo`, in upper or lower case.

    Raises UnsupportedModel for other names; `where` names the file and layer in the message.
    """
    for row in _ROWS:
        if algo.lower() in (known.lower() for known in row.algos):
            return row
    known = [name for row in _ROWS for name in row.algos]
    raise UnsupportedModel(
        f"{where}: quantized with {algo!r}, which this version does not read.",
        _suggestion(algo, known),
    )


def check_shape(scheme: Scheme, shape: tuple[int, int], layer: str) -> None:
    """Raises UnsupportedModel that names the layer if `shape` [out, in] cannot have the scheme."""
    out_features, in_features = shape
    for size, multiple, side in (
        (in_features, scheme.in_multiple, "inputs"),
        (out_features, scheme.out_multiple, "outputs"),
    ):
        if size % multiple:
            raise UnsupportedModel(
                f"{layer} has {size} {side}; {scheme.name} needs a multiple of {multiple}.",
                f"Exclude {layer} from the quantization, or use another scheme.",
            )


def check_target(scheme: Scheme, target: str) -> None:
    """Raises UnsupportedModel if TensorRT does not run the scheme on `target`, with those it runs.

    Also raises UnsupportedModel for an unknown target.
    """
    if target not in TARGETS:
        raise UnsupportedModel(f"there is no target {target!r}.", _suggestion(target, TARGETS))
    if not scheme.runs_on(target):
        others = [name for name in MADE if SCHEMES[name].runs_on(target)]
        raise UnsupportedModel(
            f"{scheme.name} needs compute capability {scheme.min_sm / 10}; {target} has"
            f" {TARGETS[target] / 10}.",
            f"Use one of {', '.join(others)} for it.",
        )


def _suggestion(name: str, names: Iterable[str]) -> str:
    names = list(names)
    lowered = {known.lower().replace("-", "_"): known for known in names}
    near = get_close_matches(name.lower().replace("-", "_"), lowered, n=1)
    meant = f"Did you mean {lowered[near[0]]}? " if near else ""
    return f"{meant}Known: {', '.join(names)}."
