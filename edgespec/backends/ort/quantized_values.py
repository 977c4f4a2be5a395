"""Reads the quantized weights of a canonical graph as values.

Knows the bytes of the tensors that `quantization.weight_nodes` finds. `weights` knows what the CPU
makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.artifacts.hashes import contained
from edgespec.contract import SCHEME
from edgespec.errors import ContractError
from edgespec.quantization.quantized_weight import QuantizedWeight
from edgespec.quantization.schemes import SCHEMES, Scheme
from edgespec.quantization.weight_nodes import Factors, WeightNodes, weight_nodes

NUMPY: dict[ir.DataType, np.dtype[Any]] = {
    ir.DataType.FLOAT: np.dtype(np.float32),
    ir.DataType.FLOAT16: np.dtype(np.float16),
    ir.DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    ir.DataType.INT8: np.dtype(np.int8),
    ir.DataType.UINT8: np.dtype(np.uint8),
    ir.DataType.INT64: np.dtype(np.int64),
    ir.DataType.FLOAT8E4M3FN: np.dtype(ml_dtypes.float8_e4m3fn),
    ir.DataType.FLOAT8E8M0: np.dtype(ml_dtypes.float8_e8m0fnu),
    ir.DataType.INT4: np.dtype(ml_dtypes.int4),
    ir.DataType.UINT4: np.dtype(ml_dtypes.uint4),
    ir.DataType.FLOAT4E2M1: np.dtype(ml_dtypes.float4_e2m1fn),
}
FOUR_BITS = (ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.FLOAT4E2M1)


@dataclass(frozen=True, slots=True)
class QuantizedValues:
    """A weight of a graph by its nodes, with the name and the scheme of its product."""

    name: str
    scheme: Scheme
    nodes: WeightNodes

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight: [out, in]."""
        return self.nodes.shape

    @property
    def block_size(self) -> int:
        """The weights along in that share a scale; 0: one scale a channel, or one in all."""
        return self.nodes.block

    @property
    def is_symmetric(self) -> bool:
        """Whether values have neither zero points nor minimums."""
        return self.nodes.zero_points is None and self.nodes.minimums is None

    def form(self) -> QuantizedWeight:
        """The weight with zeros, which take no memory, for its values."""
        values = self.nodes.values
        assert isinstance(values, ir.ExternalTensor)
        zeros = np.broadcast_to(np.zeros((), NUMPY[values.dtype]), self.shape)
        return self.weight(zeros, Path(values.base_dir))

    def read(self, directory: Path) -> QuantizedWeight:
        """The weight with values [out, in] and what belongs to their blocks, [blocks of out, blocks
        of in]. BundleError for a data file outside `directory`."""
        values = read_tensor(self.nodes.values, directory)
        return self.weight(values if self.nodes.transposed else values.T, directory)

    def weight(self, values: NDArray[Any], directory: Path) -> QuantizedWeight:
        """The weight with these values."""
        (out_features, in_features), nodes = self.shape, self.nodes
        scales, shared = self.numbers(nodes.scales, directory)
        minimums, shared_minimums = None, None
        if nodes.minimums is not None:
            minimums, shared_minimums = self.numbers(nodes.minimums, directory)
        points = nodes.zero_points
        is_global = shared is not None and shared.size == 1 and not nodes.scales.group
        block = (1 if scales.size > 1 or nodes.block else out_features, nodes.block or in_features)
        return QuantizedWeight(
            self.name,
            self.scheme,
            values,
            scales,
            block,
            zero_points=None if points is None else self.of_blocks(points, directory),
            global_scale=float(shared.item()) if shared is not None and is_global else None,
            minimums=minimums,
            super_block=nodes.scales.group or 1,
            super_scales=None if is_global else shared,
            super_minimums=shared_minimums,
        )

    def numbers(
        self, factors: Factors, directory: Path
    ) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Numbers of blocks, and what they are multiplied by."""
        stored = self.of_blocks(factors.stored, directory)
        shared = factors.shared
        if shared is None:
            return stored, None
        return stored, self.of_blocks(shared, directory) if factors.group else shared.numpy()

    def of_blocks(self, tensor: ir.TensorProtocol, directory: Path) -> NDArray[Any]:
        """A tensor of numbers of blocks: [blocks of out, blocks of in]."""
        array = read_tensor(tensor, directory)
        if not self.nodes.block:
            return array.reshape(-1, 1)
        return array if self.nodes.transposed else array.T


def quantized_values(node: ir.Node) -> QuantizedValues | None:
    """The quantized weight of a MatMul; None where its weight is not quantized. ContractError for a
    form that this version does not read."""
    name, nodes = node.metadata_props.get(SCHEME), weight_nodes(node.inputs[1])
    if nodes is None and name is None:
        return None
    scheme = None if name is None else SCHEMES.get(name)
    if nodes is None or scheme is None or not is_read(nodes):
        message = (
            f"{node.name}: a quantized weight of the scheme {name!r} in a form that this version"
            " does not read"
        )
        raise ContractError(message, "Export the checkpoint again with this version.")
    return QuantizedValues(str(node.name), scheme, nodes)


def is_read(nodes: WeightNodes) -> bool:
    """Whether values stand in a file, types are known, and all that belongs to their blocks has one
    number for each of them, or for so many as share a factor."""
    factors = [one for one in (nodes.scales, nodes.minimums) if one is not None]
    of_blocks = [nodes.zero_points, *(one.stored for one in factors)]
    shared = [one.shared for one in factors]
    tensors = [one for one in (nodes.values, *of_blocks, *shared) if one is not None]
    if not isinstance(nodes.values, ir.ExternalTensor) or any(
        t.dtype not in NUMPY for t in tensors
    ):
        return False
    out_features, in_features = nodes.shape
    groups = {one.group for one in factors}
    if nodes.block < 0 or min(groups) < 0 or len(groups) > 1:
        return False
    count = -(-in_features // nodes.block) if nodes.block else 1
    rows = out_features if nodes.block or nodes.scales.stored.size > 1 else 1
    many = -(-count // nodes.scales.group) if nodes.scales.group else 0

    def has(tensor: ir.TensorProtocol | None, rows: int, columns: int) -> bool:
        if tensor is None:
            return True
        dims = tensor.shape.numpy()
        if not nodes.block or not columns:
            return tensor.size == rows * max(columns, 1)
        return dims == ((rows, columns) if nodes.transposed else (columns, rows))

    whole = all(has(tensor, rows, count) for tensor in of_blocks)
    return whole and all(has(tensor, rows if many else 1, many) for tensor in shared)


def read_tensor(source: ir.TensorProtocol, directory: Path) -> NDArray[Any]:
    """The array of a tensor in the graph or in its data file; 4-bit values one per element.
    BundleError for a data file outside `directory`."""
    if not isinstance(source, ir.ExternalTensor):
        return source.numpy()
    dims, dtype = source.shape.numpy(), NUMPY[source.dtype]
    count = int(np.prod(dims))
    with contained(directory, str(source.location)).open("rb") as file:
        file.seek(source.offset or 0)
        if source.dtype not in FOUR_BITS:
            return np.fromfile(file, dtype, count).reshape(dims)
        packed = np.fromfile(file, np.uint8, -(-count // 2))
    values = np.empty(2 * len(packed), np.uint8)
    values[0::2], values[1::2] = packed & 0xF, packed >> 4
    if source.dtype == ir.DataType.INT4:
        signed: NDArray[np.int8] = (values << 4).view(np.int8) >> 4
        return signed.astype(dtype)[:count].reshape(dims)
    return values.view(dtype)[:count].reshape(dims)
