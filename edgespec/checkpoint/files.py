"""The files of a checkpoint: its config, the list of its tensors, and the bytes of each tensor.

Knows safetensors (one file or shards), pickled PyTorch weights behind `allow_pickle`, and the
Hugging Face hub. Knows nothing of models: detect.py knows which tensors there must be. Never maps a
file and holds at most one tensor in memory (except for pickled weights, which torch maps).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from edgespec.artifacts.directories import not_a_checkpoint
from edgespec.checkpoint.digests import Digests, Span
from edgespec.checkpoint.experts import matrices
from edgespec.checkpoint.hub import download
from edgespec.errors import CheckpointError, MissingDependency, UnsupportedModel
from edgespec.progress import Progress, Silent
from edgespec.safe_read.regular import open_regular, read_regular
from edgespec.safe_read.tensors import (
    DTYPES,
    MAX_HEADER_BYTES,
    header_entries,
    numpy_dtype,
    tensor_of,
)

_CHUNK_BYTES = 256 * 1024  # what the cache of a core holds: it is hashed as well
# The names under which pickled weights are published; the first may have an index of shards
PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")
_DOWNLOAD_AGAIN = "Download it again: the file is damaged or the download was not finished."


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The name, type and location of a stored tensor."""

    name: str
    dtype: str  # the name in numpy, ml_dtypes and torch
    shape: tuple[int, ...]
    file: Path | None  # None for pickled weights
    offset: int  # in bytes, from the start of the file
    num_bytes: int

    @property
    def span(self) -> Span:
        """Where its bytes lie. Only for a tensor in a file."""
        assert self.file is not None
        return self.file, self.offset, self.num_bytes


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `low` to `high` of the stored tensor `name`; `high` None means the complete tensor."""

    name: str
    low: int = 0
    high: int | None = None


class ByteSink(Protocol):
    """A binary file open for writing, or a wrapper of one."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Writes the data, which may change afterwards, and returns its number of bytes."""


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
    return Checkpoint(download(str(source), allow_pickle=allow_pickle), allow_pickle=allow_pickle)


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
        self._identity: str | None = None

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
        if (digest := self._weights.digests.start(info.span)) is not None:
            digest.update(data.data)
            self._weights.digests.finish(info.span, digest)
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
        """Copies a tensor's raw little-endian bytes to `fh`, at most 256 KiB at a time."""
        info, digests = self.tensors[name], self._weights.digests
        digest = digests.start(info.span) if info.file is not None else None
        for chunk in self._chunks(info):
            if digest is not None:
                digest.update(chunk)
            fh.write(chunk)
        if digest is not None:
            digests.finish(info.span, digest)

    def hash_while_reading(self) -> None:
        """From now on `read` and `write_to` hash tensors, so that `identity` need not read them."""
        self._weights.digests.wanted = True

    def identity(self, progress: Progress | None = None) -> str:
        """Returns the sha256 of the tensors' names, dtypes, shapes and all of their bytes.

        It does not depend on the sharding. Reads the tensors that have not been hashed yet, in this
        run or, of files that have not changed since, in an earlier one. Raises CheckpointError for
        a file that changed since its header was read.
        """
        if self._identity is None:
            digest = hashlib.sha256()
            for name, sha256 in sorted(self._hashed(progress or Silent()).items()):
                info = self.tensors[name]
                digest.update(json.dumps([name, info.dtype, info.shape, sha256]).encode())
            self._identity = digest.hexdigest()
        return self._identity

    def check_unchanged(self) -> None:
        """Raises CheckpointError for a file that changed since its header was read."""
        self._weights.digests.check_unchanged()

    def renamed(self, sources: Mapping[str, Rows]) -> Checkpoint:
        """Returns a checkpoint with the tensors `sources` (new name -> stored rows) of these files.

        It has the same identity.
        """
        return _Renamed(self, sources)

    def _hashed(self, progress: Progress) -> dict[str, str]:
        """The sha256 of each tensor by name."""
        digests, tensors = self._weights.digests, self.tensors
        spans = {name: info.span for name, info in tensors.items() if info.file is not None}
        digests.recall(spans)
        found = {name: digests.known(span) for name, span in spans.items()}
        left = [info for name, info in tensors.items() if found.get(name) is None]
        if left:
            progress.start("hash", sum(info.num_bytes for info in left))
        for info in left:
            digest = hashlib.sha256()
            for chunk in self._chunks(info):
                digest.update(chunk)
                progress.advance(len(chunk))
            found[info.name] = digest.hexdigest()
            if info.file is not None:
                digests.finish(info.span, digest)
        digests.check_unchanged()
        digests.keep(spans)
        return {name: sha256 for name, sha256 in found.items() if sha256 is not None}

    def _chunks(self, info: TensorInfo) -> Iterator[memoryview]:
        """A tensor's bytes; each piece is gone with the next one. Raises CheckpointError."""
        if info.file is None:
            data = self._weights.unpickled[info.name].reshape(-1).view(np.uint8)
            for start in range(0, info.num_bytes, _CHUNK_BYTES):
                yield data[start : start + _CHUNK_BYTES].data
            return
        with _open(info.file) as file:
            file.seek(info.offset)
            left, buffer = info.num_bytes, memoryview(bytearray(min(info.num_bytes, _CHUNK_BYTES)))
            while left:
                count = _read_into(file, buffer[: min(left, _CHUNK_BYTES)], info.file)
                if not count:
                    raise _changed(info, info.num_bytes - left)
                yield buffer[:count]
                left -= count

    @cached_property
    def _weights(self) -> _Weights:
        return _find_weights(self.path, self._allow_pickle)


