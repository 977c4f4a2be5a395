"""JSON objects on disk: read with errors that name the file, written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgespec.artifacts.atomic import replace_file
from edgespec.artifacts.file_names import MANIFEST
from edgespec.errors import BundleError
from edgespec.safe_read.regular import read_regular

MANIFEST_FORMAT = 1


def write_json(path: Path, value: object) -> None:
    """Writes JSON atomically: a reader sees the old file or the new one. Raises OSError."""
    try:
        data = json.dumps(value, indent=2, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a file name that is not UTF-8
        data = json.dumps(value, indent=2).encode()
    replace_file(path, data + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object. Raises BundleError that names a damaged or missing file."""
    try:
        value = json.loads(read_regular(path))
    except FileNotFoundError:
        raise BundleError(
            f"{path} does not exist", "Export or build the directory again."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BundleError(
            f"{path} cannot be read: {reason}", "Export or build the directory again."
        ) from None
    if not isinstance(value, dict):
        raise BundleError(f"{path} is not a JSON object", "Export or build the directory again.")
    return value


def read_manifest(directory: Path) -> dict[str, Any]:
    """Returns a directory's manifest. Raises BundleError for a damaged one or another format."""
    manifest = read_json(directory / MANIFEST)
    if manifest.get("format") != MANIFEST_FORMAT:
        raise BundleError(
            f"{directory / MANIFEST} has format {manifest.get('format')!r}, this version reads"
            f" {MANIFEST_FORMAT}",
            "Remove the directory, and export or build it again with this version of edgespec.",
        )
    return manifest
