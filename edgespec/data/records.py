"""The records of a data set: of a local copy in Parquet, JSONL or JSON, or streamed from the hub.

Knows files and the packages that read them. Knows no data set.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from edgespec.data.sources.row import Part
from edgespec.errors import EnvironmentProblem, MissingDependency, RequestError
from edgespec.prompts.chats import parsed
from edgespec.safe_read.regular import open_regular

ENDINGS = (".parquet", ".jsonl", ".json")
LOCAL_COPY = "Or give a local copy with files in Parquet, JSONL or JSON: NAME=PATH."
INSTALL = "Run: pip install 'edgespec[datasets]'."
Record = Mapping[str, Any]


def records_of(part: Part, local: Path | None, cap: int | None) -> Iterator[Record]:
    """The records of a part, at most `cap` a split. Raises RequestError, MissingDependency and
    EnvironmentProblem."""
    caps = [limit for limit in (part.cap, cap) if limit is not None]
    most = min(caps, default=None)
    for split in splits_of(part, local):
        yield from islice(split, most)


def splits_of(part: Part, local: Path | None) -> Iterator[Iterator[Record]]:
    """The records of each split."""
    if local is None:
        yield from hub_splits(part)
    elif local.is_file():
        yield file_records(local)
    else:
        for name in part.splits or ("",):
            yield (record for path in files_of(part, local, name) for record in file_records(path))


def files_of(part: Part, local: Path, split: str) -> list[Path]:
    """The files of a split in a local copy: of a directory with several repositories those below
    its name. Raises RequestError where there are none."""
    own = local / part.repository.rpartition("/")[2]
    root = own if own.is_dir() else local
    files = [path for path in sorted(root.rglob("*")) if path.suffix in ENDINGS and path.is_file()]
    named = [path for path in files if path.name.startswith(split)]
    only = files if len(files) == 1 else []  # a set that has one file may call it as it likes
    if not (found := named or only):
        what = f"the split {split} of {part.repository}" if split else part.repository
        raise RequestError(f"{root} has no files of {what}.", LOCAL_COPY)
    return found


def file_records(path: Path) -> Iterator[Record]:
    """The records of a file. Raises RequestError that names the line or the record."""
    if path.suffix == ".parquet":
        yield from parquet_records(path)
        return
    try:
        with open_regular(path) as file:
            if path.suffix == ".json":
                values = whole(file.read(), path)
                yield from (checked(value, f"{path}, record {n}") for n, value in values)
                return
            for number, line in enumerate(file, 1):
                where = f"{path}, line {number}"
                if line.strip():
                    yield checked(parsed(line, where), where)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.", LOCAL_COPY) from error


def whole(data: bytes, path: Path) -> list[tuple[int, Any]]:
    """The numbered values of a JSON list. Raises RequestError."""
    values = parsed(data, str(path))
    if not isinstance(values, list):
        raise RequestError(f"{path} is not a list.", LOCAL_COPY)
    return [*enumerate(values, 1)]


def checked(value: object, where: str) -> Record:
    """A record. Raises RequestError."""
    if not isinstance(value, dict):
        raise RequestError(f"{where} is {json.dumps(value)[:40]}, not an object.", LOCAL_COPY)
    return value


def parquet_records(path: Path) -> Iterator[Record]:
    """The rows of a Parquet file, some at a time. Raises MissingDependency, RequestError."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependency(f"{path} needs the package pyarrow.", INSTALL) from error
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise RequestError(
            f"{path} is no readable Parquet file: {first_line(error)}", "Copy it again."
        ) from error


def hub_splits(part: Part) -> Iterator[Iterator[Record]]:
    """The splits of a repository on the hub. Raises MissingDependency and EnvironmentProblem."""
    try:
        from datasets import get_dataset_split_names, load_dataset
    except ImportError as error:
        message = f"{part.repository} on the hub needs the package datasets."
        raise MissingDependency(message, f"{INSTALL} {LOCAL_COPY}") from error
    with from_hub(part):
        splits = part.splits or get_dataset_split_names(part.repository)
    for split in splits:
        yield streamed(part, split, load_dataset)


def streamed(part: Part, split: str, load_dataset: Callable[..., Any]) -> Iterator[Record]:
    """The records of a split, as they are asked for."""
    with from_hub(part):
        yield from load_dataset(part.repository, split=split, streaming=True)


@contextmanager
def from_hub(part: Part) -> Iterator[None]:
    """What fails in a block is an EnvironmentProblem that names the repository."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise EnvironmentProblem(
            f"{part.repository} could not be read from the hub: {first_line(error)}",
            f"Look at the network. {LOCAL_COPY}",
        ) from error


def first_line(error: Exception) -> str:
    """What an error says first."""
    return str(error).strip().partition("\n")[0]
