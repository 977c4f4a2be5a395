"""The table of quantization schemes: what a weight is made of, what its activations become, and who
runs it.

Knows ModelOpt's names for each and its limits. Knows no bytes: how a scheme stands in a file is for
checkpoint/layouts, and hub layouts such as AWQ and GPTQ are layouts of a scheme that is here
(int4_wo), not schemes of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from edgespec.errors import UnsupportedModel

WeightType = Literal[
    "float32", "float16", "bfloat16", "int4", "int8", "float8_e4m3fn", "float4_e2m1fn"
]  # ml_dtypes'
Scaling = Literal[
    "none", "tensor", "channel", "block", "square"
]  # what shares a scale; block: along in, square: 2-D
Activations = Literal["none", "static tensor", "dynamic block", "dynamic token"]

EMULATED = "emulated: correctness only"  # as the CPU engine says it


@dataclass(frozen=True, slots=True)
class Scheme:
    """One row. `block` is the usual one; a checkpoint with another (AWQ of 64, say) has it in its
    own layout.

    `min_logits_cosine` and `max_weight_error` (relative, root of mean squares, per Linear, where
    smoothing has been divided out) are where a result counts as broken. Random weights, which are
    the worst case, were measured at 0.996 / 0.026 (fp8), 0.959 / 0.118 (int4_awq), 0.946 / 0.095
    (nvfp4), 0.996 / 0.027 (mxfp8) and 0.9996 / 0.013 (int8_sq).
    """

    name: str  # on our command line
    what: str  # one line for --help
    weight: WeightType
    bits: int  # of one stored weight, without its scales
    scaling: Scaling
    # weights along in (for square: along out as well) that share a scale; 1 where not blocked
    block: int = 1
    activations: Activations = "none"
    pre_quant_scale: bool = False  # whether activations may be multiplied by a vector [in] first
    out_multiple: int = 1  # `out` must be a multiple of it: two rows may share a byte
    made: bool = False  # by `quantize`; the others are read only
    preset: str = ""  # ModelOpt's configuration
    passes: tuple[int, ...] = (
        1,
    )  # ModelOpt's passes over the calibration data, by what one costs beside the first
    algos: tuple[str, ...] = ()  # quant_algo as ModelOpt writes it
    min_sm: int = 0  # the first compute capability where TensorRT runs it as such
    cpu: str = "float32"  # how the CPU engine runs it
    min_logits_cosine: float = 0.0
    max_weight_error: float = 0.0

    @property
    def quantized(self) -> bool:
        return self.scaling != "none"

    @property
    def in_multiple(self) -> int:
        """`in` must be a multiple of it; squares may be cut off at the edge."""
        return self.block if self.scaling == "block" else 1

    def runs_on(self, target: str) -> bool:
        """Whether TensorRT runs it as such on a target of TARGETS."""
        return TARGETS[target] >= self.min_sm


TARGETS = {"orin": 87, "thor": 110, "spark": 121}  # compute capability times ten

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
        min_sm=75,
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
        min_sm=75,
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
        min_sm=75,
        cpu=EMULATED,
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
)

SCHEMES = {row.name: row for row in _ROWS}
MADE = tuple(row.name for row in _ROWS if row.made)  # what --quantization offers


def scheme(name: str) -> Scheme:
    """The scheme of that name on our command line. Raises UnsupportedModel with the nearest
    name."""
    if name not in SCHEMES:
        raise UnsupportedModel(f"there is no quantization scheme {name!r}.", _offer(name, SCHEMES))
    return SCHEMES[name]


def scheme_to_make(name: str) -> Scheme:
    """A scheme that `quantize` makes. Raises UnsupportedModel for others."""
    found = SCHEMES.get(name)
    if found is None or not found.made:
        known = "is read but not made here" if found else "is not a quantization scheme"
        raise UnsupportedModel(f"{name!r} {known}.", _offer(name, MADE))
    return found


def scheme_of_algo(algo: str, where: str) -> Scheme:
    """The scheme that ModelOpt calls `algo`, in either case; `where` names the file (and layer) in
    the error."""
    for row in _ROWS:
        if algo.lower() in (known.lower() for known in row.algos):
            return row
    known = [name for row in _ROWS for name in row.algos]
    raise UnsupportedModel(
        f"{where}: quantized with {algo!r}, which this version does not read.", _offer(algo, known)
    )


def check_shape(scheme: Scheme, shape: tuple[int, int], layer: str) -> None:
    """Whether a Linear of `shape` [out, in] can have the scheme. Raises UnsupportedModel that names
    the layer."""
    out_features, in_features = shape
    for size, multiple, side in (
        (in_features, scheme.in_multiple, "inputs"),
        (out_features, scheme.out_multiple, "outputs"),
    ):
        if size % multiple:
            raise UnsupportedModel(
                f"{layer} has {size} {side}; {scheme.name} needs a multiple of {multiple}.",
                f"Leave {layer} out of the quantization, or take another scheme.",
            )


def check_target(scheme: Scheme, target: str) -> None:
    """Whether TensorRT runs the scheme on `target`. Raises UnsupportedModel with the schemes that
    it does run."""
    if target not in TARGETS:
        raise UnsupportedModel(f"there is no target {target!r}.", _offer(target, TARGETS))
    if not scheme.runs_on(target):
        others = [name for name in MADE if SCHEMES[name].runs_on(target)]
        raise UnsupportedModel(
            f"{scheme.name} needs compute capability {scheme.min_sm / 10}; {target} has"
            f" {TARGETS[target] / 10}.",
            f"Take one of {', '.join(others)} for it.",
        )


def _offer(name: str, names: Iterable[str]) -> str:
    names = list(names)
    lowered = {known.lower().replace("-", "_"): known for known in names}
    near = get_close_matches(name.lower().replace("-", "_"), lowered, n=1)
    meant = f"Did you mean {lowered[near[0]]}? " if near else ""
    return f"{meant}Known: {', '.join(names)}."
