"""Lowers stored weights: halves -> float32 in the [in, out] layout that MatMul reads, or quantized
to 4 or 8 bits.

Knows of operators the Cast and the Transpose that stand behind a weight, and the MatMul that
becomes another product (their layouts stand in `low_bit_matmul`, `matmul_nbits` and `int8_gemm`).
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgespec.backends.ort import int8_gemm, low_bit_matmul, matmul_nbits
from edgespec.backends.ort.data_file import (
    AnyWeight,
    DataFile,
    DequantizedWeight,
    ExpertWeight,
    ExternalWeight,
    Int8GemmWeight,
    KeptTensor,
    LowBitWeight,
    PackedWeight,
)
from edgespec.backends.ort.emulate import Emulation
from edgespec.backends.ort.experts import (
    PARTS,
    ExpertsLayout,
    layout_of_experts,
    mixtures,
    replace_mixture,
)
from edgespec.backends.ort.fusion import fuse_projections
from edgespec.backends.ort.low_bit_head import LOGITS
from edgespec.backends.ort.low_bit_matmul import IN_BLOCKS, RowRounding, replace_matmuls
from edgespec.backends.ort.native.layout import WeightLayout, layout_of, layout_of_form
from edgespec.backends.ort.options import DEFAULT_BLOCK, FP32, NATIVE, WeightFormat
from edgespec.backends.ort.quantized_values import QuantizedValues, quantized_values
from edgespec.backends.rewriting import required
from edgespec.contract import KEEP_PRECISION
from edgespec.errors import BuildError
from edgespec.quantization.block_forms import FORMS, FOUR_BITS

INTEGERS: Mapping[ir.DataType, Literal[4, 8]] = {
    ir.DataType.INT4: 4,
    ir.DataType.UINT4: 4,
    ir.DataType.INT8: 8,
    ir.DataType.UINT8: 8,
}
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True, slots=True)
class NBitsProduct:
    """MatMuls by one weight that MatMulNBits will do."""

    name: str
    nodes: list[ir.Node]
    source: ir.ExternalTensor | QuantizedValues
    kernel: matmul_nbits.NBitsKernel

    @property
    def group(self) -> Hashable:
        """The key of a group: its products read the same rows in the same form, and can be one."""
        if len(self.nodes) > 1:
            return id(self)
        (node,), kernel = self.nodes, self.kernel
        return id(node.graph), id(node.inputs[0]), replace(kernel, out_features=1)


@dataclass(frozen=True, slots=True)
class PackedProduct:
    """MatMuls by one weight that our own kernel will do, of rows `x`: None: each reads its own."""

    name: str
    nodes: list[ir.Node]
    source: ir.ExternalTensor | QuantizedValues
    layout: WeightLayout
    rounding: RowRounding = IN_BLOCKS
    x: ir.Value | None = None

    @property
    def group(self) -> Hashable:
        """The key of a group: its products read the same rows, which are rounded alike."""
        if len(self.nodes) > 1:
            return id(self)
        (node,), layout = self.nodes, self.layout
        form = replace(layout, out_features=1, global_scale=1.0)
        return id(node.graph), id(self.rows_of(node)), form, self.rounding

    def rows_of(self, node: ir.Node) -> ir.Value:
        """The rows that a node multiplies."""
        return required(node.inputs[0] if self.x is None else self.x)


class WeightLowering:
    """The weights of one graph on their way into the engine's data file.

    `products` are those that MatMulNBits will do, `packed` those that our own kernel will; they
    are placed last, as some of them become one node.
    """

    def __init__(
        self,
        model: ir.Model,
        data_name: str,
        weight_format: WeightFormat,
        bits: Mapping[str, int] | None = None,
    ) -> None:
        self.model, self.format, self.bits = model, weight_format, bits or {}
        self.data = DataFile(model.graph, data_name)
        self.activations = int8_gemm.Activations(model.graph)
        self.emulation = Emulation(model.graph)
        self.products: list[NBitsProduct] = []
        self.packed: list[PackedProduct] = []
        self.native = weight_format.kernels == NATIVE

    def run(self) -> list[AnyWeight]:
        """Lower all weights of the graph. Returns them in the order of the data file."""
        weights: list[AnyWeight] = list(self.lower_quantized())
        weights += self.place_experts()
        RemoveUnusedNodesPass()(self.model)  # what read the quantized values
        for value in list(self.model.graph.initializers.values()):
            weights += self.lower_initializer(value)
        weights += place_products(self.data, self.products)
        weights += self.place_experts()
        return weights + list(place_packed(self.data, self.packed))

    def lower_quantized(self) -> Iterator[AnyWeight]:
        """Lower the export's quantized weights, to a kernel that reads them or dequantized; then
        activations are rounded in the graph."""
        for node in list(self.model.graph.all_nodes()):
            is_matmul = node.op_type == "MatMul" and node.domain == ""
            source = quantized_values(node) if is_matmul else None
            if source is None:
                continue
            packed = packed_product(source, node) if self.native else None
            if packed is not None:
                self.packed.append(packed)
                node.replace_input_with(1, None)  # the stored values have no reader any more
                continue
            gemm, kernel = int8_gemm_kernel(source, node), nbits_kernel(source)
            if gemm is not None:
                yield self.as_int8_gemm(str(node.name), source, [node], *gemm)
            elif kernel is not None:
                self.products.append(NBitsProduct(str(node.name), [node], source, kernel))
                node.replace_input_with(1, None)
            else:
                yield self.dequantized(source, node)

    def dequantized(self, source: QuantizedValues, node: ir.Node) -> DequantizedWeight:
        """Lower a weight that no kernel here reads to float32; its activations are rounded by
        nodes."""
        out_features, in_features = source.shape
        dims = (in_features, out_features)
        place = self.data.place(f"{node.name}/dequantized", dims, ir.DataType.FLOAT)
        node.replace_input_with(1, place.value)
        self.emulation.round_input(node, source.scheme)
        return DequantizedWeight(source, place.offset, place.num_bytes)

    def lower_initializer(self, value: ir.Value) -> Iterator[AnyWeight]:
        """Lower initializer -> [Cast] -> [Transpose] to one initializer in the form that its user
        reads."""
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor) or tensor.location == self.data.data_name:
            return
        if tensor.dtype not in FLOATS:
            if value.uses():
                yield self.kept(value, tensor)
            return
        for final, transposed in final_forms(value):
            users = matmuls(final) if transposed and self.format.bits else []
            if users and self.native:
                bits = self.bits.get(str(value.name), FOUR_BITS.bits)
                self.packed.append(rounded_product(value, tensor, users, self.format, bits))
            elif users and self.format.is_int8_gemm:
                out_features, in_features = tensor.shape.numpy()
                kernel = int8_gemm.Int8Kernel(in_features, out_features)
                yield self.as_int8_gemm(str(value.name), tensor, users, kernel)
            elif users:
                self.products.append(low_bit_product(value, tensor, users, self.format))
            else:
                yield self.stored(value, tensor, final, transposed=transposed)

    def place_experts(self) -> Iterator[AnyWeight]:
        """Place the weights of mixtures of experts, where our own kernel computes all of their
        products: each mixture becomes one node."""
        by_node = {id(node): one for one in self.packed for node in one.nodes}
        for mixture in list(mixtures(self.model.graph)):
            nodes = [node for expert in mixture.experts for node in expert.products]
            products = [one for node in nodes if (one := by_node.get(id(node))) is not None]
            layout = experts_layout(products) if len(products) == len(nodes) else None
            if layout is None:
                continue
            taken = {id(one) for one in products}
            self.packed = [one for one in self.packed if id(one) not in taken]
            name = str(mixture.total.name)
            place = self.data.place_packed(name, layout)
            for i, one in enumerate(products):
                expert, part = i // len(PARTS), PARTS[i % len(PARTS)]
                start, distance = layout.place(expert, part)
                form, at = layout.layout(part, expert), place.offset + start
                yield ExpertWeight(one.source, form, one.rounding, at, distance)
            x_scales = [expert.x_scale for expert in mixture.experts]
            x_scale = yield from self.place_side_by_side(f"{name}/x_scale", x_scales)
            inner_scales = [expert.inner_scale for expert in mixture.experts]
            inner_scale = yield from self.place_side_by_side(f"{name}/inner_scale", inner_scales)
            rounding = products[0].rounding
            replace_mixture(mixture, layout, rounding, place.value, (x_scale, inner_scale))

    def place_side_by_side(
        self, name: str, vectors: list[ir.Value | None]
    ) -> Generator[AnyWeight, None, ir.Value | None]:
        """Place stored vectors [n] as one tensor [count, n], which is returned; None where there
        are none."""
        tensors = [one.const_value for one in vectors if one is not None]
        stored = [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]
        if not stored:
            return None
        (width,) = stored[0].shape.numpy()
        place = self.data.place(name, (len(stored), width), ir.DataType.FLOAT)
        size = place.num_bytes // len(stored)
        for i, tensor in enumerate(stored):
            yield ExternalWeight(tensor, False, place.offset + i * size, size)
        return place.value

    def kept(self, value: ir.Value, tensor: ir.ExternalTensor) -> KeptTensor:
        """Place a tensor that is not a float as it is, such as the order of a weight's inputs."""
        dims = tuple(tensor.shape.numpy())
        place = self.data.place(f"{value.name}/kept", dims, tensor.dtype)
        value.replace_all_uses_with(place.value)
        return KeptTensor(tensor, place.offset, place.num_bytes)

    def stored(
        self, value: ir.Value, tensor: ir.ExternalTensor, final: ir.Value, *, transposed: bool
    ) -> ExternalWeight:
        """Place a weight in float32, in the layout that its user reads."""
        dims = tuple(tensor.shape.numpy())
        name = f"{value.name}/{'t' if transposed else 'fp32'}"
        place = self.data.place(name, dims[::-1] if transposed else dims, ir.DataType.FLOAT)
        final.replace_all_uses_with(place.value)
        return ExternalWeight(tensor, transposed, place.offset, place.num_bytes)

    def as_int8_gemm(
        self,
        name: str,
        source: ir.ExternalTensor | QuantizedValues,
        users: list[ir.Node],
        kernel: int8_gemm.Int8Kernel,
        x: ir.Value | None = None,
    ) -> Int8GemmWeight:
        """Lower the MatMuls of one weight to int8 GEMMs; `x` is their input where it is not the
        node's own."""
        values, scales = self.data.place_int8(name, kernel)
        for node in users:
            given = node.inputs[0] if x is None else x
            assert given is not None
            int8_gemm.replace_matmul(
                node, self.activations, kernel, given, values.value, scales.value
            )
        return Int8GemmWeight(source, kernel, values.offset, scales.offset)


