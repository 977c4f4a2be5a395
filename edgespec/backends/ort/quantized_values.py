"""Reads the quantized weights of a canonical graph: DequantizeLinear with its values and scales, as
one value.

Knows the standard forms of a weight behind a MatMul and the bytes of four-bit types. `weights`
knows what the CPU makes of them.
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

NUMPY: dict[ir.DataType, np.dtype[Any]] = {
    ir.DataType.FLOAT: np.dtype(np.float32),
    ir.DataType.FLOAT16: np.dtype(np.float16),
    ir.DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    ir.DataType.INT8: np.dtype(np.int8),
    ir.DataType.INT64: np.dtype(np.int64),
    ir.DataType.FLOAT8E4M3FN: np.dtype(ml_dtypes.float8_e4m3fn),
    ir.DataType.FLOAT8E8M0: np.dtype(ml_dtypes.float8_e8m0fnu),
    ir.DataType.INT4: np.dtype(ml_dtypes.int4),
    ir.DataType.FLOAT4E2M1: np.dtype(ml_dtypes.float4_e2m1fn),
}
FOUR_BITS = (ir.DataType.INT4, ir.DataType.FLOAT4E2M1)


@dataclass(frozen=True, slots=True)
class QuantizedValues:
    """A weight as DequantizeLinear reads it; `transposed` where its values stand as [out, in] and a
    Transpose follows."""

    name: str
    scheme: Scheme
    values: ir.ExternalTensor
    scales: ir.TensorProtocol
    global_scale: float | None
    block_size: int  # 0: one scale a channel, or one in all
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight: [out, in]."""
        rows, columns = self.values.shape.numpy()
        return (rows, columns) if self.transposed else (columns, rows)

    def read(self, directory: Path) -> QuantizedWeight:
        """The weight with values [out, in] and scales [blocks of out, blocks of in]. BundleError
        for a data file outside `directory`."""
        out_features, in_features = self.shape
        values, scales = read_tensor(self.values, directory), read_tensor(self.scales, directory)
        if not self.transposed:
            values, scales = values.T, scales.T
        per_row = scales.size > 1
        if not self.block_size:
            scales = scales.reshape(-1, 1)
        block = (1 if per_row or self.block_size else out_features, self.block_size or in_features)
        return QuantizedWeight(
            self.name, self.scheme, values, scales, block, global_scale=self.global_scale
        )


def quantized_values(node: ir.Node) -> QuantizedValues | None:
    """The quantized weight of a MatMul; None where its weight is not quantized. ContractError for a
    form that this version does not read."""
    weight = node.inputs[1]
    maker = weight.producer() if weight is not None else None
    transposed = maker is not None and maker.op_type == "Transpose"
    if maker is not None and transposed:
        source = maker.inputs[0]
        maker = source.producer() if source is not None else None
    if maker is None or maker.op_type != "DequantizeLinear":
        return None
    values, scale = maker.inputs[0], maker.inputs[1]
    name = node.metadata_props.get(SCHEME)
    if (
        values is None
        or not isinstance(values.const_value, ir.ExternalTensor)
        or scale is None
        or name not in SCHEMES
    ):
        message = (
            f"{node.name}: a quantized weight of the scheme {name!r} in a form that this version"
            " does not read"
        )
        raise ContractError(message, "Export the checkpoint again with this version.")
    global_scale, scale_maker = None, scale.producer()
    if scale_maker is not None:
        factor = scale_maker.inputs[1].const_value if scale_maker.inputs[1] is not None else None
        scale = scale_maker.inputs[0]
        assert factor is not None
        global_scale = float(factor.numpy())
    assert scale is not None
    assert scale.const_value is not None
    block = maker.attributes["block_size"].as_int() if "block_size" in maker.attributes else 0
    return QuantizedValues(
        str(node.name),
        SCHEMES[name],
        values.const_value,
        scale.const_value,
        global_scale,
        block,
        transposed=transposed,
    )


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
