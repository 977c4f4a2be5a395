"""An exported component as `build` reads it.

Knows the names of files and what export wrote into them. Knows no engine and no backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec.artifacts import file_names, hashes, json_files
from edgespec.artifacts.component import ComponentConfig, read_method
from edgespec.artifacts.component_files import (
    d2t_offsets,
    embedding_tensor,
    head_tensors,
    required_arrays,
)
from edgespec.artifacts.directories import Kind, kind_of, not_an_export
from edgespec.artifacts.manifest import ExportManifest
from edgespec.contract import Role
from edgespec.errors import BundleError
from edgespec.safe_read.fields import BundleFields
from edgespec.vision.component import is_visual


@dataclass(frozen=True, slots=True)
class OnnxDir:
    """An export whose files are those of its manifest."""

    path: Path
    config: ComponentConfig
    manifest: ExportManifest

    @property
    def role(self) -> Role:
        """The role of the exported component: base or draft."""
        return self.config.role

    @property
    def model(self) -> Path:
        """The path of the canonical graph."""
        return self.path / file_names.MODEL

    @property
    def golden(self) -> Path | None:
        """The path of the golden inputs and outputs; None where the export made none."""
        return self.path / file_names.GOLDEN if file_names.GOLDEN in self.manifest.files else None


def open_onnx_dir(path: Path, *, spec_base: bool, spec_draft: bool) -> OnnxDir:
    """Read and check an exported directory; the flags, where given, must say what its config.json
    says. BundleError otherwise."""
    if spec_base and spec_draft:
        what = "`spec_base` and `spec_draft` exclude each other"
        raise BundleError(what, "Build base and draft one after the other.")
    check_is_component(path)
    raw, where = json_files.read_json(path / file_names.CONFIG), str(path / file_names.CONFIG)
    if is_visual(raw):
        what = f"{path} is the export of an image encoder, and no language model"
        raise BundleError(what, "Give the directory of the language model, such as OUT/llm.")
    _, role = read_method(BundleFields(raw, where))
    asked = Role.BASE if spec_base else Role.DRAFT if spec_draft else role
    if asked is not role:
        what = f"{path} is exported as {role.value}, the flag says {asked.value}"
        raise BundleError(what, f"Leave the flag out, or give the directory of the {asked.value}.")
    manifest = ExportManifest.read(path)
    if manifest.role is not role:
        said = f"the role {manifest.role.value}, its config.json {role.value}"
        raise BundleError(f"{path / file_names.MANIFEST} has {said}", hashes.EDITED)
    config = ComponentConfig.from_dict(raw, where)
    required, known = required_arrays(config), file_names.EXPORT_FILES
    hashes.refuse_unlisted(path, manifest.files, required, known)
    hashes.check_files(path, manifest.files)
    check_arrays(OnnxDir(path, config, manifest))
    return OnnxDir(path, config, manifest)


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
    without_manifest = kind is Kind.UNKNOWN and (path / file_names.MODEL).is_file()
    if kind is not Kind.EXPORT and not without_manifest:
        raise not_an_export(path)
