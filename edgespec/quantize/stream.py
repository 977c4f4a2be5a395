"""Quantization without calibration data: MXFP8, one tensor at a time, from file to file.

Knows the arithmetic of MXFP8, bit for bit as ModelOpt 0.47 packs it (MXFP8QTensor), and its two
JSON files. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.source import ByteSink
from edgespec.checkpoint.writing import TensorChunk, as_bytes, copied, write_model
from edgespec.quantize.base import EMBEDDING, HEAD, Base, unquantized_globs
from edgespec.quantize.plan import QuantizationPlan

BLOCK, E4M3_MAX = 32, np.float32(448.0)
PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # readers detect the layout by the producer
_ROWS_BYTES = 4 << 20
_SMALL = (".conv1d.weight", ".in_proj_a.weight", ".in_proj_b.weight")  # of linear attention


def write_mxfp8(
    base: Base,
    plan: QuantizationPlan,
    directory: Path,
    advance: Callable[[int], None],
    changed: Callable[[Iterable[TensorChunk]], Iterable[TensorChunk]] = iter,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Writes the weights and calls `advance` with the bytes of each tensor. `changed` replaces
    tensors outside the plan.

    Returns hf_quant_config.json and the section quantization_config of config.json.
    """
    write_model(directory, changed(pieces(base, plan)), advance)
    ignored = sorted(unquantized(base, plan)) + unquantized_globs(base.checkpoint)
    settings = {
        "quant_algo": "MXFP8",
        "kv_cache_quant_algo": None,
        "group_size": BLOCK,
        "exclude_modules": ignored,
    }
    beside = {"producer": PRODUCER, "quantization": settings}
    inside = {
        "ignore": ignored,
        "quant_algo": "MXFP8",
        "producer": PRODUCER,
        "quant_method": "modelopt",
    }
    return beside, inside


def unquantized(base: Base, plan: QuantizationPlan) -> list[str]:
    """Returns the modules that ModelOpt lists as not quantized.

    These are lm_head, the embedding, excluded Linears, and small projections of linear attention.
    """
    small = [
        name.removesuffix(".weight")
        for name in base.checkpoint.tensors
        if name.startswith(f"{base.stack}.layers.") and name.endswith(_SMALL)
    ]
    tables = [name for name in (HEAD, base.stored(EMBEDDING)) if name not in plan.layers]
    return [*tables, *plan.left_out, *small]


def pieces(base: Base, plan: QuantizationPlan) -> Iterator[TensorChunk]:
    """Yields every tensor of the result in the checkpoint's order.

    A quantized lm_head of a model with tied embeddings comes last.
    """
    checkpoint = base.checkpoint
    for name in checkpoint.tensors:
        module = name.removesuffix(".weight")
        if module in plan.layers and name != module:
            yield from linear_pieces(checkpoint, f"{base.source_of(module)}.weight", module)
        else:
            yield copied(checkpoint, name)
    if HEAD in plan.layers and f"{HEAD}.weight" not in checkpoint.tensors:
        yield from linear_pieces(checkpoint, f"{base.source_of(HEAD)}.weight", HEAD)


def linear_pieces(checkpoint: Checkpoint, source: str, module: str) -> Iterator[TensorChunk]:
    """Yields weight and weight_scale of a Linear; the scales exist once the weight is written."""
    out_features, in_features = checkpoint.tensors[source].shape
    scales = np.empty((out_features, in_features // BLOCK), np.uint8)

    def write_values(file: ByteSink) -> None:
        rows = max(1, _ROWS_BYTES // (4 * in_features))
        for low in range(0, out_features, rows):
            values, scales[low : low + rows] = mxfp8(checkpoint.read_rows(source, low, low + rows))
            file.write(as_bytes(values))

    yield TensorChunk(
        f"{module}.weight", "float8_e4m3fn", (out_features, in_features), write_values
    )
    yield TensorChunk(
        f"{module}.weight_scale", "uint8", scales.shape, lambda file: file.write(as_bytes(scales))
    )


def mxfp8(weight: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Quantizes a weight [out, in] to MXFP8 (OCP Microscaling Formats specification 1.0).

    Returns the values float8_e4m3fn [out, in] and the scales [out, in / 32]: exponents + 127 of the
    smallest power of two with which the block does not overflow.
    """
    rows, columns = weight.shape
    blocks = weight.astype(np.float32).reshape(rows, columns // BLOCK, BLOCK)
    min_scale = np.abs(blocks).max(-1) / E4M3_MAX
    with np.errstate(divide="ignore"):
        exponents = np.ceil(np.where(min_scale > 0, np.log2(min_scale), np.float32(-127.0)))
    scales = (np.clip(exponents, -127, 127) + 127).astype(np.uint8)
    scaled = blocks * np.exp2(127 - scales.astype(np.float32))[..., None]
    values = np.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    return values.reshape(rows, columns), scales
