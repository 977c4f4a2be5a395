"""The directory of a built image encoder: `visual` below that of the language model's engines.

Knows file names, and how a finished engine gets in whole. Knows no engine library.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from edgespec.artifacts import atomic, file_names, hashes, json_files, provenance
from edgespec.backends.manifest import KIND, EngineEntry, FileEntry, read_entries
from edgespec.backends.vision.config import VisionEngineConfig
from edgespec.contract import Role
from edgespec.errors import BundleError

NAME = Role.VISUAL.value
BUILD_IT = "Build it: edgespec build --onnx-dir OUT/visual --engine-dir ENGINES"


def visual_dir(engine_dir: Path) -> Path:
    """Where the engine of an image encoder stands that is built into `engine_dir`."""
    return engine_dir if engine_dir.absolute().name == NAME else engine_dir / NAME


def is_visual_engine(path: Path) -> bool:
    """Whether a directory says that it holds an image encoder. Never raises."""
    try:
        return set(read_entries(path)) == {NAME}
    except (BundleError, OSError):
        return False


def find_visual_dir(path: Path) -> Path:
    """The directory of an image encoder at a path or in `visual` below it. BundleError where there
    is none."""
    for directory in (path / NAME, path):
        if is_visual_engine(directory):
            return directory
    raise BundleError(f"{path} has no engine of an image encoder", BUILD_IT)


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A new directory that takes the place of `target` at the end of the block; nothing is changed
    where the block fails. BundleError where `target` holds anything but such an engine."""
    refuse_foreign(target)
    made = atomic.missing_parents(target)
    try:
        with atomic.writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic.staging_in(target.parent, target.name) as staging:
                yield staging
                with atomic.locked(target.parent):
                    refuse_foreign(target)
                    atomic.take_place(staging, target)
    finally:
        atomic.remove_if_empty(*made)


def refuse_foreign(target: Path) -> None:
    """BundleError where a directory has files that no build of an image encoder put there."""
    if not target.exists():
        return
    listed = set()
    if is_visual_engine(target):
        listed = set(EngineEntry.from_dict(read_entries(target)[NAME], target, NAME).files)
        listed.add(file_names.MANIFEST)
    names = sorted(path.name for path in target.iterdir()) if target.is_dir() else [target.name]
    if foreign := [name for name in names if name not in listed]:
        raise BundleError(
            f"{target} has files that edgespec build did not write and would remove:"
            f" {', '.join(foreign[:5])}",
            "Choose another --engine-dir, or move these files away.",
        )


def write_manifest(directory: Path, entry: EngineEntry) -> EngineEntry:
    """Write manifest.json over the files of a directory; returns the entry with them. Raises
    OSError."""
    files = {path.name: FileEntry.of(path) for path in sorted(directory.iterdir())}
    entry = replace(entry, files=files)
    value = {
        "format": json_files.MANIFEST_FORMAT,
        "kind": KIND,
        **provenance.provenance(),
        "engines": {NAME: entry.to_dict()},
    }
    json_files.write_json(directory / file_names.MANIFEST, value)
    return entry


def open_visual_dir(directory: Path) -> tuple[VisionEngineConfig, EngineEntry]:
    """Config and manifest entry of a finished image encoder, its files checked; BundleError
    otherwise."""
    entries = read_entries(directory)
    if set(entries) != {NAME}:
        raise BundleError(f"{directory} has no engine of an image encoder", BUILD_IT)
    entry = EngineEntry.from_dict(entries[NAME], directory, NAME)
    known = [path.name for path in directory.iterdir() if path.name.startswith(f"{NAME}.")]
    hashes.refuse_unlisted(directory, entry.files, (file_names.CONFIG,), known)
    hashes.refuse_unlisted(directory, entry.files, (), file_names.PROCESSOR_FILES)
    hashes.check_files(directory, entry.files_dict(), trust_unchanged=True)
    config = VisionEngineConfig.read(directory / file_names.CONFIG)
    if config.weights != entry.weights:
        what = (
            f"{directory / file_names.CONFIG}: its 'weights' are not those of {file_names.MANIFEST}"
        )
        raise BundleError(what, hashes.EDITED)
    return config, entry
