"""The manifest.json of an exported component and that of a quantized checkpoint as frozen values.

Knows the keys on disk, and writes what it reads. Knows no graph and no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from edgespec.artifacts import file_names, hashes, json_files, provenance
from edgespec.artifacts.graph_quantization import Schemes, read_schemes, schemes_dict
from edgespec.contract import Role
from edgespec.errors import BundleError
from edgespec.safe_read.fields import BundleFields
from edgespec.safe_read.records import Count, Record

KIND = "export"
# The files of every export, by role, and those that an export may have
GRAPH_FILES = (file_names.MODEL, file_names.MODEL_DATA, file_names.CONFIG)
BASE_FILES = (*GRAPH_FILES, file_names.EMBEDDING, file_names.TOKENIZER)
REQUIRED: Mapping[Role, tuple[str, ...]] = {
    Role.LLM: BASE_FILES,
    Role.BASE: BASE_FILES,
    Role.DRAFT: GRAPH_FILES,
    Role.VISUAL: GRAPH_FILES,
}
KNOWN: Mapping[Role, tuple[str, ...]] = {
    Role.LLM: (*BASE_FILES, *file_names.TOKENIZER_FILES, file_names.GOLDEN),
    Role.BASE: (*BASE_FILES, *file_names.TOKENIZER_FILES, file_names.GOLDEN),
    Role.DRAFT: (
        *GRAPH_FILES,
        file_names.EMBEDDING,
        file_names.D2T,
        file_names.HEADS,
        file_names.GOLDEN,
    ),
    Role.VISUAL: (*GRAPH_FILES, *file_names.PROCESSOR_FILES, file_names.GOLDEN),
}
QUANTIZE_KIND = "quantize"
NOT_SIMULATED = "weights only: rounding of activations and of the cache is not simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource(Record):
    """The checkpoints that a component was made from, by sha256.

    `texts` covers settings and tokenizer. `quantized_from` is the identity of the original of the
    checkpoint, `base_quantized_from` that of the base that a draft was exported for.
    """

    IF_ANY = ("base_quantized_from", "quantized_from")

    name: str
    identity: str
    texts: str
    base_identity: str | None = None
    base_quantized_from: str | None = None
    quantized_from: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportManifest:
    """Who exported what, from what and with which options.

    `options` are what was asked for, as JSON has it. `edgespec` is the version that wrote it,
    `packages` those that shape its content. `files` are name -> {"bytes", "sha256"}. `quantization`
    are the uses of schemes in its graph, None where it has none.
    """

    role: Role
    source: ExportSource
    options: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    edgespec: str | None
    command: tuple[str, ...] = ()
    packages: Mapping[str, str | None]
    quantization: Schemes | None = None

    @classmethod
    def make(
        cls,
        role: Role,
        source: ExportSource,
        options: Mapping[str, Any],
        files: Mapping[str, Mapping[str, Any]],
        quantization: Schemes | None = None,
    ) -> ExportManifest:
        """Of what this process has just written."""
        made_by = provenance.provenance()
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
        raw, where = json_files.read_manifest(directory), str(directory / file_names.MANIFEST)
        fields = BundleFields(raw, where)
        role, roles = fields.get("role"), {r.value: r for r in REQUIRED}
        if fields.get("kind") != KIND or not isinstance(role, str) or role not in roles:
            message = (
                f"{where} is not that of an export: kind {fields.get('kind')!r}, role {role!r}"
            )
            raise BundleError(message, "Give the directory of a component that export wrote.")
        command = fields.get("command") or []
        files = hashes.listed_files(directory, fields.get("files"))
        hashes.refuse_unlisted(directory, files, REQUIRED[roles[role]], ())
        hashes.refuse_unknown(directory, files, KNOWN[roles[role]], role)
        return cls(
            role=roles[role],
            source=ExportSource.read(fields.section("source")),
            options=fields.section("options").raw,
            files=files,
            edgespec=fields.text("edgespec"),
            command=tuple(command) if isinstance(command, list) else (),
            packages=fields.optional_section("packages").raw,
            quantization=read_schemes(fields.optional_section("quantization")) or None,
        )

    def to_dict(self) -> dict[str, Any]:
        """The keys of manifest.json, in the order in which they are written."""
        return self.without_files() | {"files": dict(self.files)}

    def without_files(self) -> dict[str, Any]:
        """The same without the list of files."""
        keys: dict[str, Any] = {
            "format": json_files.MANIFEST_FORMAT,
            "kind": KIND,
            "role": self.role.value,
            "source": self.source.to_dict(),
            "options": dict(self.options),
            "edgespec": self.edgespec,
            "command": list(self.command),
            "packages": dict(self.packages),
        }
        if self.quantization:
            keys["quantization"] = schemes_dict(self.quantization)
        return keys

    def is_of(self, source: ExportSource, options: Mapping[str, Any]) -> bool:
        """Whether this version would write the same again for this request."""
        asked = json.loads(json.dumps(options))
        ours = provenance.installed_version("edgespec")
        return (self.source, self.options, self.edgespec) == (source, asked, ours)


# Quantized checkpoints


class QuantizeFields(BundleFields):
    """A JSON object that `edgespec quantize` wrote."""

    remedy: ClassVar[str] = "It was edited or damaged: quantize again."


@dataclass(frozen=True, slots=True)
class QuantizeCheck(Record):
    """A quantized model against its original, with weights dequantized from the written files."""

    logits_cosine: float  # mean over tokens
    logits_kl: float  # mean over tokens, in nats: KL(original || quantized)
    perplexity_before: float | None
    perplexity_after: float | None
    top1_agreement: float  # fraction of tokens
    num_tokens: int
    weight_errors: Mapping[str, float]  # relative RMS error per Linear
    simulated: str | None = NOT_SIMULATED

    @property
    def max_weight_error(self) -> float:
        """The largest relative RMS error of any Linear; 0 where none was quantized."""
        return max(self.weight_errors.values(), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """The `check` of manifest.json."""
        return Record.to_dict(self) | {"max_weight_error": self.max_weight_error}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeVision(Record):
    """A quantized image encoder against its original: how many images and patches calibrated it,
    and how close its rows are with rounded weights and activations."""

    num_images: int
    num_patches: int
    rows_cosine: float  # mean over rows
    weight_errors: Mapping[str, float]  # relative RMS error per Linear

    @property
    def max_weight_error(self) -> float:
        """The largest relative RMS error of any Linear."""
        return max(self.weight_errors.values(), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """The `visual` of manifest.json."""
        return Record.to_dict(self) | {"max_weight_error": self.max_weight_error}


@dataclass(frozen=True, slots=True)
class QuantizeCalibration(Record):
    """How much text a checkpoint was calibrated with; nothing where none was `needed`."""

    needed: bool
    num_samples: Count
    num_tokens: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSource(Record):
    """The original of a quantized checkpoint, by sha256; `texts` covers config and tokenizer."""

    name: str | None
    identity: str | None
    texts: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeBase(Record):
    """The base whose hidden states calibrated a draft. On disk `aux_layers` is "taps"."""

    KEYS: ClassVar = {"aux_layers": "taps"}

    name: str | None
    identity: str
    aux_layers: tuple[int, ...]  # hidden_states indices


@dataclass(frozen=True, slots=True)
class QuantizeRequest(Record):
    """What to quantize and how; the same request is not run twice.

    `options` are as JSON has them. `base` is that of a draft, None for a base.
    """

    IF_ANY = ("base",)

    source: QuantizeSource
    options: Mapping[str, Any]
    base: QuantizeBase | None = None

    @property
    def quantization(self) -> str:
        """The format of the Linears; of an image encoder's where no others are quantized."""
        asked = self.options.get("quantization") or self.options.get("visual_quantization")
        return str(asked)

    @property
    def calib_data(self) -> str | None:
        """The name of the calibration text; "shipped" for the one that comes with edgespec."""
        data = self.options.get("calib_data")
        name = data.get("name") if isinstance(data, Mapping) else data
        return None if name is None else str(name)

    def unnamed(self) -> QuantizeRequest:
        """The request without names, by which requests are compared: "." and a link may name the
        same checkpoint."""
        options, base = dict(self.options), self.base
        for key in ("calib_data", "image_dataset"):
            if isinstance(data := options.get(key), Mapping):
                options[key] = {part: data[part] for part in data if part != "name"}
        return QuantizeRequest(
            replace(self.source, name=None),
            options,
            None if base is None else replace(base, name=None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeManifest:
    """Who quantized what, from what and with which options, and how the result compares.

    `weights` are what earlier versions recorded, whose identities did not cover all bytes.
    `packages` are those that shape the content. `files` are name -> {"bytes", "sha256"}. `check` is
    that of the text decoder, `visual` that of the image encoder; None where it was not quantized.
    """

    request: QuantizeRequest
    weights: Mapping[str, str] | None = None
    edgespec: str | None
    command: tuple[str, ...]
    packages: Mapping[str, str | None]
    calibrated: QuantizeCalibration
    check: QuantizeCheck | None
    visual: QuantizeVision | None = None
    files: Mapping[str, Mapping[str, Any]]

    @classmethod
    def make(
        cls,
        request: QuantizeRequest,
        calibrated: QuantizeCalibration,
        check: QuantizeCheck | None,
        files: Mapping[str, Mapping[str, Any]],
        visual: QuantizeVision | None = None,
    ) -> QuantizeManifest:
        """Of what this process has just written."""
        made_by = provenance.provenance()
        used = ("nvidia-modelopt", "torch", "transformers")
        return cls(
            request=request,
            edgespec=made_by["edgespec"],
            command=tuple(made_by["command"]),
            packages=made_by["packages"]
            | {name: provenance.installed_version(name) for name in used},
            calibrated=calibrated,
            check=check,
            visual=visual,
            files=files,
        )

    @classmethod
    def read(cls, directory: Path) -> QuantizeManifest:
        """Of a quantized checkpoint; BundleError where its manifest.json is none, naming the
        key."""
        raw, where = json_files.read_manifest(directory), str(directory / file_names.MANIFEST)
        fields = QuantizeFields(raw, where)
        if fields.get("kind") != QUANTIZE_KIND:
            message = f"{where} is not that of a quantized checkpoint: kind {fields.get('kind')!r}"
            raise BundleError(message, "Give a directory that edgespec quantize wrote.")
        command = fields.get("command")
        visual = QuantizeVision.read(fields.section("visual")) if fields.get("visual") else None
        return cls(
            request=QuantizeRequest.read(fields),
            weights=None if fields.get("weights") is None else fields.section("weights").raw,
            edgespec=fields.text("edgespec"),
            command=tuple(command) if isinstance(command, list) else (),
            packages=fields.section("packages").raw,
            calibrated=QuantizeCalibration.read(fields.section("calibrated")),
            check=(
                None
                if fields.get("check") is None and visual is not None
                else QuantizeCheck.read(fields.section("check"))
            ),
            visual=visual,
            files=hashes.listed_files(directory, fields.get("files")),
        )

    def write(self, directory: Path) -> None:
        """Writes manifest.json. Raises OSError."""
        json_files.write_json(directory / file_names.MANIFEST, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The keys of manifest.json, in the order in which they are written."""
        return self.without_files() | {"files": dict(self.files)}

    def without_files(self) -> dict[str, Any]:
        """The same without the list of files."""
        return {
            "format": json_files.MANIFEST_FORMAT,
            "kind": QUANTIZE_KIND,
            **self.request.to_dict(),
            **({} if self.weights is None else {"weights": dict(self.weights)}),
            "edgespec": self.edgespec,
            "command": list(self.command),
            "packages": dict(self.packages),
            "calibrated": self.calibrated.to_dict(),
            "check": None if self.check is None else self.check.to_dict(),
            **({} if self.visual is None else {"visual": self.visual.to_dict()}),
        }

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(entry["bytes"] for entry in self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOrigin:
    """What a quantized checkpoint's manifest.json says of the originals.

    Read also where another part of the manifest is damaged. None: it does not say. `identity` is
    that of the original, `base_identity` that of the base that calibrated a draft.
    """

    identity: str | None
    base_identity: str | None
    base_name: str | None
    files: Mapping[str, Any] | None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> QuantizeOrigin:
        """From the keys of manifest.json. Values of another type read as missing."""
        source, base, files = (_mapping(raw.get(key)) for key in ("source", "base", "files"))
        return cls(
            identity=_text((source or {}).get("identity")),
            base_identity=_text((base or {}).get("identity")),
            base_name=_text((base or {}).get("name")),
            files=files,
        )


def _mapping(value: object) -> Mapping[str, Any] | None:
    return value if isinstance(value, dict) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