def lower_weights(
    model: ir.Model,
    data_name: str,
    weight_format: WeightFormat = FP32,
    bits: Mapping[str, int] | None = None,
) -> list[AnyWeight]:
    """Replace the weights of a graph by those that the engine's kernels read; they will stand in
    the file `data_name`, in the order of the list.

    With 4 or 8 bits the weights that only MatMuls read are quantized; biases, norms and the like
    stay; `bits` says which get more than 4 of those with minimums. BuildError where this CPU
    cannot compute with them.
    """
    native = weight_format.kernels == NATIVE
    if weight_format.is_int8_gemm and not native and not int8_gemm.is_exact_here():
        reason = "this CPU adds up products of 8-bit integers in 16 bits, which are too few"
        raise BuildError(reason, "Build with `weights` int8 `weight_block` 128.")
    return WeightLowering(model, data_name, weight_format, bits).run()


# ---- kernels


def int8_gemm_kernel(
    source: QuantizedValues, node: ir.Node
) -> tuple[int8_gemm.Int8Kernel, ir.Value] | None:
    """The int8 GEMM that these values and activations are, and what it reads; None where they are
    not one."""
    scheme, (out_features, in_features), x = source.scheme, source.shape, node.inputs[0]
    fits = scheme.weight == "int8" and not source.block_size and in_features <= int8_gemm.MAX_INPUTS
    if not fits or not int8_gemm.is_exact_here():
        return None
    if scheme.activations == "dynamic token":
        return (int8_gemm.Int8Kernel(in_features, out_features), x) if x is not None else None
    static = int8_gemm.static_input(node) if scheme.activations == "static tensor" else None
    return (
        (int8_gemm.Int8Kernel(in_features, out_features, static[1]), static[0]) if static else None
    )


