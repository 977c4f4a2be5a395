"""The files of a checkpoint: its config, the list of its tensors, and the bytes of each tensor.

Knows safetensors (one file or shards), pickled PyTorch weights behind `allow_pickle`, and the
Hugging Face hub. Knows nothing of models: detect.py knows which tensors there must be. Never maps a
file and holds at most one tensor in memory (except for pickled weights, which torch maps).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from edgespec.directories import not_a_checkpoint
from edgespec.errors import CheckpointError, MissingDependency, UnsupportedModel
from edgespec.stored.regular import open_regular, read_regular
from edgespec.stored.tensors import (
    DTYPES,
    MAX_HEADER_BYTES,
    header_entries,
    numpy_dtype,
    tensor_of,
)

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 8 * 1024 * 1024
_DOWNLOAD_AGAIN = "Download it again: the file is damaged or the download was not finished."
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_PICKLE_PATTERNS = ["*.bin"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The name, type and location of a stored tensor."""

    name: str
    dtype: str  # the name in numpy, ml_dtypes and torch
    shape: tuple[int, ...]
    file: Path | None  # None for pickled weights
    offset: int  # in bytes, from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `low` to `high` of the stored tensor `name`; `high` None means the complete tensor."""

    name: str
    low: int = 0
    high: int | None = None


class ByteSink(Protocol):
    """A binary file open for writing, or a wrapper of one."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Writes the data and returns its number of bytes."""


