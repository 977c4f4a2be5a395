"""safetensors files as edgespec writes them: the header, and arrays of known names and shapes.

The format: eight bytes with the header's length, the header as JSON, the tensors' bytes. Knows
bounds. Knows no model.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.errors import EdgeSpecError
from edgespec.safe_read.regular import open_regular

MAX_HEADER_BYTES = 100 * 2**20  # the safetensors library's own limit
MAX_DIMENSIONS = 8  # of a tensor; published models have four at most
MAX_SIZE = 2**40  # elements along a dimension

# Name in a header -> name in numpy, ml_dtypes and torch
DTYPES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}

Refuse = Callable[[str], EdgeSpecError]  # makes the error that says what is wrong with the file


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a header; `dtype` by numpy's name, `offset` in bytes from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's or ml_dtypes' dtype of that name."""
    return np.dtype(getattr(ml_dtypes, name, name))


def read_tensors(
    path: Path, refuse: Refuse, unknown_type: Refuse | None = None
) -> dict[str, StoredTensor]:
    """The tensors of a file's header by name, in the order of their bytes.

    Raises what `refuse` makes where the header is damaged, or the tensors do not fill the file,
    what `unknown_type` makes for a type that is not in DTYPES, and OSError where it cannot be read.
    """
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        start = file.read(8)
        header_bytes = int.from_bytes(start, "little")
        if len(start) == 8 and header_bytes > MAX_HEADER_BYTES:
            raise refuse(f"its header would be {header_bytes} bytes long")
        end = 8 + header_bytes
        if size_bytes < end:
            raise refuse(f"it is truncated, of {size_bytes} bytes where {end} are expected")
        text = file.read(header_bytes)
    entries = header_entries(text, refuse)
    tensors = [tensor_of(*entry, end, refuse, unknown_type or refuse) for entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    for tensor in tensors:
        if tensor.offset != end:
            raise refuse(
                f"tensor {tensor.name!r:.80} begins at byte {tensor.offset}, but the one before it"
                f" ends at {end}"
            )
        end += tensor.num_bytes
    if size_bytes < end:
        raise refuse(f"it is truncated, of {size_bytes} bytes where {end} are expected")
    if size_bytes > end:
        raise refuse(f"it has {size_bytes} bytes, and its tensors end at {end}")
    return {tensor.name: tensor for tensor in tensors}


def header_entries(text: bytes, refuse: Refuse) -> dict[str, Any]:
    """The entries of a header by tensor name, not looked into. Raises what `refuse` makes."""
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise refuse(f"its header is not JSON ({error!s:.120})") from error
    if not isinstance(header, dict):
        raise refuse("its header is not an object")
    header.pop("__metadata__", None)
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


def tensor_of(
    name: str, entry: object, data_start: int, refuse: Refuse, unknown_type: Refuse
) -> StoredTensor:
    """One entry of a header whose data begin at byte `data_start`."""
    if not isinstance(entry, dict):
        raise refuse(f"its header has no entry for tensor {name!r:.80}")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (isinstance(dtype, str) and is_naturals(shape) and is_naturals(span)) or len(span) != 2:
        raise refuse(f"its header has an invalid entry for tensor {name!r:.80}")
    if len(shape) > MAX_DIMENSIONS or any(size > MAX_SIZE for size in shape):
        sizes = ", ".join(map(str, shape[:MAX_DIMENSIONS]))
        raise refuse(f"tensor {name!r:.80} has {len(shape)} dimensions, of {sizes}")
    if dtype not in DTYPES:
        message = f"tensor {name!r:.80} has the type {dtype!r:.80}, which this version cannot read"
        raise unknown_type(message)
    num_bytes = math.prod(shape) * numpy_dtype(DTYPES[dtype]).itemsize
    if span[1] - span[0] != num_bytes:
        message = f"tensor {name!r:.80} of {num_bytes} bytes lies at {span[0]}..{span[1]}"
        raise refuse(message)
    return StoredTensor(name, DTYPES[dtype], tuple(shape), data_start + span[0], num_bytes)


def is_naturals(value: object) -> TypeGuard[list[int]]:
    """Whether a value is a list of non-negative integers below 2^63, the limit of file offsets."""
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 2**63 for item in value
    )


def read_array(path: Path, tensor: StoredTensor) -> NDArray[Any]:
    """A tensor as a new array. Raises OSError."""
    with open_regular(path) as file:
        file.seek(tensor.offset)
        data = file.read(tensor.num_bytes)
    if tensor.dtype == "bool":  # any byte but 0 is true
        return np.frombuffer(data, np.uint8).reshape(tensor.shape).astype(np.bool_)
    array: NDArray[Any] = np.frombuffer(data, numpy_dtype(tensor.dtype)).reshape(tensor.shape)
    return array.copy()
