"""The manifest.json of an exported component as one frozen value.

Knows the keys on disk, and writes what it reads. Knows no graph and no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec import bundle
from edgespec.component import BundleFields
from edgespec.contract import Role
from edgespec.errors import BundleError

KIND = "export"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """The checkpoints that a component was made from, by sha256.

    `texts` covers settings and tokenizer. `quantized_from` is the identity of the original of the
    checkpoint, `base_quantized_from` that of the base that a draft was exported for.
    """

    name: str
    identity: str
    texts: str
    base_identity: str | None = None
    quantized_from: str | None = None
    base_quantized_from: str | None = None

    @classmethod
    def read(cls, fields: BundleFields) -> ExportSource:
        """From the `source` of manifest.json; BundleError names the key that is wrong."""
        return cls(
            name=fields.required_text("name"),
            identity=fields.required_text("identity"),
            texts=fields.required_text("texts"),
            base_identity=fields.text("base_identity"),
            quantized_from=fields.text("quantized_from"),
            base_quantized_from=fields.text("base_quantized_from"),
        )

    def to_dict(self) -> dict[str, Any]:
        """The keys of manifest.json."""
        keys: dict[str, Any] = {
            "name": self.name,
            "identity": self.identity,
            "texts": self.texts,
            "base_identity": self.base_identity,
        }
        if self.base_quantized_from:
            keys["base_quantized_from"] = self.base_quantized_from
        if self.quantized_from:
            keys["quantized_from"] = self.quantized_from
        return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportManifest:
    """Who exported what, from what and with which options.

    `options` are what was asked for, as JSON has it. `edgespec` is the version that wrote it,
    `packages` those that shape its content. `files` are name -> {"bytes", "sha256"}.
    """

    role: Role
    source: ExportSource
    options: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    edgespec: str | None
    command: tuple[str, ...] = ()
    packages: Mapping[str, str | None]
    quantization: Mapping[str, Any] | None = None

    @classmethod
    def make(
        cls,
        role: Role,
        source: ExportSource,
        options: Mapping[str, Any],
        files: Mapping[str, Mapping[str, Any]],
        quantization: Mapping[str, Any] | None = None,
    ) -> ExportManifest:
        """Of what this process has just written."""
        made_by = bundle.provenance()
        return cls(
            role=role,
            source=source,
            options=json.loads(json.dumps(options)),
            files=files,
            edgespec=made_by["edgespec"],
            command=tuple(made_by["command"]),
            packages=made_by["packages"],
            quantization=quantization,
        )

    @classmethod
    def read(cls, directory: Path) -> ExportManifest:
        """From an exported directory; BundleError where its manifest.json is none of an export."""
        raw, where = bundle.read_manifest(directory), str(directory / bundle.MANIFEST)
        fields = BundleFields(raw, where)
        role = fields.get("role")
        if fields.get("kind") != KIND or role not in {r.value for r in Role}:
            what = f"{where} is not that of an export: kind {fields.get('kind')!r}, role {role!r}"
            raise BundleError(what, "Give the directory of a component that export wrote.")
        command = fields.get("command") or []
        return cls(
            role=Role(role),
            source=ExportSource.read(fields.section("source")),
            options=fields.section("options").raw,
            files=bundle.listed_files(directory, fields.get("files")),
            edgespec=fields.text("edgespec"),
            command=tuple(command) if isinstance(command, list) else (),
            packages=fields.optional_section("packages").raw,
            quantization=fields.optional_section("quantization").raw or None,
        )

    def to_dict(self) -> dict[str, Any]:
        """The keys of manifest.json, in the order in which they are written."""
        keys: dict[str, Any] = {
            "format": bundle.MANIFEST_FORMAT,
            "kind": KIND,
            "role": self.role.value,
            "source": self.source.to_dict(),
            "options": dict(self.options),
            "edgespec": self.edgespec,
            "command": list(self.command),
            "packages": dict(self.packages),
        }
        if self.quantization:
            keys["quantization"] = dict(self.quantization)
        return keys | {"files": dict(self.files)}

    def is_of(self, source: ExportSource, options: Mapping[str, Any]) -> bool:
        """Whether this version would write the same again for this request."""
        asked = json.loads(json.dumps(options))
        ours = bundle.installed_version("edgespec")
        return (self.source, self.options, self.edgespec) == (source, asked, ours)
