"""Int8 GEMM: activations rounded row by row or to a static scale, a scale per channel of the
weight.

Sums of integers are exact, so a row has the same bits whatever stands beside it and however many
they are. Activations are unsigned around 128: the CPU's instructions multiply unsigned by signed
bytes. Knows one MatMul; `weights` knows where its weight comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.backends.ort.emulate import INT8_MAX, row_scale, row_scales
from edgespec.backends.ort.low_bit_matmul import check_product
from edgespec.backends.ort.probe import probe_graph, run_probe
from edgespec.backends.rewriting import Constants, Nodes
from edgespec.quantization.quantized_weight import QuantizedWeight

MIDDLE = 128  # the quantized value of an activation of zero
MAX_INPUTS = 2**31 // (128 * 128)  # more could overflow a sum of 32 bits
PROBE_COLUMNS = 64
# Of the root mean square: roundings of scales in float32 are left. A wrong value, scale or order
# gives above 0.01.
PROBE_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Int8Kernel:
    """A product [rows, in] x [in, out]; `step` is the static scale of the activations, None: each
    row has its own."""

    in_features: int
    out_features: int
    step: np.float32 | None = None

    @property
    def values_shape(self) -> tuple[int, int]:
        """The shape of the values: [in, out]."""
        return self.in_features, self.out_features

    @property
    def values_bytes(self) -> int:
        """The size of the values: one byte each."""
        return self.in_features * self.out_features

    @property
    def num_bytes(self) -> int:
        """The size of the values and of the scales: one float32 per channel."""
        return self.values_bytes + 4 * self.out_features


class Activations:
    """The inputs of a graph's int8 GEMMs, quantized once for all that read the same."""

    def __init__(self, graph: ir.Graph) -> None:
        self.constant = Constants(graph)
        self.by_step: dict[tuple[int, ir.Value, np.float32], ir.Value] = {}
        self.by_row: dict[tuple[int, ir.Value], tuple[ir.Value, ir.Value]] = {}

    def static(self, node: ir.Node, x: ir.Value, step: np.float32) -> ir.Value:
        """Quantized values [B, S, in] of x / step, in UINT8 around 128."""
        key = (id(node.graph), x, step)
        if key not in self.by_step:
            self.by_step[key] = quantize(Nodes(node, self.constant), x, step)
        return self.by_step[key]

    def dynamic(self, node: ir.Node, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Quantized values [B, S, in] in UINT8 around 128, and the scales of the rows [B, S, 1]."""
        key = (id(node.graph), x)
        if key not in self.by_row:
            make = Nodes(node, self.constant)
            scale = row_scale(make, x, INT8_MAX)
            self.by_row[key] = (
                quantize(make, make("Div", x, scale, label="units"), np.float32(1)),
                scale,
            )
        return self.by_row[key]


def quantize(make: Nodes, x: ir.Value, step: np.float32) -> ir.Value:
    """x / step to the nearest whole number, ties to even, saturated, in UINT8 around 128."""
    return make(
        "QuantizeLinear", x, float(step), make.constant.number(MIDDLE, np.uint8), label="values"
    )


def static_input(node: ir.Node) -> tuple[ir.Value, np.float32] | None:
    """The input of a MatMul before QuantizeLinear and DequantizeLinear in INT8, and their scale;
    None where there are none."""
    back = node.inputs[0].producer() if node.inputs[0] is not None else None
    values = back.inputs[0] if back is not None and back.op_type == "DequantizeLinear" else None
    maker = values.producer() if values is not None else None
    if back is None or maker is None or maker.op_type != "QuantizeLinear" or len(maker.inputs) != 2:
        return None
    x, step = maker.inputs[:2]
    known = step.const_value if step is not None else None
    to = maker.attributes.get("output_dtype")
    if x is None or known is None or known.size != 1 or back.inputs[1] is not step:
        return None
    return (
        (x, np.float32(known.numpy()))
        if to is not None and to.as_int() == ir.DataType.INT8
        else None
    )


def replace_matmul(
    node: ir.Node,
    activations: Activations,
    kernel: Int8Kernel,
    x: ir.Value,
    values: ir.Value,
    scales: ir.Value,
) -> None:
    """Turn a MatMul into an int8 GEMM. The node itself becomes the last multiplication by
    scales."""
    make = Nodes(node, activations.constant, "int8")
    middle = make.constant.number(MIDDLE, np.uint8)
    if kernel.step is not None:
        rows, last = activations.static(node, x, kernel.step), scales
    else:
        rows, last = activations.dynamic(node, x)
    sums = make("MatMulInteger", rows, values, middle, label="sums")
    product = make("Cast", sums, label="fp32", to=int(ir.DataType.FLOAT))
    if kernel.step is None:
        product = make("Mul", product, scales, label="channels")
    node.op_type = "Mul"
    node.replace_input_with(0, product)
    node.replace_input_with(1, last)


def pack(
    kernel: Int8Kernel, weight: QuantizedWeight
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantized values [in, out] and scales [out], times the static scale of the activations.

    Proven by running the kernel: BuildError where ONNX Runtime computes something else from them.
    """
    assert weight.symmetric
    assert weight.shape == (kernel.out_features, kernel.in_features)
    assert weight.scales.shape[1] == 1
    values = np.ascontiguousarray(weight.values.T)
    scales = np.broadcast_to(weight.scales[:, 0].astype(np.float32), kernel.out_features)
    if kernel.step is not None:
        scales = scales * kernel.step
    prove(kernel, values, scales, weight.name)
    return values, np.ascontiguousarray(scales)


def prove(
    kernel: Int8Kernel, values: NDArray[np.int8], scales: NDArray[np.float32], name: str
) -> None:
    """Run the kernel on the weight's last columns. BuildError where it differs from exact sums."""
    low = max(0, kernel.out_features - PROBE_COLUMNS)
    some = Int8Kernel(kernel.in_features, kernel.out_features - low, kernel.step)
    x = np.random.default_rng(0).standard_normal((2, kernel.in_features)).astype(np.float32)
    x *= np.float32(60) * (INT8_MAX**-1 if kernel.step is None else kernel.step)
    wanted = exact(some, x, values[:, low:], scales[low:])
    check_product(
        f"MatMulInteger computes {name}",
        run(some, x, np.ascontiguousarray(values[:, low:]), np.ascontiguousarray(scales[low:])),
        wanted,
        PROBE_TOLERANCE,
        "This ONNX Runtime computes something else on this CPU: use another version of it.",
    )


def exact(
    kernel: Int8Kernel,
    x: NDArray[np.float32],
    values: NDArray[np.int8],
    scales: NDArray[np.float32],
) -> NDArray[np.float32]:
    """The product [rows, out] of x [rows, in], computed with numpy's integers."""
    if kernel.step is not None:
        rows, scale_of_row = np.clip(np.rint(x / kernel.step), -128, 127), np.ones(1, np.float32)
    else:
        scale_of_row = row_scales(x, INT8_MAX)
        rows = np.rint(x / scale_of_row)
    sums: NDArray[np.float32] = (rows.astype(np.int64) @ values.astype(np.int64)).astype(np.float32)
    return sums * scales * scale_of_row


def run(
    kernel: Int8Kernel,
    x: NDArray[np.float32],
    values: NDArray[np.int8],
    scales: NDArray[np.float32],
) -> NDArray[np.float32]:
    """The product [rows, out] of x [rows, in], computed by ONNX Runtime."""
    value, weight = ir.Value(name="x"), ir.Value(name="weight")
    node = ir.node("MatMul", [value, weight], name="probe")
    graph = probe_graph(node, value, kernel.in_features, kernel.out_features)
    constant = Constants(graph)
    replace_matmul(
        node,
        Activations(graph),
        kernel,
        value,
        constant("values", values),
        constant("scales", scales),
    )
    return run_probe(graph, x)


@cache
def is_exact_here() -> bool:
    """Whether this CPU adds up the largest values exactly; some add pairs of products in 16 bits
    first."""
    kernel = Int8Kernel(64, 16, np.float32(1))
    x, values = np.full((64, 64), 127, np.float32), np.full((64, 16), 127, np.int8)
    x[1::2], scales = -128, np.ones(16, np.float32)
    calls = (x[:1], x[:2], x)  # kernels are chosen by the number of rows
    return all(
        np.array_equal(run(kernel, some, values, scales), exact(kernel, some, values, scales))
        for some in calls
    )
