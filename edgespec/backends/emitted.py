"""A directory that --emit-onnx wrote: a lowered graph for another tool to build, and all that its
engine needs beside it.

Knows the files of an export, whose names they keep. What only the engine and its device know is
found when it is imported. Knows no engine library.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.artifacts import file_names, hashes, json_files, provenance
from edgespec.artifacts.directories import DirectoryKind, described, kind_of
from edgespec.artifacts.manifest import ExportManifest, ExportSource
from edgespec.backends.engine_config import EngineConfig
from edgespec.backends.onnx_dir import OnnxDir
from edgespec.contract import Role
from edgespec.errors import BundleError, command
from edgespec.safe_read.fields import BundleFields

KIND = "emitted"
SCRIPT = "build.sh"  # builds the engine beside the graph
GRAPH = (file_names.MODEL, file_names.MODEL_DATA)  # which are other ones than the export's
EMIT_AGAIN = f"Write it again: {command('build', emit_onnx=True)}."


@dataclass(frozen=True, slots=True)
class EmittedGraph:
    """Such a directory: what was exported, the backend that it is for, and what its engine will be
    as far as that was known."""

    onnx: OnnxDir
    backend: str
    config: EngineConfig


def complete(directory: Path, onnx: OnnxDir, backend: str, config: EngineConfig) -> None:
    """Put beside a lowered graph what its engine needs of the export, and a manifest. Raises
    OSError."""
    for name in onnx.manifest.files:
        if name not in (*GRAPH, file_names.CONFIG) and not (directory / name).exists():
            shutil.copyfile(onnx.path / name, directory / name)
    json_files.write_json(directory / file_names.CONFIG, config.to_dict())
    manifest = replace(onnx.manifest, files=hashes.file_entries(directory))
    value = {**manifest.to_dict(), **provenance.provenance(), "kind": KIND, "backend": backend}
    json_files.write_json(directory / file_names.MANIFEST, value)


def open_emitted(path: Path) -> EmittedGraph:
    """Read such a directory, whose files beside the graph must be those of its manifest: the graph
    itself is not needed any more. BundleError otherwise."""
    if kind_of(path) is not DirectoryKind.EMITTED:
        message = described("", path, kind_of(path))
        raise BundleError(
            message, f"Give a directory that {command('build', emit_onnx=True)} wrote."
        )
    where = path / file_names.MANIFEST
    fields = BundleFields(json_files.read_manifest(path), str(where))
    files = hashes.listed_files(path, fields.get("files"))
    beside = {name: files[name] for name in file_names.EXPORT_FILES if name in files}
    beside = {name: entry for name, entry in beside.items() if name not in GRAPH}
    hashes.refuse_unlisted(path, files, (file_names.CONFIG,), beside)
    hashes.check_files(path, beside)
    config = EngineConfig.read(path / file_names.CONFIG)
    manifest = manifest_of(fields, config.role, beside)
    return EmittedGraph(
        OnnxDir(path, config.component, manifest), fields.required_text("backend"), config
    )


def manifest_of(
    fields: BundleFields, role: Role, files: Mapping[str, Mapping[str, Any]]
) -> ExportManifest:
    """The export's manifest, as far as an engine has it from there. BundleError names a wrong
    key."""
    if fields.get("role") != role.value:
        said = fields.get("role")
        message = f"{fields.source} says the role {said!r}, {file_names.CONFIG} {role.value}"
        raise BundleError(message, EMIT_AGAIN)
    return ExportManifest(
        role=role,
        source=ExportSource.read(fields.section("source")),
        options=fields.section("options").raw,
        files=files,
        edgespec=fields.text("edgespec"),
        packages=fields.optional_section("packages").raw,
    )
