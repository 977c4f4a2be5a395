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
from edgespec.errors import BundleError
from edgespec.methods import METHODS
from edgespec.stored.fields import BundleFields

PLAIN_COMPONENT = "llm"


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
    """BundleError where a path is no directory, or is the parent of components."""
    if not path.is_dir():
        what = f"--onnx-dir {path} is not a directory"
        raise BundleError(what, "Give a directory that edgespec export wrote.")
    if (path / bundle.CONFIG).is_file():
        return
    inside = [path / name for name in components() if (path / name / bundle.CONFIG).is_file()]
    if inside:
        what = f"{path} holds no config.json"
        raise BundleError(what, f"Give the component itself: --onnx-dir {inside[0]}")


def components() -> tuple[str, ...]:
    """The names of the directories below OUT that export writes."""
    of_drafts = [row.component for row in METHODS.values() if row.component is not None]
    return tuple(dict.fromkeys((PLAIN_COMPONENT, *of_drafts)))
