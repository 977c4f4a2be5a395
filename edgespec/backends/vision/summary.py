"""What an exported image encoder and the directory of a built one are, read from their JSON: no
engine is opened.

Knows what `inspect` shows. What cannot be read leaves a problem behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.artifacts import file_names, hashes, json_files
from edgespec.artifacts.manifest import ExportManifest
from edgespec.backends.manifest import EngineEntry, read_entries
from edgespec.backends.summary import RunsHere, is_faulty, runs_here, unlisted_files
from edgespec.backends.vision.config import VisionEngineConfig
from edgespec.backends.vision.engine_dir import NAME
from edgespec.errors import EdgeSpecError, noted
from edgespec.vision.component import VisionComponentConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSummary:
    """An image encoder, exported or built (`entry`). What could not be read is None.

    `files` are sizes in bytes by name, `not_in_manifest` the files that the manifest does not list.
    """

    files: Mapping[str, int]
    not_in_manifest: tuple[str, ...]
    manifest: ExportManifest | None = None
    config: VisionComponentConfig | None = None
    entry: EngineEntry | None = None
    engine: VisionEngineConfig | None = None
    runs_here: RunsHere | None = None

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(self.files.values())

    @property
    def golden(self) -> bool:
        """Whether golden inputs and outputs are there."""
        return file_names.GOLDEN in self.files

    def to_dict(self) -> dict[str, Any]:
        """The keys of `edgespec inspect --json`: those that are known."""
        keys: dict[str, Any] = {
            "kind": "export" if self.entry is None else "engines",
            "role": NAME,
            "bytes": self.bytes,
            "files": dict(self.files),
            "not_in_manifest": list(self.not_in_manifest),
        }
        if self.manifest is not None:
            keys |= {"manifest": self.manifest.without_files(), "golden": self.golden}
        if self.entry is not None:
            keys |= self.entry.to_dict() | {"files": dict(self.files)}
        if self.runs_here is not None:
            keys["runs_here"] = asdict(self.runs_here)
        found = self.engine or self.config
        return keys | ({"config": found.to_dict()} if found is not None else {})


def visual_export_summary(
    path: Path, problems: list[EdgeSpecError], read_up_to: float
) -> VisionSummary:
    """What edgespec export wrote. Hashes files of up to `read_up_to` bytes; what is wrong is added
    to `problems`. Raises BundleError without a manifest that lists the files."""
    files = hashes.listed_files(path, json_files.read_manifest(path).get("files"))
    faults = list(hashes.faults(path, files, read_up_to=read_up_to))
    problems += faults
    summary = summary_of(path, files)
    with noted(problems):
        summary = replace(summary, manifest=ExportManifest.read(path))
    with noted(problems):
        if not is_faulty(path / file_names.CONFIG, faults):
            summary = replace(summary, config=VisionComponentConfig.read(path / file_names.CONFIG))
    return summary


def visual_engine_summary(
    path: Path, problems: list[EdgeSpecError], read_up_to: float
) -> VisionSummary:
    """What edgespec build made, and whether this machine runs it. Raises BundleError where the
    manifest describes no engine."""
    entry = EngineEntry.from_dict(read_entries(path)[NAME], path, NAME)
    files = entry.files_dict()
    faults = list(hashes.faults(path, files, read_up_to=read_up_to))
    problems += faults
    here = runs_here(entry, "the image encoder")
    summary = replace(summary_of(path, files), entry=entry, runs_here=here)
    with noted(problems):
        if not is_faulty(path / file_names.CONFIG, faults):
            engine = VisionEngineConfig.read(path / file_names.CONFIG)
            summary = replace(summary, engine=engine, config=engine.component)
    return summary


def summary_of(path: Path, files: Mapping[str, Mapping[str, Any]]) -> VisionSummary:
    """The files of a directory by what its manifest lists."""
    sizes = {name: int(entry["bytes"]) for name, entry in files.items()}
    return VisionSummary(files=sizes, not_in_manifest=tuple(unlisted_files(path, set(files))))
