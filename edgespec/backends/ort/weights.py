"""Lowers stored weights: halves -> float32 in the [in, out] layout that MatMul reads, or rounded to
4 or 8 bits.

Knows where a weight stands in the exported data file and where it will in the engine's. Knows of
operators the Cast and the Transpose that stand behind a weight, and the MatMul that becomes another
product (their layouts stand in `matmul_nbits` and `int8_gemm`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgespec.backends.ort import int8_gemm, matmul_nbits
from edgespec.backends.ort.emulate import Emulation
from edgespec.backends.ort.fusion import join_products
from edgespec.backends.ort.stored_codes import StoredCodes, read, stored_codes
from edgespec.backends.weights import FP32, WeightFormat
from edgespec.contract import FLOAT32_ONLY
from edgespec.errors import BuildError
from edgespec.quantized import QuantizedWeight, dequantize_stored, quantize_rtn

ALIGN_BYTES = 4096
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight of the lowered graph: where its source stands, and where its float32 form will."""

    source: ir.ExternalTensor
    transposed: bool
    offset: int
    num_bytes: int


Kernel = TypeVar("Kernel", matmul_nbits.Kernel, int8_gemm.Kernel)


@dataclass(frozen=True, slots=True)
class CodesAndScales(Generic[Kernel]):
    """A weight [out, in] of few bits: its source, its kernel, and where codes and scales will
    stand."""

    source: ir.ExternalTensor | StoredCodes
    kernel: Kernel
    offset: int  # of the codes
    scales_offset: int

    @property
    def num_bytes(self) -> int:
        return self.kernel.codes_bytes + self.kernel.scales_bytes


class LowBitWeight(CodesAndScales[matmul_nbits.Kernel]):
    """One that MatMulNBits reads."""

    __slots__ = ()


class IntegerWeight(CodesAndScales[int8_gemm.Kernel]):
    """One that is multiplied as integers."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Product:
    """MatMuls by one weight that MatMulNBits will do."""

    name: str
    nodes: list[ir.Node]
    source: ir.ExternalTensor | StoredCodes
    kernel: matmul_nbits.Kernel

    @property
    def neighbourhood(self) -> Hashable:
        """Products that have the same read the same rows in the same form, and can be one."""
        if len(self.nodes) > 1:
            return id(self)
        (node,), kernel = self.nodes, self.kernel
        return id(node.graph), id(node.inputs[0]), kernel.in_features, kernel.bits, kernel.block


@dataclass(frozen=True, slots=True)
class DequantizedWeight:
    """A quantised weight that no kernel here reads: what it is worth, [in, out] in float32."""

    source: StoredCodes
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that stays as it is."""

    source: ir.ExternalTensor
    offset: int
    num_bytes: int


AnyWeight = StoredWeight | LowBitWeight | IntegerWeight | DequantizedWeight | KeptTensor


def lower_weights(
    model: ir.Model, data_name: str, weight_format: WeightFormat = FP32
) -> list[AnyWeight]:
    """Replace initializer -> [Cast] -> [Transpose] by one float32 initializer in the form that its
    user reads.

    With 4 or 8 bits the weights that only MatMuls read become those of MatMulNBits; biases, norms
    and the like stay.
    """
    graph = model.graph
    room = Room(graph, data_name)
    activations = int8_gemm.Activations(graph)
    if weight_format.by_row and not int8_gemm.is_exact_here():
        what = "this CPU adds up products of 8-bit integers in 16 bits, which are too few"
        raise BuildError(what, "Build with --weights int8 --weight-block 128.")
    products: list[Product] = []
    weights: list[AnyWeight] = list(lower_codes(room, activations, products))
    RemoveUnusedNodesPass()(model)  # what read the codes
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor) or tensor.location == data_name:
            continue
        if tensor.dtype not in FLOATS:
            weights += [kept(room, value, tensor)] if value.uses() else []
            continue
        for final, transposed in final_forms(value):
            users = matmuls(final) if transposed and weight_format.bits else []
            if users and weight_format.by_row:
                weights.append(as_integers(room, value, tensor, users, activations))
            elif users:
                products.append(product(value, tensor, users, weight_format))
            else:
                weights.append(stored(room, value, tensor, final, transposed=transposed))
    weights += place_products(room, products)
    return weights


def lower_codes(
    room: Room, activations: int8_gemm.Activations, products: list[Product]
) -> Iterator[AnyWeight]:
    """Quantised weights of the export: to a kernel that reads them, else to what they are worth,
    and then activations are rounded in the graph. Those that MatMulNBits reads are added to
    `products`.
    """
    emulation = Emulation(room.graph)
    for node in list(room.graph.all_nodes()):
        source = stored_codes(node) if node.op_type == "MatMul" and node.domain == "" else None
        if source is None:
            continue
        found, kernel = integer_kernel(source, node), kernel_of(source)
        if found is not None:
            yield integer_product(room, activations, source, node, *found)
        elif kernel is None:
            out_features, in_features = source.shape
            value, offset, size = room.place(
                f"{node.name}/worth", (in_features, out_features), ir.DataType.FLOAT
            )
            node.replace_input_with(1, value)
            emulation.round_input(node, source.scheme)
            yield DequantizedWeight(source, offset, size)
        else:
            products.append(Product(str(node.name), [node], source, kernel))


