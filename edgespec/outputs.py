"""Where output may go: never over what is read, and never into the directory of a model.

Knows files, and by which names a checkpoint, an export and an engine directory are recognised.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from edgespec import bundle
from edgespec.errors import BundleError, OverwriteError

CHECKPOINT, EXPORT, ENGINE = "a checkpoint", "an export", "an engine directory"
_KINDS = {"quantize": CHECKPOINT, "export": EXPORT, "engine": ENGINE}  # of our manifests
_WEIGHTS = (".safetensors", ".safetensors.index.json", "pytorch_model.bin", ".bin.index.json")
_ENGINES = ("llm.onnx", "spec_base.onnx", "spec_draft.onnx")
_ANOTHER = "Name another place for the output."
_ELSEWHERE = "Name a place outside of it."


def refuse_overwriting(output: str | os.PathLike[str], inputs: Iterable[object]) -> None:
    """Raises OverwriteError for an output that is an input, or lies in the directory of a model.

    `output` is a file or a directory that may be there or not. Of `inputs` those count that exist:
    files, and directories with the files in them. Links of both kinds count as what they mean.
    """
    path = Path(output)
    for source in existing(inputs):
        if same(path, source):
            name = "" if str(path) == str(source) else f": {source}"
            raise OverwriteError(f"{path} is an input of this command{name}", _ANOTHER)
        for file in source.iterdir() if source.is_dir() else ():
            if same(path, file):
                raise OverwriteError(f"{path} is an input of this command: {file}", _ANOTHER)
        for parent in parents(path) if source.is_dir() else ():
            if same(parent, source):
                raise OverwriteError(f"{path} lies in an input: {source}", _ELSEWHERE)
    for parent in parents(path):
        refuse_model_directory(parent, f"{path} lies in", _ELSEWHERE)


def refuse_model_directory(
    directory: Path, what: str, remedy: str, but: Collection[str] = ()
) -> None:
    """Raises OverwriteError where a directory is one of a model, of a kind that is not in `but`."""
    kind = model_directory(directory)
    if kind is not None and kind not in but:
        raise OverwriteError(f"{what} {directory}, which is {kind}", remedy)


def model_directory(directory: Path) -> str | None:
    """CHECKPOINT, EXPORT or ENGINE; None where a directory is none of them, or cannot be read."""
    try:
        names = {entry.name for entry in os.scandir(directory)}
    except OSError:
        return None
    if bundle.MANIFEST in names and (kind := _recorded_kind(directory / bundle.MANIFEST)):
        return kind
    if names.intersection(_ENGINES):
        return ENGINE
    if bundle.CONFIG not in names:
        return None
    if bundle.MODEL in names:
        return EXPORT
    return CHECKPOINT if any(name.endswith(_WEIGHTS) for name in names) else None


def _recorded_kind(manifest: Path) -> str | None:
    """What a manifest.json says; None for one of another program."""
    try:
        return _KINDS.get(str(bundle.read_json(manifest).get("kind")))
    except BundleError:
        return None


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
