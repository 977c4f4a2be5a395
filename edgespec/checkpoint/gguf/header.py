"""The header of a GGUF file (ggml's docs/gguf.md, versions 2 and 3): metadata and tensors, each
count, length and offset checked against the file's size before anything is read or allocated.

Knows bytes and bounds. Knows no model.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.checkpoint.gguf.types import TYPES, BlockType
from edgespec.checkpoint.source import DOWNLOAD_AGAIN, reading
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.safe_read.regular import open_regular
from edgespec.safe_read.tensors import MAX_SIZE

MAX_HEADER_BYTES = 256 * 2**20  # a vocabulary of 256,000 tokens takes about 15 MB
MAX_NAME_BYTES = 65535  # of a key, by the specification
MAX_DIMENSIONS = 4
ALIGNMENT = 32  # of files that do not say it
MAX_ALIGNMENT = 2**20
SPLIT = re.compile(r"(.+)-(\d{5})(-of-(\d{5})\.gguf)", re.IGNORECASE)
# Keys of which one value is wanted, its type, and what it is called
_TYPED: tuple[tuple[str, type, str], ...] = (
    (r"general\.architecture|tokenizer\.ggml\.(model|pre)", str, "text"),
    (r"clip\.(vision\.)?projector_type", str, "text"),
    (r"clip\.vision\.attention\.layer_norm_epsilon", float, "number"),
    (r"clip\.vision\.(projection_dim|block_count)", int, "whole number"),
    (r"tokenizer\.chat_template(\..*)?|[^.]+\.rope\.scaling\.type", str, "text"),
    (r"split\.(no|count|tensors\.count)|tokenizer\.ggml\.\w+_token_id", int, "whole number"),
    (r"tokenizer\.ggml\.add_(bos_token|eos_token|space_prefix)", bool, "flag"),
)

Metadata = Mapping[str, Any]  # numbers, texts, lists of texts, arrays of numbers

# Code of a metadata value -> how numpy names it; text and arrays are read by themselves
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_FLOAT32, _TEXT, _ARRAY = 6, 8, 9


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A tensor of a header; its shape as in numpy, the rows last but one."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    file: Path
    offset: int  # in bytes, from the start of the file
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """The bytes of a row: what runs along the last dimension."""
        return self.shape[-1] // self.type.block * self.type.size_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What one model's files say, of which there may be several: all tensors, and the metadata of
    the first."""

    files: tuple[Path, ...]
    metadata: Metadata
    tensors: Mapping[str, StoredBlocks]
    sha256: str  # of the headers' bytes


def read_model(path: Path) -> Header:
    """The header of a file, or those of all parts of which it is the first.

    Raises CheckpointError for a damaged or missing part, UnsupportedModel for types and forms that
    this version cannot read.
    """
    files = parts_of(path)
    headers = [read_header(file) for file in files]
    first, tensors = headers[0], dict(headers[0].tensors)
    for i, header in enumerate(headers):
        place = tuple(
            header.metadata.get(f"split.{key}", d) for key, d in (("no", 0), ("count", 1))
        )
        # A file that was never split may have the name of a part of one
        if place != (i, len(files)):
            raise _refusal(header.files[0])(
                f"it says that it is part {place[0]} of {place[1]}, counted from 0; its name, part"
                f" {i} of {len(files)}"
            )
        if i and (twice := tensors.keys() & header.tensors.keys()):
            raise _refusal(header.files[0])(f"tensor {min(twice)!r:.80} is in another part as well")
        tensors |= header.tensors
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise _refusal(path)(f"split.tensors.count is {total}, and its parts have {len(tensors)}")
    digest = hashlib.sha256("".join(header.sha256 for header in headers).encode())
    return Header(files, first.metadata, tensors, digest.hexdigest())