def packed_product(source: QuantizedValues, node: ir.Node) -> PackedProduct | None:
    """The product that our own kernel makes of these values and activations; None where there is
    no kernel. Activations of FP4 are rounded to 8 bits."""
    activations, name, nodes = source.scheme.activations, str(node.name), [node]
    rounding, x = IN_BLOCKS, None
    if activations == "dynamic token":
        rounding = RowRounding(by_row=True)
    elif activations == "static tensor":
        static = int8_gemm.static_input(node)
        if static is None:
            return None
        x, rounding = static[0], RowRounding(scale=static[1])
    layout = layout_of(source.form())
    return None if layout is None else PackedProduct(name, nodes, source, layout, rounding, x)


def rounded_product(
    value: ir.Value,
    tensor: ir.ExternalTensor,
    users: list[ir.Node],
    weight_format: WeightFormat,
    bits: int,
) -> PackedProduct:
    """The MatMuls of a stored weight that is quantized here, for our own kernel; with minimums to
    one of FORMS by its bits."""
    out_features, in_features = tensor.shape.numpy()
    assert weight_format.bits is not None
    by_row = weight_format.is_int8_gemm
    block = low_bit_matmul.WIDEST if by_row else weight_format.block
    layout = WeightLayout(weight_format.bits, block, in_features, out_features)
    if weight_format.minimums:
        layout = layout_of_form(FORMS[bits], in_features, out_features)
    return PackedProduct(str(value.name), users, tensor, layout, RowRounding(by_row=by_row))