def integer_kernel(source: StoredCodes, node: ir.Node) -> tuple[int8_gemm.Kernel, ir.Value] | None:
    """The product of integers that these codes and activations are, and what it reads; None where
    they are not one."""
    scheme, (out_features, in_features), x = source.scheme, source.shape, node.inputs[0]
    fits = scheme.weight == "int8" and not source.block_size and in_features <= int8_gemm.MAX_INPUTS
    if not fits or not int8_gemm.is_exact_here():
        return None
    if scheme.activations == "dynamic token":
        return (int8_gemm.Kernel(in_features, out_features), x) if x is not None else None
    static = int8_gemm.static_input(node) if scheme.activations == "static tensor" else None
    return (int8_gemm.Kernel(in_features, out_features, static[1]), static[0]) if static else None


def integer_product(
    room: Room,
    activations: int8_gemm.Activations,
    source: StoredCodes,
    node: ir.Node,
    kernel: int8_gemm.Kernel,
    x: ir.Value,
) -> IntegerWeight:
    codes, scales, offset, scales_offset = room.place_integers(str(node.name), kernel)
    int8_gemm.replace_matmul(node, activations, kernel, x, codes, scales)
    return IntegerWeight(source, kernel, offset, scales_offset)


def kernel_of(source: StoredCodes) -> matmul_nbits.Kernel | None:
    """The form of MatMulNBits that multiplies by these codes as they are; activations must not be
    rounded before."""
    bits: dict[str, Literal[4, 8]] = {"int4": 4, "int8": 8}
    if source.scheme.weight not in bits or source.scheme.activations != "none":
        return None
    out_features, in_features = source.shape
    block = source.block_size or FP32.block
    fits = block in matmul_nbits.BLOCK_SIZES
    return (
        matmul_nbits.Kernel(bits[source.scheme.weight], block, in_features, out_features)
        if fits
        else None
    )


def kept(room: Room, value: ir.Value, tensor: ir.ExternalTensor) -> KeptTensor:
    """What is not a float, such as the order of a weight's inputs."""
    new, offset, size = room.place(f"{value.name}/kept", tuple(tensor.shape.numpy()), tensor.dtype)
    value.replace_all_uses_with(new)
    return KeptTensor(tensor, offset, size)


