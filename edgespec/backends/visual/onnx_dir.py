"""An exported image encoder as `build` reads it.

Knows the names of files and what export wrote into them. Knows no engine and no backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec import bundle
from edgespec.backends.onnx_dir import check_is_component
from edgespec.contract import Tower
from edgespec.errors import BundleError
from edgespec.manifest import ExportManifest
from edgespec.vision.component import VisualConfig, is_visual


@dataclass(frozen=True, slots=True)
class VisualOnnxDir:
    """An export whose files are those of its manifest."""

    path: Path
    config: VisualConfig
    manifest: ExportManifest

    @property
    def model(self) -> Path:
        """The path of the canonical graph."""
        return self.path / bundle.MODEL

    @property
    def golden(self) -> Path | None:
        """The path of the golden inputs and outputs; None where the export made none."""
        return self.path / bundle.GOLDEN if bundle.GOLDEN in self.manifest.files else None


def is_visual_export(path: Path) -> bool:
    """Whether a directory is an exported image encoder by its config.json. BundleError where that
    is there and cannot be read."""
    config = path / bundle.CONFIG
    return config.is_file() and is_visual(bundle.read_json(config))


def open_visual_onnx_dir(path: Path) -> VisualOnnxDir:
    """Read and check an exported image encoder. BundleError for anything else."""
    check_is_component(path)
    config = VisualConfig.read(path / bundle.CONFIG)
    manifest = ExportManifest.read(path)
    if manifest.role is not Tower.VISUAL:
        said = f"the role {manifest.role.value}, its config.json {Tower.VISUAL.value}"
        raise BundleError(f"{path / bundle.MANIFEST} has {said}", bundle.EDITED)
    known = (*bundle.EXPORT_FILES, *bundle.PROCESSOR_FILES)
    bundle.refuse_unlisted(path, manifest.files, (), known)
    bundle.check_files(path, manifest.files)
    return VisualOnnxDir(path, config, manifest)
