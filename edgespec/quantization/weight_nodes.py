"""The nodes in front of a MatMul that make its weight of quantized values, read into one value.

Knows the forms that an export writes, which docs/architecture.md lists. Knows no bytes and no
types: who reads the tensors knows those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True, slots=True)
class Factors:
    """Numbers of blocks, scales or minimums, as they are stored.

    `shared` is what they are multiplied by: along the axis of the blocks `group` of them by the
    same number, or all of them by one (`group` 0). None: by nothing.
    """

    stored: ir.TensorProtocol
    shared: ir.TensorProtocol | None = None
    group: int = 0


@dataclass(frozen=True, slots=True)
class WeightNodes:
    """A quantized weight: `values` [in, out], or if `transposed` [out, in], and what belongs to
    `block` of them along `axis`; without a block, to each place on the axis, or to all."""

    values: ir.TensorProtocol
    scales: Factors
    zero_points: ir.TensorProtocol | None
    minimums: Factors | None
    axis: int
    block: int
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight: [out, in]."""
        rows, columns = self.values.shape.numpy()
        return (rows, columns) if self.transposed else (columns, rows)


def weight_nodes(weight: ir.Value | None) -> WeightNodes | None:
    """What a weight [in, out] is computed of; None where no quantized values are."""
    minimums, maker = None, made_by(weight, "Reshape")
    if maker is not None:
        less = made_by(maker.inputs[0], "Sub")
        blocks = made_by(less.inputs[0], "Reshape") if less is not None else None
        repeated = made_by(less.inputs[1], "Unsqueeze") if less is not None else None
        minimums = factors(repeated.inputs[0]) if repeated is not None else None
        if blocks is None or minimums is None:
            return None
        weight = blocks.inputs[0]
    transpose = made_by(weight, "Transpose")
    if transpose is not None:
        weight = transpose.inputs[0]
    node = made_by(weight, "DequantizeLinear")
    if node is None:
        return None
    values, scales = stored(node.inputs[0]), factors(node.inputs[1])
    zero_points = node.inputs[2] if len(node.inputs) > 2 else None
    if values is None or scales is None or (zero_points is not None and not stored(zero_points)):
        return None
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    transposed = transpose is not None
    points = stored(zero_points)
    return WeightNodes(values, scales, points, minimums, axis, block_of(node), transposed)


def factors(value: ir.Value | None) -> Factors | None:
    """The numbers that a value is: stored, or dequantized; float16 is cast to float32."""
    node = made_by(value, "DequantizeLinear")
    if node is None:
        numbers = uncast(value)
        return None if numbers is None else Factors(numbers)
    numbers, shared = stored(node.inputs[0]), uncast(node.inputs[1])
    if numbers is None or shared is None or len(node.inputs) > 2:
        return None
    return Factors(numbers, shared, block_of(node))


def block_of(node: ir.Node) -> int:
    """The block size of a DequantizeLinear; 0 where it has none."""
    return node.attributes["block_size"].as_int() if "block_size" in node.attributes else 0


def uncast(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor that a value is, or is cast from."""
    cast = made_by(value, "Cast")
    return stored(value if cast is None else cast.inputs[0])


def stored(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer; None where a node computes the value."""
    return None if value is None else value.const_value


def made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes a value, if it is of ONNX's operator `op_type`."""
    node = None if value is None else value.producer()
    return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None