class Room:
    """The engine's data file as it fills up."""

    def __init__(self, graph: ir.Graph, data_name: str) -> None:
        self.graph, self.data_name, self.end = graph, data_name, 0

    def place(
        self, name: str, dims: tuple[int, ...], dtype: ir.DataType
    ) -> tuple[ir.Value, int, int]:
        """A new initializer, its offset and its size in bytes."""
        offset = -(-self.end // ALIGN_BYTES) * ALIGN_BYTES
        size, shape = int(np.prod(dims)) * dtype.itemsize, ir.Shape(dims)
        self.end = offset + int(size)
        tensor = ir.ExternalTensor(self.data_name, offset, int(size), dtype, shape=shape, name=name)
        value = ir.Value(name=name, shape=shape, type=ir.TensorType(dtype), const_value=tensor)
        self.graph.register_initializer(value)
        return value, offset, int(size)

    def place_codes(
        self, name: str, kernel: matmul_nbits.Kernel
    ) -> tuple[ir.Value, ir.Value, int, int]:
        codes, offset, _ = self.place(f"{name}/codes", kernel.codes_shape, ir.DataType.UINT8)
        scales, scales_offset, _ = self.place(
            f"{name}/scales", (kernel.num_scales,), ir.DataType.FLOAT
        )
        return codes, scales, offset, scales_offset

    def place_integers(
        self, name: str, kernel: int8_gemm.Kernel
    ) -> tuple[ir.Value, ir.Value, int, int]:
        codes, offset, _ = self.place(f"{name}/codes", kernel.codes_shape, ir.DataType.INT8)
        scales, scales_offset, _ = self.place(
            f"{name}/scales", (kernel.out_features,), ir.DataType.FLOAT
        )
        return codes, scales, offset, scales_offset


def stored(
    room: Room, value: ir.Value, tensor: ir.ExternalTensor, final: ir.Value, *, transposed: bool
) -> StoredWeight:
    dims = tuple(tensor.shape.numpy())
    name = f"{value.name}/{'t' if transposed else 'fp32'}"
    new, offset, size = room.place(name, dims[::-1] if transposed else dims, ir.DataType.FLOAT)
    final.replace_all_uses_with(new)
    return StoredWeight(tensor, transposed, offset, size)


def product(
    value: ir.Value, tensor: ir.ExternalTensor, users: list[ir.Node], weight_format: WeightFormat
) -> Product:
    out_features, in_features = tensor.shape.numpy()
    assert weight_format.bits is not None
    kernel = matmul_nbits.Kernel(weight_format.bits, weight_format.block, in_features, out_features)
    return Product(str(value.name), users, tensor, kernel)


def place_products(room: Room, products: list[Product]) -> Iterator[LowBitWeight]:
    """Those that read the same rows become one, their weights one below the other: fewer starts of
    all threads."""
    neighbours: dict[Hashable, list[Product]] = {}
    for one in products:
        neighbours.setdefault(one.neighbourhood, []).append(one)
    for group in neighbours.values():
        sizes = [one.kernel.out_features for one in group]
        joined = replace(group[0].kernel, out_features=sum(sizes))
        codes, scales, offset, scales_offset = room.place_codes(group[0].name, joined)
        if len(group) == 1:
            for node in group[0].nodes:
                matmul_nbits.replace_matmul(node, joined, codes, scales)
        else:
            join_products([one.nodes[0] for one in group], sizes, joined, codes, scales)
        for one in group:
            yield LowBitWeight(one.source, one.kernel, offset, scales_offset)
            offset, scales_offset = (
                offset + one.kernel.codes_bytes,
                scales_offset + one.kernel.scales_bytes,
            )


def as_integers(
    room: Room,
    value: ir.Value,
    tensor: ir.ExternalTensor,
    users: list[ir.Node],
    activations: int8_gemm.Activations,
) -> IntegerWeight:
    out_features, in_features = tensor.shape.numpy()
    kernel = int8_gemm.Kernel(in_features, out_features)
    codes, scales, offset, scales_offset = room.place_integers(str(value.name), kernel)
    for node in users:
        assert node.inputs[0] is not None
        int8_gemm.replace_matmul(node, activations, kernel, node.inputs[0], codes, scales)
    return IntegerWeight(tensor, kernel, offset, scales_offset)


def matmuls(value: ir.Value) -> list[ir.Node]:
    """The MatMuls that have `value` as their weight; none where something else reads it, or one
    that must not round."""
    uses = list(value.uses())
    fitting = all(
        node.op_type == "MatMul"
        and node.domain == ""
        and index == 1
        and FLOAT32_ONLY not in node.metadata_props
        for node, index in uses
    )
    return [node for node, _ in uses] if fitting else []


def final_forms(value: ir.Value) -> Iterator[tuple[ir.Value, bool]]:
    """The values that `value` ends in after an optional Cast and an optional Transpose of two
    axes."""
    users = [node for node, _ in value.uses()]
    casts = [node for node in users if node.op_type == "Cast"]
    turns = [node for node in users if node.op_type == "Transpose"]
    if casts:
        yield from (form for cast in casts for form in final_forms(cast.outputs[0]))
    elif turns:
        yield from ((turn.outputs[0], True) for turn in turns)
    elif users:
        yield value, False


# ---- bytes


def pieces(weight: AnyWeight, directory: Path) -> Iterator[tuple[int, NDArray[Any]]]:
    """Offsets and arrays of the engine's data file; one tensor of `directory` is held at a time."""
    if isinstance(weight, StoredWeight):
        yield weight.offset, read_fp32(weight, directory)
        return
    if isinstance(weight, KeptTensor):
        yield weight.offset, read(weight.source, directory).reshape(-1).view(np.uint8)
        return
    if isinstance(weight, DequantizedWeight):
        yield (
            weight.offset,
            np.ascontiguousarray(dequantize_stored(weight.source.read(directory)).T),
        )
        return
    if isinstance(weight, IntegerWeight):
        integers, channels = int8_gemm.pack(weight.kernel, round_by_row(weight, directory))
        yield weight.offset, integers
        yield weight.scales_offset, channels
        return
    codes, scales = matmul_nbits.pack(weight.kernel, round_weight(weight, directory))
    yield weight.offset, codes
    yield weight.scales_offset, scales


def round_weight(weight: LowBitWeight, directory: Path) -> QuantizedWeight:
    if isinstance(weight.source, StoredCodes):
        return weight.source.read(directory)
    kernel, name = weight.kernel, str(weight.source.name)
    return quantize_rtn(read(weight.source, directory), kernel.bits, kernel.block, name)


def round_by_row(weight: IntegerWeight, directory: Path) -> QuantizedWeight:
    if isinstance(weight.source, StoredCodes):
        return weight.source.read(directory)
    return quantize_rtn(read(weight.source, directory), 8, None, str(weight.source.name))


def read_fp32(weight: StoredWeight, directory: Path) -> NDArray[np.float32]:
    """The weight's float32 form, read from the canonical directory."""
    array = read(weight.source, directory)
    return np.ascontiguousarray(
        (array.T if weight.transposed else array).astype(np.float32, order="C")
    )
