"""Weights in safetensors files: eight bytes with the header's length, the header as JSON, the
tensors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from edgespec.checkpoint.digests import Digests
from edgespec.checkpoint.shards import check_complete, read_weight_map, shards
from edgespec.checkpoint.source import (
    DOWNLOAD_AGAIN,
    StoredTensors,
    TensorInfo,
    reading,
    some_of,
)
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.safe_read.regular import open_regular
from edgespec.safe_read.tensors import (
    DTYPES,
    MAX_HEADER_BYTES,
    header_entries,
    tensor_of,
)


def find(path: Path, *, allow_pickle: bool) -> StoredTensors | None:
    """Returns the tensors of a directory's safetensors files; None where it has none.

    Raises CheckpointError for several files without an index, and as `read_header` does.
    """
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        return _from_safetensors([single])
    if index.exists():
        return _from_index(index)
    others = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("."))
    if len(others) == 1:
        return _from_safetensors(others)
    if others:
        raise CheckpointError(
            f"{path} has {len(others)} safetensors files ({some_of(file.name for file in others)}) "
            "and no model.safetensors.index.json that maps tensors to files.",
            "Download the index as well, or keep only the file that is the model.",
        )
    return None


def _from_safetensors(files: Sequence[Path]) -> StoredTensors:
    digests = Digests(files)
    tensors = {info.name: info for file in files for info in read_header(file)}
    return StoredTensors.of_files(tensors, digests)


def _from_index(index: Path) -> StoredTensors:
    """Reads the shards of an index. Of duplicate tensors the one that the index names counts."""
    weight_map = read_weight_map(index)
    files = shards(index, weight_map)
    digests = Digests(files)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for info in read_header(file):
            if weight_map.get(info.name, file.name) == file.name:
                tensors[info.name] = info
    check_complete(index, weight_map, tensors)
    return StoredTensors.of_files(tensors, digests)


def read_header(path: Path) -> list[TensorInfo]:
    """Returns the tensors of one safetensors file in the order of their bytes.

    Raises CheckpointError for a damaged file, in which tensors overlap or leave gaps, and
    UnsupportedModel for an unknown dtype.
    """
    with reading(path), open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        start = file.read(8)
        if start == b"version ":  # a git-lfs pointer begins "version https://git-lfs..."
            raise CheckpointError(
                f"{path} is a Git LFS pointer, not the weights.", "Run `git lfs pull` in it."
            )
        header_bytes = int.from_bytes(start, "little")
        if len(start) == 8 and header_bytes > MAX_HEADER_BYTES:
            raise _damaged(path, f"its header would be {header_bytes} bytes long")
        if size_bytes < 8 + header_bytes:
            raise _truncated(path, 8 + header_bytes, size_bytes)
        text = file.read(header_bytes)
    header = header_entries(text, lambda how: _damaged(path, how))
    infos = [_parse_entry(path, name, entry, 8 + header_bytes) for name, entry in header.items()]
    infos.sort(key=lambda info: (info.offset, info.num_bytes))
    _check_layout(path, infos, 8 + header_bytes, size_bytes)
    return infos


def _parse_entry(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    dtype = entry.get("dtype") if isinstance(entry, dict) else None
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise UnsupportedModel(
            f"{path}: tensor {name!r} has the type {dtype!r}, which this version cannot read."
        )
    tensor = tensor_of(name, entry, data_start, lambda how: _damaged(path, how))
    return TensorInfo(name, tensor.dtype, tensor.shape, path, tensor.offset, tensor.num_bytes)


def _check_layout(path: Path, infos: list[TensorInfo], data_start: int, size_bytes: int) -> None:
    end = data_start
    for info in infos:
        if info.offset != end:
            raise _damaged(
                path,
                f"tensor {info.name!r} begins at byte {info.offset}, but the one before it ends at"
                f" {end}",
            )
        end += info.num_bytes
    if size_bytes < end:
        raise _truncated(path, end, size_bytes)
    if size_bytes > end:
        raise _damaged(path, f"it has {size_bytes} bytes, and its tensors end at {end}")


def _damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a valid safetensors file: {how}.", DOWNLOAD_AGAIN)


def _truncated(path: Path, expected_bytes: int, size_bytes: int) -> CheckpointError:
    return CheckpointError(
        f"{path} is truncated: expected at least {expected_bytes} bytes, found {size_bytes}.",
        DOWNLOAD_AGAIN,
    )
