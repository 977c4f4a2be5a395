"""An exported component as `build` reads it.

Knows the names of files and what export wrote into them. Knows no engine and no backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec import bundle
from edgespec.component import ComponentConfig, read_method
from edgespec.contract import Role
from edgespec.directories import Kind, kind_of, not_an_export
from edgespec.errors import BundleError
from edgespec.stored.fields import BundleFields


@dataclass(frozen=True, slots=True)
class OnnxDir:
    """An export whose files are those of its manifest. `source` is what it records of its
    checkpoint."""

    path: Path
    config: ComponentConfig
    source: Mapping[str, Any] | None

    @property
    def role(self) -> Role:
        """The role of the exported component: base or draft."""
        return self.config.role

    @property
    def model(self) -> Path:
        """The path of the canonical graph."""
        return self.path / bundle.MODEL

    @property
    def golden(self) -> Path | None:
        """The path of the golden inputs and outputs; None where the export made none."""
        path = self.path / bundle.GOLDEN
        return path if path.is_file() else None


def open_onnx_dir(path: Path, *, spec_base: bool, spec_draft: bool) -> OnnxDir:
    """Read and check an exported directory; the flags, where given, must say what its config.json
    says. BundleError otherwise."""
    if spec_base and spec_draft:
        what = "--spec-base and --spec-draft exclude each other"
        raise BundleError(what, "Build base and draft one after the other.")
    check_is_component(path)
    raw, where = bundle.read_json(path / bundle.CONFIG), str(path / bundle.CONFIG)
    manifest = bundle.read_manifest(path)
    _, role = read_method(BundleFields(raw, where))
    asked = Role.BASE if spec_base else Role.DRAFT if spec_draft else role
    if asked is not role:
        what = f"{path} is exported as {role.value}, the flag says {asked.value}"
        raise BundleError(what, f"Leave the flag out, or give the directory of the {asked.value}.")
    bundle.check_files(path, manifest.get("files"))
    source = manifest.get("source")
    config = ComponentConfig.from_dict(raw, where)
    return OnnxDir(path, config, source if isinstance(source, dict) else None)


def check_is_component(path: Path) -> None:
    """BundleError that says what a path is that is no component, and what to do with it."""
    kind = kind_of(path)
    without_manifest = kind is Kind.UNKNOWN and (path / bundle.MODEL).is_file()
    if kind is not Kind.EXPORT and not without_manifest:
        raise not_an_export(path)