def open_checkpoint(source: str | Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Opens a checkpoint directory or, if there is none, downloads the Hugging Face repository.

    Raises CheckpointError for a directory without a readable config.json and for a failed download,
    BundleError for an export or an engine directory.
    """
    path = Path(source)
    if (wrong := not_a_checkpoint(path)) is not None:
        raise wrong
    if path.is_dir():
        return Checkpoint(path, allow_pickle=allow_pickle)
    if path.exists():
        raise CheckpointError(
            f"{path} is a file, not a checkpoint directory.", f"Pass {path.parent} instead."
        )
    return Checkpoint(_download(str(source), allow_pickle), allow_pickle=allow_pickle)


class Checkpoint:
    """A directory with config.json and weights.

    `tensors` reads the headers of the weights at its first use. Raises CheckpointError for missing
    or damaged files.
    """

    def __init__(self, path: Path, *, allow_pickle: bool = False) -> None:
        self.path = path
        self.config: dict[str, Any] = read_json(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config: dict[str, Any] | None = (
            read_json(generation) if generation.exists() else None
        )
        self._allow_pickle = allow_pickle

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by name, in the order of the files."""
        return self._weights.tensors

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """Returns a tensor as a new array in its stored dtype (bfloat16 and float8: ml_dtypes)."""
        info = self.tensors[name]
        if info.file is None:
            return self._weights.unpickled[name].copy()
        try:
            data = np.fromfile(info.file, np.uint8, count=info.num_bytes, offset=info.offset)
        except OSError as error:
            raise _unreadable(info.file, error) from error
        if data.size != info.num_bytes:
            raise _changed(info, data.size)
        return data.view(numpy_dtype(info.dtype)).reshape(info.shape)

    def read_rows(self, name: str, low: int, high: int) -> np.ndarray[Any, Any]:
        """Returns rows `low` to `high` of a matrix as a new array. Reads no other rows."""
        info = self.tensors[name]
        if info.file is None:
            return self._weights.unpickled[name][low:high].copy()
        high = min(high, info.shape[0])
        width = info.num_bytes // info.shape[0]
        count, offset = (high - low) * width, info.offset + low * width
        try:
            data = np.fromfile(info.file, np.uint8, count, offset=offset)
        except OSError as error:
            raise _unreadable(info.file, error) from error
        if data.size != count:
            raise _changed(info, low * width + data.size)
        return data.view(numpy_dtype(info.dtype)).reshape(high - low, *info.shape[1:])

    def write_to(self, name: str, fh: ByteSink) -> None:
        """Copies a tensor's raw little-endian bytes to `fh`, at most 8 MiB at a time."""
        info = self.tensors[name]
        if info.file is None:
            data = self._weights.unpickled[name].reshape(-1).view(np.uint8)
            for start in range(0, info.num_bytes, _CHUNK_BYTES):
                fh.write(data[start : start + _CHUNK_BYTES].data)
            return
        with _open(info.file) as file:
            file.seek(info.offset)
            left = info.num_bytes
            while left:
                chunk = _read(file, min(left, _CHUNK_BYTES), info.file)
                if not chunk:
                    raise _changed(info, info.num_bytes - left)
                fh.write(chunk)
                left -= len(chunk)

    def identity(self) -> str:
        """Returns the sha256 of the tensors' names, dtypes, shapes and first 4 KiB each.

        It is cheap, does not depend on the sharding, and differs for a fine-tuned copy.
        """
        digest = hashlib.sha256()
        for name, info in sorted(self.tensors.items()):
            digest.update(json.dumps([name, info.dtype, info.shape]).encode())
            digest.update(self._first_bytes(info, min(info.num_bytes, 4096)))
        return digest.hexdigest()

    def renamed(self, sources: Mapping[str, Rows]) -> Checkpoint:
        """Returns a checkpoint with the tensors `sources` (new name -> stored rows) of these files.

        It has the same identity.
        """
        return _Renamed(self, sources)

    def _first_bytes(self, info: TensorInfo, count: int) -> bytes:
        if info.file is None:
            return self._weights.unpickled[info.name].reshape(-1).view(np.uint8)[:count].tobytes()
        with _open(info.file) as file:
            file.seek(info.offset)
            return _read(file, count, info.file)

    @cached_property
    def _weights(self) -> _Weights:
        return _find_weights(self.path, self._allow_pickle)


@dataclass(frozen=True, slots=True)
class _Weights:
    """The tensors of a directory, and the arrays of pickled ones."""

    tensors: Mapping[str, TensorInfo]
    unpickled: Mapping[str, np.ndarray[Any, Any]]


class _Renamed(Checkpoint):
    """A checkpoint with other tensor names; a tensor may be a part of a stored one."""

    def __init__(self, original: Checkpoint, sources: Mapping[str, Rows]) -> None:
        self.path = original.path
        self.config = original.config
        self.generation_config = original.generation_config
        self._original = original
        self._sources = sources

    def identity(self) -> str:
        return self._original.identity()

    @cached_property
    def _weights(self) -> _Weights:
        stored, arrays = self._original.tensors, self._original._weights.unpickled
        sources = self._sources.items()
        tensors = {name: _rows_of(stored[rows.name], name, rows) for name, rows in sources}
        if not arrays:
            return _Weights(tensors, {})
        return _Weights(
            tensors, {name: arrays[rows.name][rows.low : rows.high] for name, rows in sources}
        )


def _rows_of(info: TensorInfo, name: str, rows: Rows) -> TensorInfo:
    if rows.high is None:
        return replace(info, name=name)
    width = info.num_bytes // info.shape[0]
    return replace(
        info,
        name=name,
        shape=(rows.high - rows.low, *info.shape[1:]),
        offset=info.offset + rows.low * width,
        num_bytes=(rows.high - rows.low) * width,
    )


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises CheckpointError that names the file."""
    try:
        value = json.loads(read_regular(path))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} has no {path.name}.",
            "Pass a checkpoint's own directory; a download may be incomplete.",
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}.", "Download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object.", "Download it again.")
    return value


# The hub


def _download(repo_id: str, allow_pickle: bool) -> Path:
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", repo_id):
        raise CheckpointError(
            f"there is no directory {repo_id!r}.", "Pass a directory or a Hugging Face repository."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    logger.info("no directory %s: asking the Hugging Face hub", repo_id)
    patterns = _HUB_PATTERNS + (_PICKLE_PATTERNS if allow_pickle else [])
    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns))
    except (OSError, ValueError, HfHubHTTPError, _connection_error()) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"could not download {repo_id!r} from the Hugging Face hub: {reason}",
            "If this is a directory, it does not exist. Otherwise check the name, the network and,"
            " for a gated repository, `hf auth login`.",
        ) from error


def _connection_error() -> type[Exception]:
    """huggingface_hub 1.x uses httpx, whose errors are not OSErrors; those of 0.x are."""
    try:
        from httpx import HTTPError
    except ImportError:
        return OSError
    return HTTPError


# Which files hold the weights


def _find_weights(path: Path, allow_pickle: bool) -> _Weights:
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
    return _from_pickle(path, allow_pickle)


def _from_safetensors(files: Iterable[Path]) -> _Weights:
    tensors = {info.name: info for file in files for info in read_header(file)}
    return _Weights(tensors, {})


def _from_index(index: Path) -> _Weights:
    """Reads the shards of an index. Of duplicate tensors the one that the index names counts."""
    weight_map = _read_weight_map(index)
    files = _shards(index, weight_map)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for info in read_header(file):
            if weight_map.get(info.name, file.name) == file.name:
                tensors[info.name] = info
    _check_index_complete(index, weight_map, tensors)
    return _Weights(tensors, {})


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map.", "Download it again.")
    for name, file in weight_map.items():
        plain = (
            isinstance(file, str) and file not in ("", ".", "..") and not set(file) & set("/\\:\0")
        )
        if not plain:
            raise CheckpointError(
                f"{index} puts tensor {name!r} into {file!r}, which is not the plain name of a file"
                " beside it.",
                "Do not use this checkpoint unless you trust where it comes from; correct the"
                " index.",
            )
    return weight_map


def _shards(index: Path, weight_map: Mapping[str, str]) -> tuple[Path, ...]:
    files = tuple(index.parent / name for name in sorted(set(weight_map.values())))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{index} names {len(missing)} of {len(files)} shards that are not there:"
            f" {some_of(missing)}.",
            "Download the missing files into the same directory.",
        )
    return files


def _check_index_complete(
    index: Path, weight_map: Mapping[str, str], found: Mapping[str, object]
) -> None:
    lost = [f"{name} ({file})" for name, file in weight_map.items() if name not in found]
    if lost:
        raise CheckpointError(
            f"{index} names tensors that are not in their shards: {some_of(lost)}.",
            "Download the index and these shards again: they do not belong together.",
        )


def some_of(names: Iterable[str]) -> str:
    """Returns up to five names for a message, and the number of further ones."""
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# safetensors: eight bytes with the header's length, the header as JSON, the tensors


def read_header(path: Path) -> list[TensorInfo]:
    """Returns the tensors of one safetensors file in the order of their bytes.

    Raises CheckpointError for a damaged file, in which tensors overlap or leave gaps, and
    UnsupportedModel for an unknown dtype.
    """
    with _open(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        start = _read(file, 8, path)
        if start == b"version ":  # a git-lfs pointer begins "version https://git-lfs..."
            raise CheckpointError(
                f"{path} is a Git LFS pointer, not the weights.", "Run `git lfs pull` in it."
            )
        header_bytes = int.from_bytes(start, "little")
        if len(start) == 8 and header_bytes > MAX_HEADER_BYTES:
            raise _damaged(path, f"its header would be {header_bytes} bytes long")
        if size_bytes < 8 + header_bytes:
            raise _truncated(path, 8 + header_bytes, size_bytes)
        text = _read(file, header_bytes, path)
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
    found = tensor_of(name, entry, data_start, lambda how: _damaged(path, how))
    return TensorInfo(name, found.dtype, found.shape, path, found.offset, found.num_bytes)


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


# Pickled weights


def _from_pickle(path: Path, allow_pickle: bool) -> _Weights:
    single, index = path / "pytorch_model.bin", path / "pytorch_model.bin.index.json"
    if not single.exists() and not index.exists():
        raise CheckpointError(
            f"{path} has no weights: neither *.safetensors nor pytorch_model.bin.",
            "Download the weights as well. If a Hugging Face repository has only pickled weights,"
            " pass --allow-pickle.",
        )
    if not allow_pickle:
        raise CheckpointError(
            f"{path} has only pickled weights ({single.name if single.exists() else index.name}).",
            "Pass --allow-pickle (they are loaded with weights_only, which executes no code),"
            " or convert them to safetensors.",
        )
    if single.exists():
        files: tuple[Path, ...] = (single,)
        weight_map: dict[str, str] = {}
    else:
        weight_map = _read_weight_map(index)
        files = _shards(index, weight_map)
    arrays = {name: array for file in files for name, array in _unpickle(file).items()}
    _check_index_complete(index, weight_map, arrays)
    tensors = {
        name: TensorInfo(name, str(a.dtype), a.shape, None, 0, a.nbytes)
        for name, a in arrays.items()
    }
    return _Weights(tensors, arrays)


def _unpickle(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the tensors of one file as arrays that share the memory mapped by torch."""
    import pickle

    try:
        import torch
    except ImportError as error:
        raise MissingDependency(
            f"reading {path.name} needs torch, which is not installed.",
            "pip install edgespec[torch]",
        ) from error
    try:
        state = torch.load(path, weights_only=True, map_location="cpu", mmap=_is_zip(path))
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} could not be unpickled: {reason}", _DOWNLOAD_AGAIN
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} holds a {type(state).__name__}, not a dictionary of tensors."
        )
    return {name: _to_array(path, name, tensor) for name, tensor in state.items()}


