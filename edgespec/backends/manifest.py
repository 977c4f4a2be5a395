"""The manifest.json of an engine directory as frozen values: which engines are finished, what each
was built from, and which files belong to it.

Knows the keys on disk, and writes what it reads. Knows no engine library; a fingerprint is the
backend's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgespec.artifacts import file_names, hashes, json_files, provenance
from edgespec.backends.divergence import Divergence
from edgespec.backends.engine_config import EngineFields, EngineWeights, read_weights
from edgespec.contract import Role
from edgespec.errors import BundleError

KIND = "engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of an engine, as it was installed."""

    size_bytes: int
    sha256: str
    mtime_ns: int | None = None  # None: not recorded

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        """The entry of an existing file. Raises OSError."""
        stat = path.stat()
        sha256 = hashes.sha256_file(path)
        return cls(size_bytes=stat.st_size, sha256=sha256, mtime_ns=stat.st_mtime_ns)

    def to_dict(self) -> dict[str, Any]:
        """The keys of manifest.json: `bytes`, `sha256` and, where recorded, `mtime_ns`."""
        keys = {"bytes": self.size_bytes, "sha256": self.sha256, "mtime_ns": self.mtime_ns}
        return {name: value for name, value in keys.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """A finished engine. `fingerprint` is JSON that its backend understands; `source` is what the
    export recorded of its checkpoint.

    `golden_difference` and `golden_cosine` say how the engine's outputs agree with the golden ones;
    None: there were none, or its weights are as exported. `divergence` is what quantized weights
    cost; None: they are float32, or it was not measured.
    """

    backend: str
    fingerprint: Mapping[str, Any]
    weights: EngineWeights
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    source: Mapping[str, Any] | None = None
    golden_difference: float | None = None
    golden_cosine: float | None = None
    divergence: Divergence | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], directory: Path, name: str) -> EngineEntry:
        """The entry of these keys of manifest.json. BundleError names a wrong key."""
        fields = EngineFields(raw, f"{directory / file_names.MANIFEST} ({name})")
        return cls(
            backend=fields.required_text("backend"),
            fingerprint=fields.section("fingerprint").raw,
            weights=read_weights(fields),
            files=read_files(directory, fields.get("files")),
            source=fields.optional("source", lambda key: fields.section(key).raw),
            golden_difference=read_number(fields, "golden_difference"),
            golden_cosine=read_number(fields, "golden_cosine"),
            divergence=fields.optional(
                "divergence", lambda key: Divergence.read(fields.section(key))
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """The keys of manifest.json, in the order in which they are written."""
        keys: dict[str, Any] = {
            "backend": self.backend,
            "fingerprint": dict(self.fingerprint),
            "source": None if self.source is None else dict(self.source),
            "golden_difference": self.golden_difference,
            "weights": self.weights.to_dict(),
        }
        if self.golden_cosine is not None:
            keys["golden_cosine"] = self.golden_cosine
        if self.divergence is not None:
            keys["divergence"] = self.divergence.to_dict()
        return keys | {"files": self.files_dict()}

    def files_dict(self) -> dict[str, Any]:
        """The entries of the files by name, as `hashes.check_files` takes them."""
        return {name: file.to_dict() for name, file in self.files.items()}

    @property
    def size_bytes(self) -> int:
        """The bytes of all files of the engine."""
        return sum(file.size_bytes for file in self.files.values())


@dataclass(frozen=True, slots=True)
class EngineManifest:
    """The finished engines of a directory, by role."""

    engines: Mapping[Role, EngineEntry]

    @classmethod
    def read(cls, directory: Path) -> EngineManifest:
        """The manifest of a directory; empty where there is no file yet. BundleError that names the
        key where it describes no engines."""
        raw = read_entries(directory)
        return cls(
            {role_of(n, directory): EngineEntry.from_dict(raw[n], directory, n) for n in raw}
        )

    def write(self, directory: Path) -> None:
        """Write manifest.json. Raises OSError."""
        value = {
            "format": json_files.MANIFEST_FORMAT,
            "kind": KIND,
            **provenance.provenance(),
            "engines": {role.value: entry.to_dict() for role, entry in self.engines.items()},
        }
        json_files.write_json(directory / file_names.MANIFEST, value)

    def with_engine(self, role: Role, entry: EngineEntry) -> EngineManifest:
        """A manifest with this engine added or replaced."""
        return replace(self, engines={**self.engines, role: entry})

    def without(self, role: Role) -> EngineManifest:
        """A manifest without this engine."""
        return replace(self, engines={r: e for r, e in self.engines.items() if r is not role})

    @property
    def files(self) -> set[str]:
        """The names of all files that belong to an engine."""
        return {name for entry in self.engines.values() for name in entry.files}


def read_entries(directory: Path) -> dict[str, Mapping[str, Any]]:
    """The entries of a directory's manifest by name, not looked into yet: one that is damaged need
    not hide the others. BundleError where the manifest describes no engines."""
    if not (directory / file_names.MANIFEST).exists():
        return {}
    manifest = json_files.read_manifest(directory)
    if manifest.get("kind") != KIND:
        message = f"{directory} is not an engine directory"
        raise BundleError(
            f"{message} (its manifest says {manifest.get('kind')!r})",
            "Choose another `engine_dir`.",
        )
    engines = manifest.get("engines")
    if not isinstance(engines, dict) or not all(isinstance(e, dict) for e in engines.values()):
        raise BundleError(
            f"{directory / file_names.MANIFEST} does not describe engines",
            "Choose another `engine_dir`, or remove this one and build its engines again.",
        )
    return engines


def role_of(name: str, directory: Path) -> Role:
    """The role that an entry is named after; BundleError for another name."""
    if name not in {role.value for role in Role}:
        message = f"{directory / file_names.MANIFEST} names an engine {name!r}"
        raise BundleError(message, "Build the engines again.")
    return Role(name)


def read_files(directory: Path, raw: object) -> dict[str, FileEntry]:
    """The files of an entry; BundleError where sizes and hashes are not there."""
    return {
        name: FileEntry(
            size_bytes=entry["bytes"], sha256=entry["sha256"], mtime_ns=entry.get("mtime_ns")
        )
        for name, entry in hashes.listed_files(directory, raw).items()
    }


def read_number(fields: EngineFields, key: str) -> float | None:
    """A number, or None where the key is missing or null. BundleError otherwise."""
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise fields.wrong(key, "a number")
    return float(value)
