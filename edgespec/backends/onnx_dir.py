"""An exported component as `build` reads it: a decoder or an image encoder.

Knows the names of files and what export wrote into them. Knows no engine and no backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from edgespec.artifacts import file_names, hashes, json_files
from edgespec.artifacts.component import ComponentConfig, read_method
from edgespec.artifacts.component_files import (
    d2t_offsets,
    embedding_tensor,
    head_tensors,
    required_arrays,
)
from edgespec.artifacts.directories import DirectoryKind, kind_of, not_an_export
from edgespec.artifacts.manifest import ExportManifest
from edgespec.contract import Role
from edgespec.errors import BundleError
from edgespec.safe_read.fields import BundleFields
from edgespec.vision.component import VisionComponentConfig, is_visual

Config = TypeVar("Config", ComponentConfig, VisionComponentConfig)


@dataclass(frozen=True, slots=True)
class ExportDir(Generic[Config]):
    """An export whose files are those of its manifest."""

    path: Path
    config: Config
    manifest: ExportManifest

    @property
    def role(self) -> Role:
        """The role of the exported component."""
        return self.config.role

    @property
    def model(self) -> Path:
        """The path of the canonical graph."""
        return self.path / file_names.MODEL

    @property
    def golden(self) -> Path | None:
        """The path of the golden inputs and outputs; None where the export made none."""
        return self.path / file_names.GOLDEN if file_names.GOLDEN in self.manifest.files else None


class OnnxDir(ExportDir[ComponentConfig]):
    """The export of a decoder: of a base, a draft or a plain model."""

    __slots__ = ()


class VisionOnnxDir(ExportDir[VisionComponentConfig]):
    """The export of an image encoder."""

    __slots__ = ()


AnyOnnxDir = OnnxDir | VisionOnnxDir


def open_export(path: Path, *, spec_base: bool = False, spec_draft: bool = False) -> AnyOnnxDir:
    """Read and check an exported directory; the flags, where given, must say what its config.json
    says. BundleError otherwise."""
    if spec_base and spec_draft:
        message = "`spec_base` and `spec_draft` exclude each other"
        raise BundleError(message, "Build base and draft one after the other.")
    role = exported_role(path)
    asked = Role.BASE if spec_base else Role.DRAFT if spec_draft else role
    if asked is not role:
        message = f"{path} is exported as {role.value}, the flag says {asked.value}"
        raise BundleError(
            message, f"Leave the flag out, or give the directory of the {asked.value}."
        )
    manifest = ExportManifest.read(path)
    if manifest.role is not role:
        said = f"the role {manifest.role.value}, its config.json {role.value}"
        raise BundleError(f"{path / file_names.MANIFEST} has {said}", hashes.EDITED)
    config = path / file_names.CONFIG
    if role is Role.VISUAL:
        vision, known = VisionComponentConfig.read(config), file_names.PROCESSOR_FILES
        hashes.refuse_unlisted(path, manifest.files, (), (*file_names.EXPORT_FILES, *known))
        hashes.check_files(path, manifest.files)
        return VisionOnnxDir(path, vision, manifest)
    onnx = OnnxDir(path, ComponentConfig.read(config), manifest)
    required = required_arrays(onnx.config)
    hashes.refuse_unlisted(path, manifest.files, required, file_names.EXPORT_FILES)
    hashes.check_files(path, manifest.files)
    check_arrays(onnx)
    return onnx


def exported_role(path: Path) -> Role:
    """The role of an exported directory by its config.json. BundleError for anything else."""
    check_is_component(path)
    config = path / file_names.CONFIG
    raw = json_files.read_json(config)
    return Role.VISUAL if is_visual(raw) else read_method(BundleFields(raw, str(config)))[1]


def open_onnx_dir(path: Path) -> OnnxDir:
    """Read and check the export of a decoder. BundleError for anything else."""
    onnx = open_export(path)
    if not isinstance(onnx, OnnxDir):
        message = f"{path} is the export of an image encoder, and no language model"
        raise BundleError(message, "Give the directory of the language model, such as OUT/llm.")
    return onnx


def check_arrays(onnx: OnnxDir) -> None:
    """BundleError where the arrays beside a graph are not those of its config.json."""
    if file_names.EMBEDDING in onnx.manifest.files:
        embedding_tensor(onnx.path / file_names.EMBEDDING, onnx.config)
    if file_names.D2T in onnx.manifest.files:
        d2t_offsets(onnx.path / file_names.D2T, onnx.config)
    if file_names.HEADS in onnx.manifest.files:
        head_tensors(onnx.path / file_names.HEADS, onnx.config)


def check_is_component(path: Path) -> None:
    """BundleError that says what a path is that is no component, and what to do with it."""
    kind = kind_of(path)
    without_manifest = kind is DirectoryKind.UNKNOWN and (path / file_names.MODEL).is_file()
    if kind is not DirectoryKind.EXPORT and not without_manifest:
        raise not_an_export(path)
