"""Weights in safetensors files: eight bytes with the header's length, the header as JSON, the
tensors.
"""

from __future__ import annotations

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
from edgespec.safe_read.tensors import read_tensors


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
    with reading(path):
        with open_regular(path) as file:
            # A git-lfs pointer begins "version https://git-lfs..."
            if file.read(8) == b"version ":
                raise CheckpointError(
                    f"{path} is a Git LFS pointer, not the weights.", "Run `git lfs pull` in it."
                )
        tensors = read_tensors(
            path,
            lambda how: CheckpointError(
                f"{path} is not a valid safetensors file: {how}.", DOWNLOAD_AGAIN
            ),
            lambda how: UnsupportedModel(f"{path}: {how}."),
        )
    return [
        TensorInfo(name, tensor.dtype, tensor.shape, path, tensor.offset, tensor.num_bytes)
        for name, tensor in tensors.items()
    ]
