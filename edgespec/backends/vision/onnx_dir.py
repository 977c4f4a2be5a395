"""An exported image encoder as `build` reads it.

Knows the names of files and what export wrote into them. Knows no engine and no backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec.artifacts import file_names, hashes, json_files
from edgespec.artifacts.manifest import ExportManifest
from edgespec.backends.onnx_dir import check_is_component
from edgespec.contract import Role
from edgespec.errors import BundleError
from edgespec.vision.component import VisionComponentConfig, is_visual


@dataclass(frozen=True, slots=True)
class VisionOnnxDir:
    """An export whose files are those of its manifest."""

    path: Path
    config: VisionComponentConfig
    manifest: ExportManifest

    @property
    def model(self) -> Path:
        """The path of the canonical graph."""
        return self.path / file_names.MODEL

    @property
    def golden(self) -> Path | None:
        """The path of the golden inputs and outputs; None where the export made none."""
        return self.path / file_names.GOLDEN if file_names.GOLDEN in self.manifest.files else None


def is_visual_export(path: Path) -> bool:
    """Whether a directory is an exported image encoder by its config.json. BundleError where that
    is there and cannot be read."""
    config = path / file_names.CONFIG
    return config.is_file() and is_visual(json_files.read_json(config))


def open_visual_onnx_dir(path: Path) -> VisionOnnxDir:
    """Read and check an exported image encoder. BundleError for anything else."""
    check_is_component(path)
    config = VisionComponentConfig.read(path / file_names.CONFIG)
    manifest = ExportManifest.read(path)
    if manifest.role is not Role.VISUAL:
        said = f"the role {manifest.role.value}, its config.json {Role.VISUAL.value}"
        raise BundleError(f"{path / file_names.MANIFEST} has {said}", hashes.EDITED)
    known = (*file_names.EXPORT_FILES, *file_names.PROCESSOR_FILES)
    hashes.refuse_unlisted(path, manifest.files, (), known)
    hashes.check_files(path, manifest.files)
    return VisionOnnxDir(path, config, manifest)
