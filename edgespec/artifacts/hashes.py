"""What a manifest says of the files beside it: sizes and sha256, and what differs from them.

Knows files. Knows nothing of graphs, tokenizers or requests.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from edgespec.artifacts.file_names import MANIFEST
from edgespec.errors import BundleError
from edgespec.safe_read.regular import open_regular

EDITED = "The file is damaged or was edited: copy or make the directory again."


def sha256_file(path: Path) -> str:
    """Returns the sha256 of a file as hexadecimal digits."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_entries(
    directory: Path, known: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """Returns size and sha256 of each file beside the manifest, by name.

    `known` holds hashes that were computed while writing.
    """
    entries = {}
    for path in sorted(directory.iterdir()):
        if path.name == MANIFEST or not path.is_file():
            continue
        digest = (known or {}).get(path.name) or sha256_file(path)
        entries[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
    return entries


def check_files(directory: Path, files: object, *, trust_unchanged: bool = False) -> None:
    """Raises BundleError for the first file that differs from its manifest entry; see `faults`."""
    for fault in faults(directory, files, trust_unchanged=trust_unchanged):
        raise fault


def faults(
    directory: Path, files: object, *, read_up_to: float = math.inf, trust_unchanged: bool = False
) -> Iterator[BundleError]:
    """Yields an error for each file that differs from its manifest entry in size or hash.

    Only the size counts for files of more than `read_up_to` bytes and, with `trust_unchanged`, for
    files with the recorded modification time: these are not read.
    """
    for name, entry in listed_files(directory, files).items():
        path = contained(directory, name)
        if not path.is_file():
            yield BundleError(
                f"{path} is missing", "The directory is incomplete: copy or make it again."
            )
            continue
        stat = path.stat()
        if stat.st_size != entry["bytes"]:
            message = f"{path} has {stat.st_size} bytes, its manifest says {entry['bytes']}"
            yield BundleError(
                message, "The file is truncated or was replaced: copy or make the directory again."
            )
            continue
        if stat.st_size > read_up_to or (
            trust_unchanged and entry.get("mtime_ns") == stat.st_mtime_ns
        ):
            continue
        if sha256_file(path) != entry["sha256"]:
            message = f"{path} does not have the hash that its manifest records"
            yield BundleError(
                message, "The file is damaged or was replaced: copy or make the directory again."
            )


def listed_files(directory: Path, files: object) -> dict[str, dict[str, Any]]:
    """Returns the manifest's entries by file name, each with `bytes` and `sha256`.

    Raises BundleError if `files` is not of that form, or empty.
    """
    message = f"{directory / MANIFEST} does not list its files with their sizes and hashes"
    if not isinstance(files, dict) or not files:
        raise BundleError(message, EDITED)
    for name, entry in files.items():
        contained(directory, name)
        if not is_entry(entry):
            raise BundleError(f"{message}: the entry of {name!r:.80} is not of that form", EDITED)
    return files


def is_entry(value: object) -> bool:
    """Returns whether a value is a manifest entry: `bytes`, `sha256` and, for engines,
    `mtime_ns`."""
    return (
        isinstance(value, dict)
        and value.keys() <= {"bytes", "sha256", "mtime_ns"}
        and all(type(value[key]) is int and value[key] >= 0 for key in value.keys() - {"sha256"})
        and "bytes" in value
        and isinstance(value.get("sha256"), str)
        and re.fullmatch("[0-9a-f]{64}", value["sha256"]) is not None
    )


def refuse_unlisted(
    directory: Path, listed: Collection[str], required: Iterable[str], known: Iterable[str]
) -> None:
    """Raises BundleError unless a manifest lists every file that is read: those that are
    `required`, and those of the `known` names that are there."""
    for name in required:
        if name not in listed:
            message = f"{directory / MANIFEST} does not list {name}, which is read"
            raise BundleError(message, EDITED)
    for name in known:
        if name not in listed and os.path.lexists(directory / name):
            message = f"{directory / MANIFEST} does not list {name}, which is there"
            raise BundleError(message, f"Remove {directory / name}, or make the directory again.")


def refuse_unknown(
    directory: Path, listed: Iterable[str], known: Collection[str], role: str
) -> None:
    """Raises BundleError where a manifest lists a file that is not of the `known` names, those that
    a component of the role has."""
    for name in listed:
        if name not in known:
            message = (
                f"{directory / MANIFEST} lists {name!r:.80}, which nothing of the role {role} has"
            )
            raise BundleError(message, EDITED)


def contained(directory: Path, name: str) -> Path:
    """Returns `directory/name`. Raises BundleError if `name` could point outside the directory."""
    if not name or name in {".", ".."} or Path(name).name != name:
        raise BundleError(
            f"{directory / MANIFEST} names the file {name!r}",
            "File names in it must be plain names.",
        )
    return directory / name