def _is_zip(path: Path) -> bool:
    """The format before torch 1.6 is not a zip archive and cannot be mapped."""
    with _open(path) as file:
        return _read(file, 4, path) == b"PK\x03\x04"


def _to_array(path: Path, name: object, tensor: object) -> np.ndarray[Any, Any]:
    import torch

    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise CheckpointError(
            f"{path}: entry {name!r} is a {type(tensor).__name__}, not a named tensor."
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES.values() or tensor.layout != torch.strided:
        raise UnsupportedModel(
            f"{path}: tensor {name!r} is {tensor.layout} of {dtype}, which this version cannot"
            " read."
        )
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(numpy_dtype(dtype)).reshape(tuple(tensor.shape))


# Errors


def _open(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _read(file: BinaryIO, size_bytes: int, path: Path) -> bytes:
    try:
        return file.read(size_bytes)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {error.strerror or error}.", "Check its permissions and the disk."
    )


def _damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a valid safetensors file: {how}.", _DOWNLOAD_AGAIN)


def _truncated(path: Path, expected_bytes: int, size_bytes: int) -> CheckpointError:
    return CheckpointError(
        f"{path} is truncated: expected at least {expected_bytes} bytes, found {size_bytes}.",
        _DOWNLOAD_AGAIN,
    )


def _changed(info: TensorInfo, got_bytes: int) -> CheckpointError:
    return CheckpointError(
        f"{info.file} was truncated while it was read: "
        f"tensor {info.name!r} has {info.num_bytes} bytes, got {got_bytes}.",
        _DOWNLOAD_AGAIN,
    )
