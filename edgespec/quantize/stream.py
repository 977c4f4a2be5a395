"""Formats that need no data, converted from safetensors to safetensors: the memory of one tensor, and no model.

Knows MXFP8's arithmetic, bit for bit as ModelOpt 0.47 packs it (MXFP8QTensor), and its two JSON files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.files import ByteSink, Checkpoint
from edgespec.quantize.plan import EMBEDDING, HEAD, Plan
from edgespec.quantize.tensors import Piece, as_bytes, copied, write_safetensors

BLOCK, E4M3_MAX = 32, np.float32(448.0)
PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # whose layout this is: readers go by it
_ROWS_BYTES = 4 << 20


def write_mxfp8(
    checkpoint: Checkpoint, plan: Plan, path: Path, advance: Callable[[int], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write `path`; returns hf_quant_config.json and config.json's quantization_config."""
    write_safetensors(path, pieces(checkpoint, plan), advance)
    ignored = [name for name in (HEAD, EMBEDDING) if name not in plan.layers] + list(plan.left_out)
    ignored = sorted(ignored)
    settings = {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "group_size": BLOCK, "exclude_modules": ignored}
    beside = {"producer": PRODUCER, "quantization": settings}
    inside = {"ignore": ignored, "quant_algo": "MXFP8", "producer": PRODUCER, "quant_method": "modelopt"}
    return beside, inside


def pieces(checkpoint: Checkpoint, plan: Plan) -> Iterator[Piece]:
    """Every tensor of the result in the checkpoint's order; a quantised head of a tied model stands at the end."""
    for name in checkpoint.tensors:
        module = name.removesuffix(".weight")
        if module in plan.layers and name != module:
            yield from linear_pieces(checkpoint, name, module)
        else:
            yield copied(checkpoint, name)
    if HEAD in plan.layers and f"{HEAD}.weight" not in checkpoint.tensors:
        yield from linear_pieces(checkpoint, f"{EMBEDDING}.weight", HEAD)


def linear_pieces(checkpoint: Checkpoint, source: str, module: str) -> Iterator[Piece]:
    out_features, in_features = checkpoint.tensors[source].shape
    scales = np.empty((out_features, in_features // BLOCK), np.uint8)

    def write_codes(file: ByteSink) -> None:
        weight = checkpoint.read(source)
        rows = max(1, _ROWS_BYTES // (4 * in_features))
        for low in range(0, out_features, rows):
            codes, scales[low : low + rows] = mxfp8(weight[low : low + rows])
            file.write(as_bytes(codes))

    yield Piece(f"{module}.weight", "float8_e4m3fn", (out_features, in_features), write_codes)
    yield Piece(f"{module}.weight_scale", "uint8", scales.shape, lambda file: file.write(as_bytes(scales)))


def mxfp8(weight: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Codes float8_e4m3fn [out, in], and exponents + 127 [out, in / 32] of the least power of two that fits a block."""
    rows, columns = weight.shape
    blocks = weight.astype(np.float32).reshape(rows, columns // BLOCK, BLOCK)
    reach = np.abs(blocks).max(-1) / E4M3_MAX
    with np.errstate(divide="ignore"):
        exponents = np.ceil(np.where(reach > 0, np.log2(reach), np.float32(-127.0)))
    scales = (np.clip(exponents, -127, 127) + 127).astype(np.uint8)
    scaled = blocks * np.exp2(127 - scales.astype(np.float32))[..., None]
    codes = np.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    return codes.reshape(rows, columns), scales
