"""Where output may go: never over what is read, and never into the directory of a model.

Knows files, and by which names a checkpoint, an export and an engine directory are recognised.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from edgespec.artifacts import file_names
from edgespec.artifacts.directories import DirectoryKind, manifest_kind
from edgespec.errors import OverwriteError

_WEIGHTS = (
    *(".safetensors", ".safetensors.index.json"),
    *("pytorch_model.bin", ".bin.index.json", "_lm_head.pt"),
)
_ENGINES = tuple(
    f"{stem}{suffix}"
    for stem in ("llm", "spec_base", "spec_draft")
    for suffix in (".onnx", ".engine")
)
_ANOTHER = "Name another place for the output."
_ELSEWHERE = "Name a place outside of it."


def refuse_overwriting(output: str | os.PathLike[str], inputs: Iterable[object]) -> None:
    """Raises OverwriteError for an output that is an input, or lies in the directory of a model.

    `output` is a file or a directory that may be there or not. Of `inputs` those count that exist:
    files, and directories with the files in them. Links of both kinds count as what they mean.
    """
    path = Path(output)
    for source in existing(inputs):
        for file in (source, *(source.iterdir() if source.is_dir() else ())):
            if same(path, file):
                name = "" if str(path) == str(file) else f": {file}"
                raise OverwriteError(f"{path} is an input of this command{name}", _ANOTHER)
        for parent in parents(path) if source.is_dir() else ():
            if same(parent, source):
                raise OverwriteError(f"{path} lies in an input: {source}", _ELSEWHERE)
    for parent in parents(path):
        refuse_model_directory(parent, f"{path} lies in", _ELSEWHERE)


def refuse_model_directory(
    directory: Path, reason: str, remedy: str, but: Collection[DirectoryKind] = ()
) -> None:
    """Raises OverwriteError where a directory is one of a model, of a kind that is not in `but`."""
    kind = model_directory(directory)
    if kind is not None and kind not in but:
        raise OverwriteError(f"{reason} {directory}, which is {kind.value}", remedy)


def model_directory(directory: Path) -> DirectoryKind | None:
    """CHECKPOINT, EXPORT or ENGINES; None where a directory is none of them, or cannot be read.

    Files that many directories have decide nothing here: what is refused must be sure.
    """
    if (kind := manifest_kind(directory)) is not None:
        return kind
    try:
        names = {entry.name for entry in os.scandir(directory)}
    except OSError:
        return None
    if names.intersection(_ENGINES):
        return DirectoryKind.ENGINES
    if file_names.CONFIG not in names:
        return None
    if file_names.MODEL in names:
        return DirectoryKind.EXPORT
    return DirectoryKind.CHECKPOINT if any(name.endswith(_WEIGHTS) for name in names) else None


def existing(inputs: Iterable[object]) -> list[Path]:
    """The inputs that are there; one that is none yet may be a name on the hub."""
    paths = [Path(str(source)) for source in inputs if source is not None and str(source)]
    return [path for path in paths if os.path.exists(path)]  # noqa: PTH110 - raises nothing


def parents(path: Path) -> list[Path]:
    """The directories that a path really lies in, the nearest first."""
    return list(Path(os.path.realpath(path)).parents)


def same(one: Path, other: Path) -> bool:
    """Whether two paths are one file or directory, by whatever names."""
    try:
        return os.path.samefile(one, other)  # noqa: PTH121 - for two paths alike
    except OSError:
        return False
