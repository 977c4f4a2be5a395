"""One prefix as a file of its own, a safetensors file: its key, its rows, and what a drafter keeps
of it.

Knows bytes: what is torn, changed or under another name is found out. Knows no engine and no
requests.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.artifacts import atomic
from edgespec.errors import BundleError, EdgeSpecError
from edgespec.runtime.loop.prefix import NO_DRAFT, common_length
from edgespec.safe_read.regular import open_regular
from edgespec.safe_read.tensors import DTYPES, StoredTensor, numpy_dtype, read_array, read_tensors

KEY, PAIRS, STATE, HASH = "cache_key", "draft_pairs", "hidden_state", "sha256"
BASE, DRAFT = "base.", "draft."  # before the names of their arrays
TYPE_NAMES = {name: code for code, name in DTYPES.items()}

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """What is known of a file without its rows: `salt` is a hash, `pairs` are those that the
    drafter has of it, or NO_DRAFT; `size_bytes` are those of its rows."""

    path: Path
    salt: str
    cache_key: NDArray[np.int64]
    pairs: int
    has_state: bool
    size_bytes: int

    @classmethod
    def read(cls, path: Path, salt: str) -> StoredPrefix:
        """By the header of a file and its key, which may be damaged as yet. Raises BundleError or
        OSError."""
        tensors = read_tensors(path, damaged)
        if not {KEY, PAIRS, HASH} <= tensors.keys():
            raise damaged("it is no prefix")
        for name in (KEY, PAIRS):
            if tensors[name].dtype != "int64" or len(tensors[name].shape) != 1:
                raise damaged(f"{name} is not a list")
        key, pairs = (read_array(path, tensors[name]) for name in (KEY, PAIRS))
        if len(pairs) != 1 or list(tensors)[-1] != HASH:
            raise damaged("it is no prefix")
        rows = [one for one in tensors.values() if one.name.startswith((BASE, DRAFT))]
        size_bytes = sum(one.num_bytes for one in rows)
        return cls(path, salt, key, int(pairs[0]), STATE in tensors, size_bytes)

    def serves(self, salt: str, cache_key: NDArray[np.int64], pairs: int, croppable: bool) -> bool:
        """Whether all that has this key can be taken from it, with drafts where there are some."""
        whole = croppable or len(self.cache_key) == len(cache_key)
        return (
            self.salt == salt
            and whole
            and common_length(self.cache_key, cache_key) == len(cache_key)
            and (pairs == NO_DRAFT or self.pairs != NO_DRAFT)
        )


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Write a safetensors file whole or not at all, for its owner alone. Its last tensor is the
    sha256 of its name and of all before it. Raises OSError.

    It is not flushed to the disk: what a crash of the machine leaves of it has another hash. The
    safetensors library would copy all arrays first.
    """
    header, offset = {}, 0
    for name, array in (*arrays.items(), (HASH, np.empty(32, np.uint8))):
        span = [offset, offset + array.nbytes]
        code = TYPE_NAMES[array.dtype.name]
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": span}
        offset = span[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(path.name.encode())
    staged = path.with_name(atomic.temporary_name(path.name))
    handle = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            atomic.hold(file.fileno())
            for data in (memoryview(start), *map(bytes_of, arrays.values())):
                digest.update(data)
                file.write(data)
            file.write(digest.digest())
            file.flush()
            staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def bytes_of(array: NDArray[Any]) -> memoryview:
    """An array's bytes; a copy where it is a part of another."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of such a file, in one piece of memory. Raises BundleError for one that is not as
    it was written, OSError and MemoryError."""
    tensors = read_tensors(path, damaged)
    with open_regular(path) as file:
        data = np.empty(os.fstat(file.fileno()).st_size, np.uint8)
        count = file.readinto(data.data)
    digest = hashlib.sha256(path.name.encode())
    digest.update(data[:-32].data)
    if count != len(data) or digest.digest() != data[-32:].tobytes():
        raise damaged("its bytes are not those that were written")
    return {name: view_of(data, tensor) for name, tensor in tensors.items()}


def view_of(data: NDArray[np.uint8], tensor: StoredTensor) -> NDArray[Any]:
    """A tensor in a file's bytes."""
    own = data[tensor.offset : tensor.offset + tensor.num_bytes]
    return own.view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)


def damaged(how: str) -> EdgeSpecError:
    """What is wrong with a file."""
    return BundleError(how)
