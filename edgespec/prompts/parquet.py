"""Rows of a Parquet file as JSON would have them, read by pyarrow or pandas where one is installed.

Knows the file's mark and the two packages. Knows nothing of prompts.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from edgespec.errors import MissingDependency, RequestError

MARK = b"PAR1"  # at both ends of a file
MAX_ROWS = 100_000


def is_parquet(data: bytes) -> bool:
    """Whether the bytes are those of a Parquet file, whole or cut off."""
    return data.startswith(MARK)


def parquet_rows(data: bytes, source: str) -> Iterator[tuple[int, dict[str, object]]]:
    """The rows with their numbers, from 1; columns without a value are left out. Raises
    MissingDependency, and RequestError for a damaged file."""
    if not data.endswith(MARK) or len(data) < 2 * len(MARK):
        raise RequestError(f"{source} is a Parquet file without its end", "Copy it again.")
    columns = _columns(data, source)
    names, rows = [*columns], zip(*columns.values(), strict=True)
    for number, row in enumerate(rows, 1):
        if number > MAX_ROWS:
            raise RequestError(f"{source} has more than {MAX_ROWS} rows", "Split it.")
        pairs = zip(names, row, strict=True)
        yield number, {name: value for name, value in pairs if value is not None}


def _columns(data: bytes, source: str) -> dict[str, list[Any]]:
    """Each column as plain Python values."""
    try:
        if (parquet := _package("pyarrow.parquet")) is not None:
            columns: dict[str, list[Any]] = parquet.read_table(io.BytesIO(data)).to_pydict()
            return columns
        if (pandas := _package("pandas")) is not None:
            frame = pandas.read_parquet(io.BytesIO(data))
            return {str(name): [_plain(v) for v in frame[name].tolist()] for name in frame.columns}
    except Exception as error:  # of whatever kind: the packages have errors of their own
        if isinstance(error, ImportError):
            raise _missing(source) from error  # pandas reads Parquet by another package
        raise RequestError(
            f"{source} is no readable Parquet file: {error}", "Copy it again."
        ) from error
    raise _missing(source)


def _plain(value: object) -> object:
    """A value of pandas: arrays are lists, and what is missing is None."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return None if value != value else value  # NaN alone differs from itself


def _package(name: str) -> Any:
    """The module, or None where it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        return None


def _missing(source: str) -> MissingDependency:
    message = f"{source} is a Parquet file, and neither pyarrow nor pandas is installed to read it"
    return MissingDependency(message, "Run: pip install pyarrow. Or give the prompts as JSONL.")
