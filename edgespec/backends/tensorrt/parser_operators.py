"""The operators that TensorRT's ONNX parser imports: since when, and with which data types.

The facts are those of `docs/operators.md` in onnx-tensorrt, at the commits that the releases 10.14,
10.15 and 11.1 pin. Names of operators and types alone; no ONNX library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

Line = tuple[int, int]
FIRST: Line = (10, 13)

_FLOATS = frozenset(("FLOAT", "FLOAT16", "BFLOAT16"))
_NUMBERS = _FLOATS | {"INT32", "INT64"}
_ALL = _NUMBERS | {"BOOL"}
_BOOL = frozenset(("BOOL",))
_QUANTIZED = frozenset(("INT8", "INT4", "FLOAT8E4M3FN", "FLOAT4E2M1"))


@dataclass(frozen=True, slots=True)
class Imported:
    """An operator that is imported: `types` of its data input `data`, since the release line
    `since`."""

    types: frozenset[str]
    since: Line = FIRST
    data: int = 0


def _rows(
    types: frozenset[str], names: str, since: Line = FIRST, data: int = 0
) -> dict[str, Imported]:
    return dict.fromkeys(names.split(), Imported(types, since, data))


OPERATORS: Mapping[str, Imported] = MappingProxyType(
    {
        **_rows(
            _FLOATS,
            """Acos Acosh Asin Asinh Atan Atanh AveragePool BatchNormalization Ceil Celu Clip Conv
            ConvTranspose Cos Cosh CumSum Dropout Einsum Elu Erf Exp Floor Gemm GlobalAveragePool
            GlobalLpPool GlobalMaxPool GroupNormalization GRU HardSigmoid HardSwish Hardmax
            ImageScaler InstanceNormalization IsInf LayerNormalization LeakyRelu Log LogSoftmax LRN
            LSTM LpNormalization LpPool MatMul MaxPool MeanVarianceNormalization ParametricSoftplus
            PRelu QuantizeLinear RandomNormal RandomNormalLike RandomUniform RandomUniformLike
            Reciprocal Resize RNN Round ScaledTanh Scan Selu Sigmoid Sin Sinh Softmax Softplus
            Softsign Sqrt Tan Tanh ThresholdedRelu Upsample""",
        ),
        **_rows(
            frozenset(("FLOAT", "FLOAT16")),
            "DeformConv GridSample Mish NonMaxSuppression NonZero RoiAlign",
        ),
        **_rows(frozenset(("FLOAT",)), "STFT"),
        **_rows(
            _NUMBERS,
            """Abs Add ArgMax ArgMin DepthToSpace Div Equal Greater GreaterOrEqual IsNaN Less
            LessOrEqual Max Mean Min Mod Mul Neg Pad Pow Range ReduceL1 ReduceL2 ReduceLogSum
            ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu
            Scatter ScatterElements ScatterND Shrink Sign SpaceToDepth Sub Sum TopK""",
        ),
        **_rows(_NUMBERS | {"INT8"}, "Gelu"),
        **_rows(
            _ALL,
            """Expand EyeLike Flatten Gather GatherElements GatherND Identity OneHot Reshape
            ReverseSequence Shape Size Slice Split Squeeze Tile Transpose Trilu Unsqueeze Concat""",
        ),
        **_rows(_ALL, "Where", data=1),
        **_rows(_ALL | {"UINT8"}, "Cast CastLike"),
        **_rows(_BOOL, "And Not Or Xor If"),
        **_rows(frozenset(("INT32", "INT64")), "BlackmanWindow HammingWindow HannWindow"),
        **_rows(frozenset(("INT64",)), "Loop ConstantOfShape"),
        **_rows(frozenset(), "Constant"),
        **_rows(_QUANTIZED, "DequantizeLinear"),
        **_rows(_FLOATS | {"INT8", "FLOAT8E4M3FN"}, "Attention", (10, 14)),
        **_rows(_FLOATS, "RMSNormalization RotaryEmbedding", (10, 15)),
        **_rows(frozenset(), "TensorScatter", (10, 15)),  # its types: rule cache-type
        **_rows(_FLOATS, "Swish", (11, 0)),
    }
)

# Operators of TensorRT's own, of the domain `trt`: those that a lowering may write
CUSTOM_DOMAIN = "trt"
CUSTOM_OPERATORS: Mapping[str, Imported] = MappingProxyType(
    {
        **_rows(_FLOATS, "TRT_FP4DynamicQuantize TRT_MXFP8DynamicQuantize"),
        **_rows(frozenset(("FLOAT8E4M3FN",)), "TRT_MXFP8DequantizeLinear TRT_FP8DequantizeLinear"),
        **_rows(_FLOATS, "TRT_FP8QuantizeLinear TRT_INT4QuantizeLinear"),
        **_rows(frozenset(("INT4",)), "TRT_INT4DequantizeLinear"),
    }
)
# How many inputs each has at least: values and scales, or what is quantized alone
CUSTOM_INPUTS: Mapping[str, int] = MappingProxyType(
    {name: 1 if name == "TRT_MXFP8DynamicQuantize" else 2 for name in CUSTOM_OPERATORS}
)
CUSTOM_ATTRIBUTES: Mapping[str, frozenset[str]] = MappingProxyType(
    dict.fromkeys(CUSTOM_OPERATORS, frozenset(("axis", "block_size", "output_dtype")))
    | {"TRT_FP4DynamicQuantize": frozenset(("axis", "block_size", "scale_type"))}
)
# Attributes that the parser reads and the standard does not have
PRIVATE_ATTRIBUTES: Mapping[str, frozenset[str]] = MappingProxyType(
    {"Attention": frozenset(("TRT_decomposable", "TRT_normalization_op"))}
)

# Operators whose second input must be known when the engine is built
CONSTANT_INPUT = frozenset(
    (
        *("CumSum", "OneHot", "Squeeze", "Unsqueeze", "ReduceL1", "ReduceL2"),
        *("ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"),
        *("ReduceProd", "ReduceSum", "ReduceSumSquare"),
    )
)
# Operators of which only the first output is imported
ONE_OUTPUT = frozenset(("BatchNormalization", "LayerNormalization", "MaxPool"))

CAST_TYPES = _ALL | {"UINT8"}
QUANTIZED_TYPES = _QUANTIZED
FLOAT_TYPES = _FLOATS
INITIALIZER_TYPES = _ALL | _QUANTIZED | {"DOUBLE", "UINT8"}
