"""A checkpoint: its config, the list of its tensors, and the bytes of each tensor.

Knows directories and the Hugging Face hub; the formats of weights are rows of `FORMATS`. Knows
nothing of models: detect.py knows which tensors there must be. Holds at most one tensor in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.artifacts.directories import not_a_checkpoint
from edgespec.checkpoint import pickled, safetensors
from edgespec.checkpoint.gguf import source as gguf
from edgespec.checkpoint.hub import download
from edgespec.checkpoint.pickled import PICKLED
from edgespec.checkpoint.source import (
    CHUNK_BYTES,
    ByteSink,
    RowRange,
    StoredTensors,
    TensorInfo,
    changed,
    read_json,
    reading,
    renamed,
)
from edgespec.errors import CheckpointError
from edgespec.progress import Progress, Silent
from edgespec.safe_read.regular import open_regular
from edgespec.safe_read.tensors import numpy_dtype

# Where weights are looked for, in this order; each returns None where its files are not there
FORMATS = (gguf.find, safetensors.find, pickled.find)


def open_checkpoint(source: str | Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Opens a checkpoint directory or a GGUF file, of several its first; or, if there is none,
    downloads the Hugging Face repository, or the model in GGUF of a name such as `owner/repo:Q8_0`.

    Raises CheckpointError for a directory without a readable config.json, a damaged GGUF file and
    a failed download, BundleError for an export or an engine directory.
    """
    path = Path(source)
    if gguf.is_gguf(path):
        return _of_gguf(path)
    if (wrong := not_a_checkpoint(path)) is not None:
        raise wrong
    if path.is_dir():
        return Checkpoint(path, allow_pickle=allow_pickle)
    if path.exists():
        raise CheckpointError(
            f"{path} is a file, not a checkpoint directory.", f"Pass {path.parent} instead."
        )
    found = download(str(source), allow_pickle=allow_pickle)
    return _of_gguf(found) if gguf.is_gguf(found) else Checkpoint(found, allow_pickle=allow_pickle)


def _of_gguf(path: Path) -> Checkpoint:
    checkpoint = Checkpoint(gguf.directory_of(path))
    gguf.keep(checkpoint.path, checkpoint)
    return checkpoint


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

    @cached_property
    def place(self) -> Path:
        """Where a user has it: the directory, or the GGUF file that the directory stands for."""
        return gguf.file_of(self.path) or self.path

    @property
    def config_source(self) -> str:
        """What its configuration is called in messages."""
        return str(self.path / "config.json" if self.place == self.path else self.place)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by name, in the order of the files."""
        return self._weights.tensors

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """Returns a tensor as a new array in its stored dtype (bfloat16 and float8: ml_dtypes)."""
        info = self.tensors[name]
        if info.file is None:
            return self._weights.unpickled[name].copy()
        if info.encoding is not None:
            return info.rows(0, info.shape[0]).reshape(info.shape)
        with reading(info.file):
            data = np.fromfile(info.file, np.uint8, count=info.num_bytes, offset=info.offset)
        if data.size != info.num_bytes:
            raise changed(info, data.size)
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
        if info.encoding is not None:
            return info.rows(low, high).reshape(high - low, *info.shape[1:])
        width = info.num_bytes // info.shape[0]
        count, offset = (high - low) * width, info.offset + low * width
        with reading(info.file):
            data = np.fromfile(info.file, np.uint8, count, offset=offset)
        if data.size != count:
            raise changed(info, low * width + data.size)
        return data.view(numpy_dtype(info.dtype)).reshape(high - low, *info.shape[1:])

    def write_to(self, name: str, fh: ByteSink) -> None:
        """Writes a tensor's raw little-endian bytes to `fh`, a few rows or 256 KiB at a time."""
        info, digests = self.tensors[name], self._weights.digests
        if info.encoding is not None:
            step = max(1, CHUNK_BYTES * info.shape[0] // max(info.num_bytes, 1))
            step = info.shape[0] if info.encoding.span_bytes else step
            for low in range(0, info.shape[0], step):
                rows = self.read_rows(name, low, low + step)
                fh.write(rows.reshape(-1).view(np.uint8).data)
            return
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

    def renamed(self, sources: Mapping[str, RowRange]) -> Checkpoint:
        """Returns a checkpoint with the tensors `sources` (new name -> stored rows) of these files.

        It has the same identity.
        """
        return _Renamed(self, sources)

    def _hashed(self, progress: Progress) -> dict[str, str]:
        """The sha256 of each tensor by name."""
        digests, tensors = self._weights.digests, self.tensors
        spans = {name: info.span for name, info in tensors.items() if info.file is not None}
        digests.recall(spans)
        hashes = {name: digests.known(span) for name, span in spans.items()}
        left = [info for name, info in tensors.items() if hashes.get(name) is None]
        if left:
            progress.start("hash", sum(stored_bytes(info) for info in left))
        for info in left:
            digest = hashlib.sha256()
            for chunk in self._chunks(info):
                digest.update(chunk)
                progress.advance(len(chunk))
            hashes[info.name] = digest.hexdigest()
            if info.file is not None:
                digests.finish(info.span, digest)
        digests.check_unchanged()
        digests.keep(spans)
        return {name: sha256 for name, sha256 in hashes.items() if sha256 is not None}

    def _chunks(self, info: TensorInfo) -> Iterator[memoryview]:
        """A tensor's stored bytes; each piece is gone with the next one. Raises CheckpointError."""
        if info.file is None:
            data = self._weights.unpickled[info.name].reshape(-1).view(np.uint8)
            for start in range(0, info.num_bytes, CHUNK_BYTES):
                yield data[start : start + CHUNK_BYTES].data
            return
        with reading(info.file), open_regular(info.file) as file:
            file.seek(info.offset)
            left = stored_bytes(info)
            buffer = memoryview(bytearray(min(left, CHUNK_BYTES)))
            while left:
                count = file.readinto(buffer[: min(left, CHUNK_BYTES)])
                if not count:
                    raise changed(info, stored_bytes(info) - left)
                yield buffer[:count]
                left -= count

    @cached_property
    def _weights(self) -> StoredTensors:
        return find_weights(self.path, self._allow_pickle)


def stored_bytes(info: TensorInfo) -> int:
    """The bytes that a tensor takes where it is stored."""
    return info.num_bytes if info.file is None else info.span[2]


class _Renamed(Checkpoint):
    """A checkpoint with other tensor names; a tensor may be a part of a stored one."""

    def __init__(self, original: Checkpoint, names: Mapping[str, RowRange]) -> None:
        self.path = original.path
        self.config = original.config
        self.generation_config = original.generation_config
        self._original = original
        self._names = names

    def identity(self, progress: Progress | None = None) -> str:
        return self._original.identity(progress)

    @cached_property
    def _weights(self) -> StoredTensors:
        return renamed(self._original._weights, self._names)


def find_weights(path: Path, allow_pickle: bool) -> StoredTensors:
    """Returns the tensors of a directory. Raises CheckpointError where it has none."""
    for find in FORMATS:
        if (weights := find(path, allow_pickle=allow_pickle)) is not None:
            return weights
    raise CheckpointError(
        f"{path} has no weights: neither *.safetensors nor {' nor '.join(PICKLED)}.",
        "Download the weights as well. If a Hugging Face repository has only pickled weights,"
        " pass `allow_pickle`.",
    )