@dataclass(frozen=True, slots=True)
class _Weights:
    """The tensors of a directory, and the arrays of pickled ones."""

    tensors: Mapping[str, TensorInfo]
    unpickled: Mapping[str, np.ndarray[Any, Any]]
    digests: Digests

    @classmethod
    def of_files(cls, tensors: Mapping[str, TensorInfo], digests: Digests) -> _Weights:
        """Tensors in safetensors files; those of fused experts as their matrices."""
        single = {one.name: one for info in tensors.values() for one in _matrices_of(info)}
        digests.expect(info.span for info in single.values())
        return cls(single, {}, digests)


def _matrices_of(info: TensorInfo) -> Iterator[TensorInfo]:
    found = [
        replace(
            info,
            name=matrix.name,
            shape=matrix.shape,
            offset=info.offset + matrix.index * (info.num_bytes // matrix.count),
            num_bytes=info.num_bytes // matrix.count,
        )
        for matrix in matrices(info.name, info.shape)
    ]
    yield from found or [info]


class _Renamed(Checkpoint):
    """A checkpoint with other tensor names; a tensor may be a part of a stored one."""

    def __init__(self, original: Checkpoint, sources: Mapping[str, Rows]) -> None:
        self.path = original.path
        self.config = original.config
        self.generation_config = original.generation_config
        self._original = original
        self._sources = sources

    def identity(self, progress: Progress | None = None) -> str:
        return self._original.identity(progress)

    @cached_property
    def _weights(self) -> _Weights:
        weights, sources = self._original._weights, self._sources.items()
        stored, arrays = weights.tensors, weights.unpickled
        tensors = {name: _rows_of(stored[rows.name], name, rows) for name, rows in sources}
        if arrays:
            arrays = {name: arrays[rows.name][rows.low : rows.high] for name, rows in sources}
        return _Weights(tensors, arrays, weights.digests)


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


def _from_safetensors(files: Sequence[Path]) -> _Weights:
    digests = Digests(files)
    tensors = {info.name: info for file in files for info in read_header(file)}
    return _Weights.of_files(tensors, digests)


def _from_index(index: Path) -> _Weights:
    """Reads the shards of an index. Of duplicate tensors the one that the index names counts."""
    weight_map = _read_weight_map(index)
    files = _shards(index, weight_map)
    digests = Digests(files)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for info in read_header(file):
            if weight_map.get(info.name, file.name) == file.name:
                tensors[info.name] = info
    _check_index_complete(index, weight_map, tensors)
    return _Weights.of_files(tensors, digests)


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
    single, index = path / PICKLED[0], path / f"{PICKLED[0]}.index.json"
    if not single.exists() and not index.exists():
        single = path / PICKLED[1]
    if not single.exists() and not index.exists():
        raise CheckpointError(
            f"{path} has no weights: neither *.safetensors nor {' nor '.join(PICKLED)}.",
            "Download the weights as well. If a Hugging Face repository has only pickled weights,"
            " pass `allow_pickle`.",
        )
    if not allow_pickle:
        raise CheckpointError(
            f"{path} has only pickled weights ({single.name if single.exists() else index.name}).",
            "Pass `allow_pickle` (they are loaded with weights_only, which executes no code),"
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
    return _Weights(tensors, arrays, Digests(()))


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


def _read_into(file: BinaryIO, buffer: memoryview, path: Path) -> int:
    try:
        return file.readinto(buffer)  # type: ignore[attr-defined, no-any-return]
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
