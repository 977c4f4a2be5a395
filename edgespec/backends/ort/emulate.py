"""Activations rounded in the graph as their format says, where the CPU has no kernel of that
format.

Each rounding is a dozen standard operators in front of a product in float32: correct, and slow.
Rows stay independent. Linears that read one input in one format share it. Knows formats, and
nothing of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.backends.ort.probe import probe_graph, run_probe
from edgespec.backends.rewriting import Constants, Nodes
from edgespec.contract import ACTIVATIONS, INPUT_SCALE
from edgespec.errors import BuildError, ContractError
from edgespec.quantization.schemes import Scheme

Floats = NDArray[np.float32]

E2M1_MAX, E4M3_MAX, INT8_MAX = np.float32(6), np.float32(448), np.float32(127)
MIN_E4M3 = np.float32(2**-9)
MIN_EXPONENT = -127  # of a power-of-two scale
MIN_SCALE = np.finfo(np.float32).tiny  # of a row's scale: a row of zeros has one too
FP8, FP32 = int(ir.DataType.FLOAT8E4M3FN), int(ir.DataType.FLOAT)


@dataclass(frozen=True, slots=True)
class Rounding:
    """How the activations in front of a product are rounded."""

    scheme: Scheme
    global_scale: np.float32 | None = None  # nvfp4

    @property
    def outer_scale(self) -> np.float32:
        """The global scale, in float32, which nvfp4 alone has."""
        assert self.global_scale is not None
        return self.global_scale


def rounding_of(node: ir.Node, scheme: Scheme) -> Rounding | None:
    """The rounding that the export left to the backend in front of a quantized MatMul; None: there
    is none. ContractError where its scale is missing."""
    if ACTIVATIONS not in node.metadata_props:
        return None
    scale = node.metadata_props.get(INPUT_SCALE)
    if scheme.name not in FORMATS or (scheme.name == "nvfp4" and scale is None):
        message = (
            f"{node.name}: activations of {scheme.name} to be rounded"
            f" ({node.metadata_props[ACTIVATIONS]}), no scale"
        )
        raise ContractError(message, "Export the checkpoint again with this version.")
    return Rounding(scheme, None if scale is None else np.float32(scale))


class Emulation:
    """The roundings of one graph. Each format is proven once, against numpy."""

    def __init__(self, graph: ir.Graph) -> None:
        self.constant = Constants(graph)
        self.made: dict[tuple[int, ir.Value, Rounding], ir.Value] = {}
        self.proven: set[str] = set()

    def round_input(self, node: ir.Node, scheme: Scheme) -> None:
        """Round what a MatMul reads, where the export left that to the backend."""
        rounding, x = rounding_of(node, scheme), node.inputs[0]
        if rounding is None:
            return
        assert x is not None
        if scheme.name not in self.proven:
            prove(rounding)
            self.proven.add(scheme.name)
        key = (id(node.graph), x, rounding)  # what a branch makes is not seen outside it
        if key not in self.made:
            self.made[key] = FORMATS[scheme.name].nodes(Nodes(node, self.constant), x, rounding)
        node.replace_input_with(0, self.made[key])


# ---- formats: the nodes, and the same in numpy


@dataclass(frozen=True, slots=True)
class Format:
    """A rounding as graph nodes, and the same in numpy: `nodes` are proven against
    `dequantized`."""

    nodes: Callable[[Nodes, ir.Value, Rounding], ir.Value]
    dequantized: Callable[[Floats, Rounding], Floats]  # of x [rows, in]


def nvfp4_nodes(make: Nodes, x: ir.Value, rounding: Rounding) -> ir.Value:
    """x [B, S, in] rounded to NVFP4 and dequantized: the scale of a block is its largest value over
    6 and over the global scale, in E4M3; values are E2M1."""
    blocks, reach = blocks_of(make, x, rounding.scheme.block)
    scale = make("Div", reach, float(E2M1_MAX * rounding.outer_scale), label="scale/exact")
    scale = make("Clip", scale, float(MIN_E4M3), float(E4M3_MAX), label="scale/clip")
    step = make("Mul", through_fp8(make, scale, "scale"), float(rounding.outer_scale), label="step")
    units = make(
        "Clip",
        make("Div", blocks, step, label="units"),
        -float(E2M1_MAX),
        float(E2M1_MAX),
        label="clip",
    )
    size = make("Abs", units, label="size")
    above_four = make("Where", make("Less", size, 4.0, label="below4"), 1.0, 2.0, label="spacing4")
    spacing = make(
        "Where", make("Less", size, 2.0, label="below2"), 0.5, above_four, label="spacing"
    )
    rounded = make("Round", make("Div", units, spacing, label="spaced"), label="round")
    return flattened(
        make, make("Mul", make("Mul", rounded, spacing, label="values"), step, label="dequantized")
    )


def nvfp4_dequantized(x: Floats, rounding: Rounding) -> Floats:
    """What `nvfp4_nodes` computes, in numpy: [rows, in] -> [rows, in]."""
    blocks = x.reshape(len(x), -1, rounding.scheme.block)
    reach = np.abs(blocks).max(-1, keepdims=True)
    with np.errstate(over="ignore"):  # what is infinite is clipped
        scale = np.clip(reach / (E2M1_MAX * rounding.outer_scale), MIN_E4M3, E4M3_MAX)
        step = cast(scale, ml_dtypes.float8_e4m3fn) * rounding.outer_scale
        values = cast(np.clip(blocks / step, -E2M1_MAX, E2M1_MAX), ml_dtypes.float4_e2m1fn)
    return (values * step).reshape(x.shape)


def mxfp8_nodes(make: Nodes, x: ir.Value, rounding: Rounding) -> ir.Value:
    """x [B, S, in] rounded to MXFP8 and dequantized (OCP Microscaling Formats 1.0): the scale of a
    block is the smallest power of two that brings it into E4M3."""
    blocks, reach = blocks_of(make, x, rounding.scheme.block)
    ratio = make(
        "Max",
        make("Div", reach, float(E4M3_MAX), label="ratio"),
        2.0**MIN_EXPONENT,
        label="min",
    )
    guess = make(
        "Mul", make("Log", ratio, label="log"), float(1 / np.log(np.float32(2))), label="log2"
    )
    exponent = make("Sub", make("Ceil", guess, label="ceil"), 1.0, label="exponent")
    # A logarithm may be off by a unit in its last place: one too small is raised
    for attempt in ("a", "b"):
        power = make("Pow", make.constant.number(2.0), exponent, label=f"power/{attempt}")
        short = make(
            "Cast",
            make("Less", power, ratio, label=f"short/{attempt}"),
            label=f"raise/{attempt}",
            to=FP32,
        )
        exponent = make("Add", exponent, short, label=f"exponent/{attempt}")
    exponent = make("Max", exponent, float(MIN_EXPONENT), label="exponent/min")
    inverse = make(
        "Pow", make.constant.number(2.0), make("Neg", exponent, label="neg"), label="inverse"
    )
    scaled = make("Mul", blocks, inverse, label="scaled")
    values = through_fp8(
        make, make("Clip", scaled, -float(E4M3_MAX), float(E4M3_MAX), label="clip"), "values"
    )
    scale = make("Pow", make.constant.number(2.0), exponent, label="scale")
    return flattened(make, make("Mul", values, scale, label="dequantized"))


def mxfp8_dequantized(x: Floats, rounding: Rounding) -> Floats:
    """What `mxfp8_nodes` computes, in numpy: [rows, in] -> [rows, in]."""
    blocks = x.reshape(len(x), -1, rounding.scheme.block)
    # fraction in [0.5, 1), or 0
    fraction, exponent = np.frexp(np.abs(blocks).max(-1, keepdims=True) / E4M3_MAX)
    exponent = np.where(fraction == 0.5, exponent - 1, exponent)
    exponent = np.where(fraction == 0, MIN_EXPONENT, np.maximum(exponent, MIN_EXPONENT))
    scaled = np.clip(np.ldexp(blocks, -exponent), -E4M3_MAX, E4M3_MAX)
    return np.ldexp(cast(scaled, ml_dtypes.float8_e4m3fn), exponent).reshape(x.shape)


def fp8_token_nodes(make: Nodes, x: ir.Value, rounding: Rounding) -> ir.Value:
    """x [B, S, in] rounded to E4M3 and dequantized; a row's scale is its largest value over 448."""
    scale = row_scale(make, x, E4M3_MAX)
    units = make("Div", x, scale, label="units")
    units = make("Clip", units, -float(E4M3_MAX), float(E4M3_MAX), label="clip")
    return make("Mul", through_fp8(make, units, "values"), scale, label="dequantized")