def nbits_kernel(source: QuantizedValues) -> matmul_nbits.NBitsKernel | None:
    """The form of MatMulNBits that multiplies by these values as they are; activations must not be
    rounded before."""
    bits, block = INTEGERS.get(source.nodes.values.dtype), source.block_size or DEFAULT_BLOCK
    if bits is None or source.nodes.minimums is not None or source.scheme.activations != "none":
        return None
    if block not in matmul_nbits.BLOCK_SIZES:
        return None
    points = source.nodes.zero_points is not None
    return matmul_nbits.NBitsKernel(bits, block, *source.shape[::-1], zero_points=points)


def low_bit_product(
    value: ir.Value, tensor: ir.ExternalTensor, users: list[ir.Node], weight_format: WeightFormat
) -> NBitsProduct:
    """The MatMuls of a stored weight that is quantized here."""
    out_features, in_features = tensor.shape.numpy()
    assert weight_format.bits is not None
    kernel = matmul_nbits.NBitsKernel(
        weight_format.bits, weight_format.block, in_features, out_features
    )
    return NBitsProduct(str(value.name), users, tensor, kernel)


# ---- fused projections


AnyProduct = TypeVar("AnyProduct", NBitsProduct, PackedProduct)


def grouped(products: list[AnyProduct]) -> list[list[AnyProduct]]:
    """The products, those together that can be one."""
    groups: dict[Hashable, list[AnyProduct]] = {}
    for product in products:
        groups.setdefault(product.group, []).append(product)
    return list(groups.values())


