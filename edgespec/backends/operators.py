"""The operators of canonical graphs, with the attributes that the exporter writes and their bounds.

`build` refuses every other operator, attribute and value: an export is data, and must not make a
machine loop for ever or allocate without end. Knows names and numbers. Knows no ONNX library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# What the numbers of ONNX's tensor types mean: those that an export may store
TENSOR_TYPES: Mapping[int, str] = MappingProxyType(
    {
        1: "float32",
        3: "int8",
        6: "int32",
        7: "int64",
        9: "bool",
        10: "float16",
        16: "bfloat16",
        17: "float8_e4m3fn",
        22: "int4",
        23: "float4_e2m1fn",
        24: "float8_e8m0fnu",
    }
)

MAX_NODES = 2**20
MAX_INLINE_BYTES = 2**20  # of a constant that is stored in the graph itself
MAX_INTEGERS = 64  # elements of an integer constant: sizes, axes and bounds
MAX_INTEGER = 2**24
MAX_RANK = 6


@dataclass(frozen=True, slots=True)
class Int:
    """An integer from `low` to `high`."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Ints:
    """Up to MAX_RANK integers from `low` to `high`."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Float:
    """A number from `low` to `high`."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Text:
    """One of these words."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Subgraph:
    """A graph of nodes of the operators `of`; empty: of any that has no subgraph itself."""

    of: tuple[str, ...] = ()


Rule = Int | Ints | Float | Text | Subgraph
_AXIS = Int(-MAX_RANK, MAX_RANK)
_FLOAT32 = Int(1, 1)
_NONE: Mapping[str, Rule] = MappingProxyType({})

# Operator of the default domain -> its attributes
OPERATORS: Mapping[str, Mapping[str, Rule]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("Add", "And", "Clip", "Compress", "Div", "Equal", "Exp", "Expand", "EyeLike"),
                *("Greater", "Identity", "Less", "MatMul", "Mul", "Neg", "Pad", "Range"),
                *("Reshape", "Sigmoid", "Slice", "Softplus", "Squeeze", "Sub", "Sum", "Unsqueeze"),
                "Where",
            ),
            _NONE,
        ),
        "Attention": {"scale": Float(1.0, 1.0)},
        "Cast": {"to": _FLOAT32},
        "Concat": {"axis": _AXIS},
        "DequantizeLinear": {
            "axis": _AXIS,
            "block_size": Int(0, 2**16),
            "output_dtype": _FLOAT32,
        },
        "Gather": {"axis": _AXIS},
        "GatherND": {"batch_dims": Int(0, 1)},
        "Gelu": {"approximate": Text(("none", "tanh"))},
        "If": {"then_branch": Subgraph(), "else_branch": Subgraph()},
        "LayerNormalization": {
            "axis": Int(-1, -1),
            "epsilon": Float(0.0, 1.0),
            "stash_type": _FLOAT32,
        },
        "Loop": {"body": Subgraph(("Gather", "Identity", "MatMul", "Mul", "Sub"))},
        "QuantizeLinear": {"output_dtype": Int(3, 17)},
        "RMSNormalization": {
            "axis": Int(-1, -1),
            "epsilon": Float(0.0, 1.0),
            "stash_type": _FLOAT32,
        },
        "ReduceMin": {"keepdims": Int(1, 1)},
        "ReduceSum": {"keepdims": Int(1, 1)},
        "RotaryEmbedding": {"rotary_embedding_dim": Int(2, 2**14)},
        "Shape": {"start": Int(0, MAX_RANK), "end": Int(0, MAX_RANK)},
        "Softmax": {"axis": _AXIS},
        "Split": {"axis": _AXIS, "num_outputs": Int(2, 2)},
        "TensorScatter": {"axis": Int(-2, -2), "mode": Text(("linear",))},
        "TopK": {"axis": _AXIS},
        "Transpose": {"perm": Ints(0, MAX_RANK)},
    }
)
