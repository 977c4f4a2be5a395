"""MatMulNBits, the CPU kernel for weights of 4 and 8 bits: its layout, its node, and a proof of
both.

accuracy_level 4 rounds activations to 8 bits in the same blocks, row by row, so that rows stay
independent; level 1 takes 2 to 6 times as long. Knows one MatMul; `weights` knows where its
weight comes from. An engine's runner reads rows with it, so ONNX is imported where a node is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.ort.low_bit_matmul import check_product
from edgespec.backends.ort.probe import probe_graph, run_probe
from edgespec.quantization.quantized_weight import (
    QuantizedWeight,
    block_scales,
    dequantize_stored,
)

if TYPE_CHECKING:
    import onnx_ir as ir

MICROSOFT = "com.microsoft"
ACCURACY_LEVEL = 4
BLOCK_SIZES = (16, 32, 64, 128, 256)
PROBE_ROWS = 64  # of the weight
# Of the root mean square: rounding of activations gives 0.005 to 0.007, a wrong nibble, scale or
# zero point above 0.3.
PROBE_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True)
class NBitsKernel:
    """One form of the kernel. The last block of a row may be short: it is filled up with zeroes."""

    bits: Literal[4, 8]
    block: int
    in_features: int
    out_features: int
    zero_points: bool = False  # or all are half the range

    @property
    def num_blocks(self) -> int:
        """The number of blocks in a row; the last one may be short."""
        return -(-self.in_features // self.block)

    @property
    def values_shape(self) -> tuple[int, int, int]:
        """The shape of the packed values: [out, blocks, bytes of a block]."""
        return self.out_features, self.num_blocks, self.block * self.bits // 8

    @property
    def num_scales(self) -> int:
        """The number of scales: one per block of each row."""
        return self.out_features * self.num_blocks

    @property
    def values_bytes(self) -> int:
        """The size of the packed values in bytes."""
        return int(np.prod(self.values_shape))

    @property
    def scales_bytes(self) -> int:
        """The size of the float32 scales in bytes."""
        return 4 * self.num_scales

    @property
    def zeros_shape(self) -> tuple[int, int]:
        """The shape of the packed zero points: [out, bytes of a row]."""
        return self.out_features, -(-self.num_blocks * self.bits // 8)

    @property
    def zeros_bytes(self) -> int:
        """The size of the packed zero points in bytes."""
        return int(np.prod(self.zeros_shape)) if self.zero_points else 0

    @property
    def num_bytes(self) -> int:
        """The size of values, scales and zero points in bytes."""
        return self.values_bytes + self.scales_bytes + self.zeros_bytes

    @property
    def attributes(self) -> dict[str, int]:
        """The attributes of MatMulNBits (com.microsoft, ONNX Runtime's contrib operators)."""
        return {
            "K": self.in_features,
            "N": self.out_features,
            "bits": self.bits,
            "block_size": self.block,
            "accuracy_level": ACCURACY_LEVEL,
        }


def replace_matmul(node: ir.Node, kernel: NBitsKernel, weights: Sequence[ir.Value]) -> None:
    """Turn a MatMul into a MatMulNBits where it stands, so that its output stays what it is.
    `weights` are values and scales, and zero points where the kernel has them."""
    import onnx_ir as ir

    node.op_type, node.domain = "MatMulNBits", MICROSOFT
    node.resize_inputs(1 + len(weights))
    for i, value in enumerate(weights, start=1):
        node.replace_input_with(i, value)
    for name, number in kernel.attributes.items():
        node.attributes.add(ir.AttrInt64(name, number))


def pack(kernel: NBitsKernel, weight: QuantizedWeight) -> tuple[NDArray[Any], ...]:
    """Quantized values [out, blocks, bytes], the lower nibble first; scales [out*blocks]; and where
    the kernel has them zero points [out, bytes].

    Proven by running the kernel: BuildError where ONNX Runtime computes something else from them.
    """
    assert weight.minimums is None
    assert weight.shape == (kernel.out_features, kernel.in_features)
    middle, points = 2 ** (kernel.bits - 1), weight.zero_points
    assert (points is not None) == kernel.zero_points
    unsigned = np.full((kernel.out_features, kernel.num_blocks * kernel.block), middle, np.uint8)
    np.add(
        weight.values.astype(np.int16),
        0 if kernel.zero_points else middle,
        out=unsigned[:, : kernel.in_features],
        casting="unsafe",
    )
    values = packed(kernel, unsigned).reshape(kernel.values_shape)
    scales = np.ascontiguousarray(per_block(block_scales(weight), weight, kernel.block))
    weights = [values, scales.reshape(-1)]
    if points is not None:
        weights.append(packed(kernel, per_block(points, weight, kernel.block).astype(np.uint8)))
    prove(kernel, weights, weight)
    return tuple(weights)


def packed(kernel: NBitsKernel, unsigned: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unsigned numbers [rows, n] as bytes; of 4 bits the first is in the lower nibble."""
    if kernel.bits == 4:
        even = np.pad(unsigned, ((0, 0), (0, unsigned.shape[1] % 2)))
        unsigned = even[:, 0::2] | (even[:, 1::2] << np.uint8(4))
    return np.ascontiguousarray(unsigned)


def per_block(numbers: NDArray[Any], weight: QuantizedWeight, block: int) -> NDArray[Any]:
    """What a weight's blocks have [out, blocks], for a kernel's blocks; those of a row or of longer
    blocks are repeated."""
    out_features, in_features = weight.shape
    width = min(weight.block[1], in_features)
    assert width == in_features or width % block == 0
    first = np.arange(-(-in_features // block)) * block // width
    if numbers.shape[0] == 1:
        numbers = np.repeat(numbers, out_features, axis=0)
    return numbers[:, np.minimum(first, numbers.shape[1] - 1)]


class LmHeadTable:
    """The values of a tied lm_head, read as the embedding that they were made of; the file is
    mapped."""

    def __init__(self, path: Path, kernel: NBitsKernel, offset: int, scales_offset: int) -> None:
        self.kernel = kernel
        self.values = np.memmap(path, np.uint8, "r", offset, kernel.values_shape)
        self.scales = np.memmap(
            path, np.float32, "r", scales_offset, (kernel.out_features, kernel.num_blocks)
        )

    def rows(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """The embeddings [..., in] in float32 of token ids [...]."""
        return unpack(self.kernel, self.values[tokens], self.scales[tokens])


def unpack(
    kernel: NBitsKernel, values: NDArray[np.uint8], scales: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The dequantized rows [..., in] of what `pack` made: values [..., blocks, bytes] and scales
    [..., blocks]."""
    unsigned = values if kernel.bits == 8 else np.stack([values & 0xF, values >> 4], axis=-1)
    dequantized = unsigned.reshape(*scales.shape, kernel.block).astype(np.float32) - np.float32(
        2 ** (kernel.bits - 1)
    )
    dequantized *= scales[..., None]
    flat: NDArray[np.float32] = dequantized.reshape(*scales.shape[:-1], -1)
    return np.ascontiguousarray(flat[..., : kernel.in_features])


def prove(kernel: NBitsKernel, weights: Sequence[NDArray[Any]], weight: QuantizedWeight) -> None:
    """Run the kernel on the weight's last rows. BuildError where it differs from the product of the
    dequantized rows."""
    low = max(0, kernel.out_features - PROBE_ROWS)
    some = replace(kernel, out_features=kernel.out_features - low)
    x = np.random.default_rng(0).standard_normal((2, kernel.in_features), np.float32)
    wanted = x @ dequantize_stored(weight, slice(low, kernel.out_features)).T
    check_product(
        f"MatMulNBits computes {weight.name}",
        run(some, [one.reshape(kernel.out_features, -1)[low:] for one in weights], x),
        wanted,
        PROBE_TOLERANCE,
        "This ONNX Runtime reads another layout on this CPU: build with `weights` fp32.",
    )


def run(
    kernel: NBitsKernel, weights: Sequence[NDArray[Any]], x: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The product [rows, out] of x [rows, in], computed by ONNX Runtime; `weights` are values and
    scales, and zero points where the kernel has them."""
    import onnx_ir as ir

    from edgespec.backends.rewriting import Constants

    value = ir.Value(name="x")
    node = ir.node("MatMul", [value, ir.Value(name="weight")], name="probe")
    graph = probe_graph(node, value, kernel.in_features, kernel.out_features)
    graph.opset_imports[MICROSOFT], constant = 1, Constants(graph)
    shapes = kernel.values_shape, (kernel.num_scales,), kernel.zeros_shape
    values = [one.reshape(shape) for one, shape in zip(weights, shapes, strict=False)]
    replace_matmul(node, kernel, [constant(f"weight/{i}", one) for i, one in enumerate(values)])
    return run_probe(graph, x)