def place_products(data: DataFile, products: list[NBitsProduct]) -> Iterator[LowBitWeight]:
    """Place weights, fusing products that read the same rows: their weights stand one below the
    other, and all threads start less often."""
    for group in grouped(products):
        yield from place_group(data, group)


def place_packed(data: DataFile, products: list[PackedProduct]) -> Iterator[PackedWeight]:
    """Place weights that our own kernel reads; products of the same rows become one node, which
    rounds them once."""
    for group in grouped(products):
        first, places = group[0], []
        alone = len(group) == 1 and makes_logits(first)
        for product in group:
            place = data.place_packed(product.name, product.layout, alone=alone)
            places.append(place)
            yield PackedWeight(
                product.source, product.layout, product.rounding, place.offset, alone=alone
            )
        if len(group) > 1:
            nodes = [product.nodes[0] for product in group]
            layouts, values = [one.layout for one in group], [place.value for place in places]
            replace_matmuls(nodes, first.rows_of(nodes[0]), layouts, values, first.rounding)
            continue
        for node in first.nodes:
            rows, values = first.rows_of(node), [places[0].value]
            replace_matmuls([node], rows, [first.layout], values, first.rounding)


def makes_logits(product: PackedProduct) -> bool:
    """Whether a product is the lm_head: what it makes are the graph's logits."""
    output = product.nodes[0].outputs[0]
    return len(product.nodes) == 1 and output.is_graph_output() and output.name == LOGITS


def experts_layout(products: list[PackedProduct]) -> ExpertsLayout | None:
    """The layout of experts, of each of which `products` has gate, up and down; None where they
    are not all of one form, or round rows by a scale that is given."""
    first = products[0].rounding
    if any(one.rounding != first or len(one.nodes) > 1 for one in products):
        return None
    if first.scale is not None:
        return None
    rows = [products[i : i + 3] for i in range(0, len(products), 3)]
    return layout_of_experts([(gate.layout, up.layout, down.layout) for gate, up, down in rows])


def place_group(data: DataFile, group: list[NBitsProduct]) -> Iterator[LowBitWeight]:
    """Place one MatMulNBits instead of a group of products."""
    sizes = [product.kernel.out_features for product in group]
    fused = replace(group[0].kernel, out_features=sum(sizes))
    places = data.place_low_bit(group[0].name, fused)
    weights = [place.value for place in places]
    if len(group) == 1:
        for node in group[0].nodes:
            matmul_nbits.replace_matmul(node, fused, weights)
    else:
        fuse_projections([product.nodes[0] for product in group], sizes, fused, weights)
    offsets = [place.offset for place in places]
    for product in group:
        yield LowBitWeight(product.source, product.kernel, *offsets)
        kernel = product.kernel
        sizes = [kernel.values_bytes, kernel.scales_bytes, kernel.zeros_bytes]
        offsets = [offset + size for offset, size in zip(offsets, sizes, strict=False)]


# ---- where a weight is read


def matmuls(value: ir.Value) -> list[ir.Node]:
    """The MatMuls that have `value` as their weight; none where something else reads it, or one
    whose weight must keep its precision."""
    uses = list(value.uses())
    fitting = all(
        node.op_type == "MatMul"
        and node.domain == ""
        and index == 1
        and KEEP_PRECISION not in node.metadata_props
        for node, index in uses
    )
    return [node for node, _ in uses] if fitting else []


def final_forms(value: ir.Value) -> Iterator[tuple[ir.Value, bool]]:
    """The values that `value` ends in after an optional Cast and an optional Transpose of two
    axes, and whether they are transposed."""
    users = [node for node, _ in value.uses()]
    casts = [node for node in users if node.op_type == "Cast"]
    transposes = [node for node in users if node.op_type == "Transpose"]
    if casts:
        yield from (form for cast in casts for form in final_forms(cast.outputs[0]))
    elif transposes:
        yield from ((node.outputs[0], True) for node in transposes)
    elif users:
        yield value, False
