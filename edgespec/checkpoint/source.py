"""Where the tensors of a checkpoint lie, whatever the format of its files, and how their bytes are
read. A format is a file beside this one that makes a `StoredTensors`.

Never maps a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.digests import Digests, Span
from edgespec.errors import CheckpointError
from edgespec.safe_read.regular import read_regular

CHUNK_BYTES = 256 * 1024  # what the cache of a core holds: it is hashed as well
DOWNLOAD_AGAIN = "Download it again: the file is damaged or the download was not finished."


@dataclass(frozen=True, slots=True)
class Encoding:
    """How stored rows become those of a tensor, where they are not just that."""

    row_bytes: int  # of a stored row
    # Stored rows [n, row_bytes] -> n rows of the tensor
    decode: Callable[[NDArray[np.uint8]], NDArray[Any]]
    order: NDArray[np.intp] | None = None  # the stored row of each row; None: the same
    # Raw blocks, which cannot be put in order: the stored column of each input; None: the same
    columns: NDArray[np.intp] | None = None
    span_bytes: int = 0  # of one that is read whole, as it is made of several stored ones


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The name, type and location of a stored tensor; `dtype`, `shape` and `num_bytes` are those of
    what is read."""

    name: str
    dtype: str  # the name in numpy, ml_dtypes and torch
    shape: tuple[int, ...]
    file: Path | None  # None for pickled weights
    offset: int  # in bytes, from the start of the file
    num_bytes: int
    encoding: Encoding | None = field(default=None, compare=False)

    @property
    def span(self) -> Span:
        """Where its bytes lie. Only for a tensor in a file."""
        assert self.file is not None
        encoding = self.encoding
        size = self.num_bytes if encoding is None else self.shape[0] * encoding.row_bytes
        if encoding is not None and encoding.span_bytes:
            size = encoding.span_bytes
        return self.file, self.offset, size

    def rows(self, low: int, high: int) -> NDArray[Any]:
        """Rows `low` to `high` of a tensor with an encoding. Raises CheckpointError."""
        encoding, file = self.encoding, self.file
        assert encoding is not None
        assert file is not None
        if encoding.span_bytes:
            with reading(file):
                data = np.fromfile(file, np.uint8, encoding.span_bytes, offset=self.offset)
            if data.size != encoding.span_bytes:
                raise changed(self, data.size)
            return encoding.decode(data)[low:high]
        wanted = np.arange(low, high) if encoding.order is None else encoding.order[low:high]
        first, stop = (int(wanted.min()), int(wanted.max()) + 1) if len(wanted) else (0, 0)
        width = encoding.row_bytes
        with reading(file):
            data = np.fromfile(
                file, np.uint8, (stop - first) * width, offset=self.offset + first * width
            )
        if data.size != (stop - first) * width:
            raise changed(self, data.size)
        raw = data.reshape(-1, width)
        return encoding.decode(raw if encoding.order is None else raw[wanted - first])


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `low` to `high` of the stored tensor `name`; `high` None means the complete tensor."""

    name: str
    low: int = 0
    high: int | None = None


class ByteSink(Protocol):
    """A binary file open for writing, or a wrapper of one."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Writes the data, which may change afterwards, and returns its number of bytes."""


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The tensors of a directory, and the arrays of pickled ones."""

    tensors: Mapping[str, TensorInfo]
    unpickled: Mapping[str, np.ndarray[Any, Any]]
    digests: Digests

    @classmethod
    def of_files(cls, tensors: Mapping[str, TensorInfo], digests: Digests) -> StoredTensors:
        """Tensors in safetensors files; those of fused experts as their matrices."""
        single = {one.name: one for info in tensors.values() for one in _matrices_of(info)}
        digests.expect(info.span for info in single.values())
        return cls(single, {}, digests)


# Hugging Face's files have experts matrix by matrix (`experts.3.up_proj.weight`) or all of a layer
# in two tensors: gate_up_proj [experts, gate and up, in] and down_proj [experts, out, in]. Both are
# read as the first, so that a checkpoint has one identity in either form
_FUSED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def _matrices_of(info: TensorInfo) -> Iterator[TensorInfo]:
    """The matrices of a tensor of fused experts, in the order of their bytes; another as it is."""
    match, shape = _FUSED.fullmatch(info.name), info.shape
    parts = _PARTS[match[2]] if match else ()
    if match is None or len(shape) != 3 or 0 in shape or shape[1] % len(parts):
        yield info
        return
    names = [f"{match[1]}.{e}.{part}.weight" for e in range(shape[0]) for part in parts]
    num_bytes = info.num_bytes // len(names)
    for i, name in enumerate(names):
        yield replace(
            info,
            name=name,
            shape=(shape[1] // len(parts), shape[2]),
            offset=info.offset + i * num_bytes,
            num_bytes=num_bytes,
        )


def renamed(source: StoredTensors, names: Mapping[str, RowRange]) -> StoredTensors:
    """Returns the tensors `names` (new name -> stored rows) of a source."""
    arrays = source.unpickled
    tensors = {
        name: _rows_of(source.tensors[rows.name], name, rows) for name, rows in names.items()
    }
    if arrays:
        arrays = {name: arrays[rows.name][rows.low : rows.high] for name, rows in names.items()}
    return StoredTensors(tensors, arrays, source.digests)


def _rows_of(info: TensorInfo, name: str, rows: RowRange) -> TensorInfo:
    if rows.high is None:
        return replace(info, name=name)
    width, encoding = info.num_bytes // info.shape[0], info.encoding
    assert encoding is None or encoding.order is None  # no draft's stacked rows are in another one
    stored = width if encoding is None else encoding.row_bytes
    return replace(
        info,
        name=name,
        shape=(rows.high - rows.low, *info.shape[1:]),
        offset=info.offset + rows.low * stored,
        num_bytes=(rows.high - rows.low) * width,
    )


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises CheckpointError that names the file."""
    try:
        with reading(path):
            value = json.loads(read_regular(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}.", "Download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object.", "Download it again.")
    return value


def some_of(names: Iterable[str]) -> str:
    """Returns up to five names for a message, and the number of further ones."""
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises CheckpointError, naming the file, where reading it raises OSError."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} has no {path.name}.",
            "Pass a checkpoint's own directory; a download may be incomplete.",
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}.",
            "Check its permissions and the disk.",
        ) from error


def changed(info: TensorInfo, got_bytes: int) -> CheckpointError:
    """The error of a file that became shorter while it was read."""
    return CheckpointError(
        f"{info.file} was truncated while it was read: "
        f"tensor {info.name!r} has {info.span[2]} bytes, got {got_bytes}.",
        DOWNLOAD_AGAIN,
    )
