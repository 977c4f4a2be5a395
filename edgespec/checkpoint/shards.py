"""The index of weights in several files: which file has which tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgespec.checkpoint.source import read_json, some_of
from edgespec.errors import CheckpointError


def read_weight_map(index: Path) -> dict[str, str]:
    """Returns tensor -> file of an index. Raises CheckpointError for a file beyond it."""
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


def shards(index: Path, weight_map: Mapping[str, str]) -> tuple[Path, ...]:
    """Returns the files of an index. Raises CheckpointError where one is missing."""
    files = tuple(index.parent / name for name in sorted(set(weight_map.values())))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{index} names {len(missing)} of {len(files)} shards that are not there:"
            f" {some_of(missing)}.",
            "Download the missing files into the same directory.",
        )
    return files


def check_complete(
    index: Path, weight_map: Mapping[str, str], stored: Mapping[str, object]
) -> None:
    """Raises CheckpointError for tensors of an index that their shards do not have."""
    lost = [f"{name} ({file})" for name, file in weight_map.items() if name not in stored]
    if lost:
        raise CheckpointError(
            f"{index} names tensors that are not in their shards: {some_of(lost)}.",
            "Download the index and these shards again: they do not belong together.",
        )