def fp8_token_dequantized(x: Floats, rounding: Rounding) -> Floats:
    """What `fp8_token_nodes` computes, in numpy: [rows, in] -> [rows, in]."""
    scale = row_scales(x, E4M3_MAX)
    return cast(np.clip(x / scale, -E4M3_MAX, E4M3_MAX), ml_dtypes.float8_e4m3fn) * scale


def int8_token_nodes(make: Nodes, x: ir.Value, rounding: Rounding) -> ir.Value:
    """x [B, S, in] rounded to whole numbers and dequantized; a row's scale is its largest value
    over 127."""
    scale = row_scale(make, x, INT8_MAX)
    return make(
        "Mul",
        make("Round", make("Div", x, scale, label="units"), label="values"),
        scale,
        label="dequantized",
    )


def int8_token_dequantized(x: Floats, rounding: Rounding) -> Floats:
    """What `int8_token_nodes` computes, in numpy: [rows, in] -> [rows, in]."""
    scale = row_scales(x, INT8_MAX)
    return np.asarray(np.rint(x / scale) * scale, np.float32)


FORMATS = {
    "nvfp4": Format(nvfp4_nodes, nvfp4_dequantized),
    "mxfp8": Format(mxfp8_nodes, mxfp8_dequantized),
    "fp8_token": Format(fp8_token_nodes, fp8_token_dequantized),
    "int8_token": Format(int8_token_nodes, int8_token_dequantized),
}