def parts_of(path: Path) -> tuple[Path, ...]:
    """The files of a model, by the name of the first. CheckpointError where one is missing."""
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match[4])
    names = [f"{match[1]}-{i:05}{match[3]}" for i in range(1, count + 1)]
    if path.name not in names[:1]:
        first = path.with_name(names[0] if names else path.name)
        raise CheckpointError(f"{path} is not the first part of its model.", f"Pass {first}.")
    files = tuple(path.with_name(name) for name in names)
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise CheckpointError(
            f"{missing} is missing, one of {count} parts.", "Download it into the same directory."
        )
    return files


def read_header(path: Path) -> Header:
    """The header of one file. Raises as `read_model` does."""
    with reading(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        cursor = _Cursor(file, size, _refusal(path))
        count, num_values = _begin(cursor, path)
        metadata: dict[str, Any] = {}
        for _ in range(cursor.counted(num_values, 13, "metadata values")):
            key = cursor.text("a key", MAX_NAME_BYTES)
            if key in metadata:
                raise cursor.refuse(f"the key {key!r:.80} occurs twice")
            metadata[key] = cursor.value(key)
        _check_types(metadata, cursor.refuse)
        tensors = {}
        for _ in range(cursor.counted(count, 28, "tensors")):
            tensor = _tensor(cursor, path)
            if tensor.name in tensors:
                raise cursor.refuse(f"the tensor {tensor.name!r:.80} occurs twice")
            tensors[tensor.name] = tensor
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment & 7 or not 8 <= alignment <= MAX_ALIGNMENT:
            raise cursor.refuse(f"general.alignment is {alignment!r:.80}, not a multiple of 8")
        start = -(-cursor.position // alignment) * alignment
        placed = _placed(tensors.values(), start, alignment, size, cursor.refuse)
    return Header((path,), metadata, placed, cursor.digest.hexdigest())


def read_beginning(data: bytes, path: Path) -> Metadata:
    """The metadata values that are whole in the first bytes of a file. Raises CheckpointError for
    bytes that begin no such file, UnsupportedModel for other versions."""
    cursor = _Cursor(BufferedReader(BytesIO(data)), len(data), _refusal(path))
    _, count = _begin(cursor, path)
    metadata: dict[str, Any] = {}
    with suppress(CheckpointError):  # the end of what is there
        for _ in range(count):
            key = cursor.text("a key", MAX_NAME_BYTES)
            metadata[key] = cursor.value(key)
    _check_types(metadata, cursor.refuse)
    return metadata


def _refusal(path: Path) -> Callable[[str], CheckpointError]:
    return lambda how: CheckpointError(f"{path} is not a valid GGUF file: {how}.", DOWNLOAD_AGAIN)


def _check_types(metadata: Metadata, refuse: Callable[[str], CheckpointError]) -> None:
    for key, value in metadata.items():
        for pattern, kind, called in _TYPED:
            if re.fullmatch(pattern, key) and type(value) is not kind:
                raise refuse(f"{key:.80} is {value!r:.80}, not a {called}")


class _Cursor:
    """Reads on in a file, never beyond its end."""

    def __init__(
        self, file: BufferedReader, size: int, refuse: Callable[[str], CheckpointError]
    ) -> None:
        self.file, self.refuse = file, refuse
        self.end = min(size, MAX_HEADER_BYTES)
        self.position, self.digest = 0, hashlib.sha256()

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes."""
        if count > self.end - self.position:
            raise self.refuse(
                f"{what} would take {count} bytes, and {self.end - self.position} are left of the"
                " file or of the largest header"
            )
        data = self.file.read(count)
        if len(data) != count:
            raise self.refuse("it became shorter while it was read")
        self.position += count
        self.digest.update(data)
        return data

    def number(self, form: str, what: str) -> Any:
        """The next number, by its form in `struct`."""
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def text(self, what: str, most: int = MAX_HEADER_BYTES) -> str:
        """The next text: its length in bytes, then UTF-8."""
        length = self.number("<Q", what)
        if length > most:
            raise self.refuse(f"{what} has {length} bytes")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self.refuse(f"{what} is not UTF-8") from error

    def counted(self, count: int, least: int, what: str) -> int:
        """A count of things that take at least so many bytes each."""
        if count * least > self.end - self.position:
            raise self.refuse(f"it says that it has {count} {what}, and it is shorter than that")
        return count

    def value(self, key: str) -> Any:
        """The metadata value of a key: a number, a text, a list of texts or an array."""
        what = f"the value of {key!r:.80}"
        code = self.number("<I", what)
        if code == _TEXT:
            return self.text(what)
        if code != _ARRAY:
            one = self._numbers(code, 1, what)[0]
            # The shortest decimal of a float32 is the number that a config.json had
            return float(str(one)) if code == _FLOAT32 else one.item()
        inner, count = self.number("<I", what), self.number("<Q", what)
        if inner == _TEXT:
            return [self.text(what) for _ in range(self.counted(count, 8, f"texts in {key!r:.80}"))]
        if inner == _ARRAY:
            raise self.refuse(f"{what} is an array of arrays")
        return self._numbers(inner, count, what)

    def _numbers(self, code: int, count: int, what: str) -> Any:
        if code not in _NUMBERS:
            raise self.refuse(f"{what} is of the unknown type {code}")
        dtype = np.dtype(_NUMBERS[code])
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)


def _begin(cursor: _Cursor, path: Path) -> tuple[int, int]:
    """Magic and version; returns the numbers of tensors and of metadata values."""
    magic = cursor.take(4, "its magic")
    if magic != b"GGUF":
        lfs = magic == b"vers"  # a git-lfs pointer begins "version https://git-lfs..."
        how = "it is a Git LFS pointer; run `git lfs pull`" if lfs else f"it begins with {magic!r}"
        raise cursor.refuse(how)
    version = cursor.number("<I", "its version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
        how = "is big-endian" if swapped else f"has version {version}"
        raise UnsupportedModel(
            f"{path} {how}; this version reads little-endian GGUF of versions 2 and 3.",
            "Convert the original model again with a current llama.cpp.",
        )
    return cursor.number("<Q", "its counts"), cursor.number("<Q", "its counts")


def _tensor(cursor: _Cursor, path: Path) -> StoredBlocks:
    """One entry; its offset still counts from the start of the data."""
    name = cursor.text("the name of a tensor", MAX_NAME_BYTES)
    what = f"tensor {name!r:.80}"
    dimensions = cursor.number("<I", what)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.refuse(f"{what} has {dimensions} dimensions")
    sizes = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions, what))
    code, offset = cursor.number("<I", what), cursor.number("<Q", what)
    kind = TYPES.get(code)
    if kind is None:
        raise UnsupportedModel(
            f"{path}: {what} has type {code} of ggml, which this version does not read.",
            "Give another quantization of the model.",
        )
    if not all(1 <= size <= MAX_SIZE for size in sizes) or sizes[0] % kind.block:
        raise cursor.refuse(f"{what} of {kind.name} has the sizes {list(sizes)}")
    num_bytes = math.prod(sizes) // kind.block * kind.size_bytes
    return StoredBlocks(name, kind, tuple(sizes[::-1]), path, offset, num_bytes)


def _placed(
    tensors: Any, start: int, alignment: int, size: int, refuse: Callable[[str], CheckpointError]
) -> dict[str, StoredBlocks]:
    """The tensors with offsets in the file, which must be aligned, apart and within it."""
    end, last, placed = 0, "", {}
    for tensor in sorted(tensors, key=lambda one: one.offset):
        what = f"tensor {tensor.name!r:.80}"
        if tensor.offset % alignment:
            raise refuse(f"{what} begins at {tensor.offset}, no multiple of {alignment}")
        if tensor.offset < end:
            raise refuse(f"{what} overlaps {last!r:.80}")
        end, last = tensor.offset + tensor.num_bytes, tensor.name
        if start + end > size:
            raise refuse(f"{what} ends at byte {start + end}, and the file has {size}")
        placed[tensor.name] = replace(tensor, offset=start + tensor.offset)
    return placed
