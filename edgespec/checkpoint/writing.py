"""Tensors between files, numpy and torch; safetensors files are written one tensor at a time.

Knows bytes and names. Knows nothing of models or schemes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.safetensors import read_header
from edgespec.checkpoint.source import ByteSink, TensorInfo
from edgespec.safe_read.tensors import DTYPES, numpy_dtype

# Name in numpy, ml_dtypes and torch -> name in a safetensors header
SAFETENSORS_DTYPES = {dtype: code for code, dtype in DTYPES.items()}


MAX_SHARD_BYTES = 5 * 10**9
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """One tensor to be written; `write` produces its bytes when they are needed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    write: Callable[[ByteSink], object]

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


def copied(checkpoint: Checkpoint, name: str) -> TensorChunk:
    """Returns a tensor of the checkpoint, copied byte for byte."""
    info = checkpoint.tensors[name]
    return TensorChunk(name, info.dtype, info.shape, lambda file: checkpoint.write_to(name, file))


def array_piece(name: str, array: NDArray[Any]) -> TensorChunk:
    """Returns an array as a tensor to be written."""
    return TensorChunk(
        name, str(array.dtype), array.shape, lambda file: file.write(as_bytes(array))
    )


def as_bytes(array: NDArray[Any]) -> memoryview:
    """Returns the bytes of an array in C order, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def stored_pieces(path: Path) -> list[TensorChunk]:
    """Returns the tensors of a safetensors file that we wrote, copied byte for byte."""
    return [
        TensorChunk(info.name, info.dtype, info.shape, _bytes_of(path, info))
        for info in read_header(path)
    ]


def _bytes_of(path: Path, info: TensorInfo) -> Callable[[ByteSink], object]:
    def write(file: ByteSink) -> None:
        with path.open("rb") as source:
            source.seek(info.offset)
            for low in range(0, info.num_bytes, _CHUNK_BYTES):
                file.write(source.read(min(_CHUNK_BYTES, info.num_bytes - low)))

    return write


def write_model(
    directory: Path,
    pieces: Iterable[TensorChunk],
    advance: Callable[[int], None],
    max_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes model.safetensors, or above `max_bytes` shards and their index as transformers does.

    Calls `advance` with the bytes of each tensor.
    """
    shards: list[list[TensorChunk]] = [[]]
    size = 0
    for piece in pieces:
        if shards[-1] and size + piece.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(piece)
        size += piece.num_bytes
    if len(shards) == 1:
        write_safetensors(directory / "model.safetensors", shards[0], advance)
        return
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(directory / name, shard, advance)
    index = {
        "metadata": {"total_size": sum(piece.num_bytes for shard in shards for piece in shard)},
        "weight_map": {
            piece.name: name for name, shard in zip(names, shards, strict=True) for piece in shard
        },
    }
    (directory / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=2) + "\n", encoding="utf-8"
    )


def write_safetensors(
    path: Path, pieces: Iterable[TensorChunk], advance: Callable[[int], None]
) -> None:
    """Writes one safetensors file. Calls `advance` with the bytes of each tensor."""
    pieces = list(pieces)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.num_bytes
        header[piece.name] = {
            "dtype": SAFETENSORS_DTYPES[piece.dtype],
            "shape": list(piece.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            piece.write(file)
            advance(piece.num_bytes)
        file.flush()
        os.fsync(file.fileno())


def to_torch(array: NDArray[Any]) -> Any:
    """Returns a torch tensor of the same memory and dtype, bfloat16 and float8 included."""
    import torch

    flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return flat.view(getattr(torch, str(array.dtype))).reshape(array.shape)


def to_numpy(tensor: Any) -> NDArray[Any]:
    """Returns an array of the same shape and dtype as a torch tensor on any device."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    array: NDArray[Any] = flat.view(np.dtype(getattr(ml_dtypes, name, name))).reshape(
        tuple(tensor.shape)
    )
    return array