# ---- parts of them


def blocks_of(make: Nodes, x: ir.Value, block: int) -> tuple[ir.Value, ir.Value]:
    """[B, S, in] -> [B, S, blocks, block], and the largest absolute value of each block."""
    blocks = make("Reshape", x, make.constant.int64(0, 0, -1, block), label="blocks")
    return blocks, largest(make, blocks)


def flattened(make: Nodes, blocks: ir.Value) -> ir.Value:
    """[B, S, blocks, block] -> [B, S, in]."""
    return make("Reshape", blocks, make.constant.int64(0, 0, -1), label="rounded")


def largest(make: Nodes, values: ir.Value) -> ir.Value:
    """The largest absolute value along the last axis, which stays with size 1."""
    return make(
        "ReduceMax",
        make("Abs", values, label="abs"),
        make.constant.int64(-1),
        label="reach",
        keepdims=1,
    )


def row_scale(make: Nodes, x: ir.Value, maximum: np.float32) -> ir.Value:
    """[B, S, 1]: what the largest value of a row is divided by to be `maximum`."""
    return make(
        "Max",
        make("Div", largest(make, x), float(maximum), label="ratio"),
        float(MIN_SCALE),
        label="scale",
    )


def row_scales(x: Floats, maximum: np.float32) -> Floats:
    """What `row_scale` computes, in numpy: [rows, in] -> [rows, 1]."""
    return np.asarray(np.maximum(np.abs(x).max(-1, keepdims=True) / maximum, MIN_SCALE), np.float32)


def through_fp8(make: Nodes, x: ir.Value, label: str) -> ir.Value:
    """The nearest values in FP8 E4M3, ties to even, as float32."""
    return make(
        "Cast", make("Cast", x, label=f"{label}/fp8", to=FP8), label=f"{label}/fp32", to=FP32
    )


def cast(x: Floats, dtype: type[np.generic]) -> Floats:
    """The nearest values of a narrow type, ties to even, as float32."""
    return x.astype(dtype).astype(np.float32)


# ---- proof


def prove(rounding: Rounding) -> None:
    """Run the nodes on rows that are hard to round. BuildError where ONNX Runtime computes other
    values than numpy."""
    x, form = hard_rows(), FORMATS[rounding.scheme.name]
    value = ir.Value(name="x")
    end = ir.node("Identity", [value], name="probe")
    graph = probe_graph(end, value, x.shape[1], x.shape[1])
    end.replace_input_with(0, form.nodes(Nodes(end, Constants(graph)), value, rounding))
    computed, wanted = run_probe(graph, x), form.dequantized(x, rounding)
    if not np.array_equal(computed, wanted):
        message = (
            f"activations of {rounding.scheme.name} are rounded to other values here"
            f" ({(computed != wanted).sum()} of"
        )
        message = f"{message} {x.size} in a probe)"
        raise BuildError(
            message,
            "This ONNX Runtime computes something else on this CPU: build on another version"
            " of it.",
        )


def hard_rows() -> Floats:
    """Rows [rows, 256] that are hard to round: all sizes, outliers, blocks of zeros, subnormal
    values, and values halfway between two values."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((4, 256)).astype(np.float32)
    outliers = normal * np.where(rng.random(normal.shape) < 0.02, 300, 1).astype(np.float32)
    sizes = normal * np.exp2(rng.integers(-140, 120, normal.shape)).astype(np.float32)
    silent = np.where(np.arange(256) % 64 < 32, 0, normal).astype(np.float32)
    halfway = rng.integers(-24, 25, (4, 256)).astype(np.float32) / 4
    powers = np.exp2(rng.integers(-20, 20, (4, 256))).astype(np.float32) * E4M3_MAX
    return np.concatenate(
        [normal, outliers, sizes, silent, halfway, powers, normal * MIN_SCALE / 64]
    )
