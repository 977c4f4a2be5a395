"""What an exported directory and an engine directory are, read from their JSON: no engine is
opened.

Knows what `inspect` shows. What cannot be read leaves a problem behind, and all else is shown all
the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.artifacts import file_names, hashes, json_files
from edgespec.artifacts.component import ComponentConfig
from edgespec.artifacts.manifest import ExportManifest
from edgespec.backends import engine_dir as engines
from edgespec.backends.engine_config import EngineConfig
from edgespec.backends.manifest import EngineEntry, read_entries, role_of
from edgespec.backends.pair_check import check_not_plain, check_pairing, target_of
from edgespec.backends.registry import BACKENDS, engine_file_names, find_backend
from edgespec.backends.vision.config import VisionEngineConfig
from edgespec.contract import Role, canonical_contract
from edgespec.errors import BundleError, EdgeSpecError, EnvironmentProblem, PairingError, noted
from edgespec.vision.component import VisionComponentConfig, is_visual


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSummary:
    """An exported component. `manifest` and `config` are None where they could not be read.

    `files` are sizes in bytes by name, `not_in_manifest` the files that the manifest does not list.
    """

    manifest: ExportManifest | None
    files: Mapping[str, int]
    not_in_manifest: tuple[str, ...]
    config: ComponentConfig | VisionComponentConfig | None = None
    cache_bytes_per_token: int | None = None

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(self.files.values())

    @property
    def golden(self) -> bool:
        """Whether golden inputs and outputs are there."""
        return file_names.GOLDEN in self.files

    def to_dict(self) -> dict[str, Any]:
        """The keys of `edgespec inspect --json`: those that are known."""
        keys = {
            "kind": "export",
            "manifest": None if self.manifest is None else self.manifest.without_files(),
            "bytes": self.bytes,
            "files": dict(self.files),
            "golden": self.golden,
            "not_in_manifest": list(self.not_in_manifest),
        }
        if self.config is None:
            return keys
        return keys | {
            "role": self.config.role.value,
            "config": self.config.to_dict(),
            "cache_bytes_per_token": self.cache_bytes_per_token,
        }


@dataclass(frozen=True, slots=True)
class RunsHere:
    """Whether this machine is the one that an engine was built for; `why` where it is not."""

    answer: bool
    why: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSummary:
    """An engine. `config` is None where it could not be read.

    `cache_bytes_per_token` is None for an engine whose backend is unknown here, and for an encoder.
    """

    entry: EngineEntry
    runs_here: RunsHere
    config: EngineConfig | VisionEngineConfig | None = None
    cache_bytes_per_token: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The keys of `edgespec inspect --json`: those that are known.

        `exact` is why the engine is not exact, null where it is.
        """
        entry, config = self.entry, self.config
        keys = {
            "backend": entry.backend,
            "bytes": entry.size_bytes,
            "files": {file: stored.size_bytes for file, stored in entry.files.items()},
            "fingerprint": dict(entry.fingerprint),
            "runs_here": asdict(self.runs_here),
            "source": None if entry.source is None else dict(entry.source),
            "golden_difference": entry.golden_difference,
            "golden_cosine": entry.golden_cosine,
            "divergence": None if entry.divergence is None else entry.divergence.to_dict(),
        }
        if config is None:
            return keys
        return keys | {
            "role": config.role.value,
            "config": config.to_dict(),
            "cache_bytes_per_token": self.cache_bytes_per_token,
            "weights": config.weights.to_dict(),
            "rounding": config.weights.rounding,
            "exact": config.why_not_exact if isinstance(config, EngineConfig) else None,
        }


@dataclass(frozen=True, slots=True)
class PairingSummary:
    """Whether base and draft fit, and `by` what that is known: identity, origin or shapes."""

    fits: bool
    by: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesSummary:
    """An engine directory. `pairing` is None where base or draft is not there.

    `bytes` is the size of all files, `not_in_manifest` those that the manifest does not list.
    """

    engines: Mapping[Role, EngineSummary]
    pairing: PairingSummary | None
    bytes: int
    not_in_manifest: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The keys of `edgespec inspect --json`."""
        return {
            "kind": "engines",
            "engines": {role.value: engine.to_dict() for role, engine in self.engines.items()},
            "pairing": None if self.pairing is None else asdict(self.pairing),
            "bytes": self.bytes,
            "not_in_manifest": list(self.not_in_manifest),
        }


def export_summary(path: Path, problems: list[EdgeSpecError], read_up_to: float) -> ExportSummary:
    """What edgespec export wrote. Hashes files of up to `read_up_to` bytes; what is wrong is added
    to `problems`. Raises BundleError without a manifest that lists the files."""
    listed = json_files.read_manifest(path).get("files")
    faults = list(hashes.faults(path, listed, read_up_to=read_up_to))
    problems += faults
    manifest = None
    with noted(problems):
        manifest = ExportManifest.read(path)
    files = hashes.listed_files(path, listed)
    summary = ExportSummary(
        manifest=manifest,
        files={name: entry["bytes"] for name, entry in files.items()},
        not_in_manifest=tuple(unlisted_files(path, set(files))),
    )
    with noted(problems):
        if not is_faulty(path / file_names.CONFIG, faults):
            summary = with_component(summary, path / file_names.CONFIG)
    return summary


def with_component(summary: ExportSummary, path: Path) -> ExportSummary:
    """The same with what a config.json says. BundleError where that is no component's."""
    if is_visual(json_files.read_json(path)):
        return replace(summary, config=VisionComponentConfig.read(path))
    config = ComponentConfig.read(path)
    per_token = canonical_contract(config.graph).kv_bytes_per_token
    return replace(summary, config=config, cache_bytes_per_token=per_token)


def is_faulty(path: Path, faults: list[BundleError]) -> bool:
    """Whether one of the faults names this file."""
    return any(str(path) in fault.what for fault in faults)


def unlisted_files(path: Path, known: set[str]) -> list[str]:
    """Names of the files of a directory that are neither `known` nor hidden, sorted."""
    names = {
        file.name for file in path.iterdir() if file.is_file() and not file.name.startswith(".")
    }
    return sorted(names - known - {file_names.MANIFEST})


# Engines


def engines_summary(path: Path, problems: list[EdgeSpecError], read_up_to: float) -> EnginesSummary:
    """What edgespec build made: each engine, whether this machine runs it, and whether base and
    draft are a pair. Raises BundleError where the manifest describes no engines."""
    shown: dict[Role, EngineSummary] = {}
    raw = read_entries(path)
    for name in raw:
        with noted(problems):
            role = role_of(name, path)
            entry = EngineEntry.from_dict(raw[name], path, name)
            faults = list(hashes.faults(path, entry.files_dict(), read_up_to=read_up_to))
            problems += faults
            shown[role] = EngineSummary(
                entry=entry, runs_here=runs_here(entry, f"the {name} engine")
            )
            if not is_faulty(path / engines.CONFIGS[role], faults):
                shown[role] = with_config(shown[role], path, role)
    known = entry_names(raw)
    unlisted = unlisted_files(path, known | {*engines.OF_THE_RUNTIME})
    with noted(problems):
        check_finished(path, unlisted, any_engine=bool(raw))
    return EnginesSummary(
        engines=shown,
        pairing=pairing_summary(shown, problems),
        bytes=sum((path / name).stat().st_size for name in known if (path / name).is_file()),
        not_in_manifest=tuple(unlisted),
    )


def entry_names(entries: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """The names of the files that entries list, those of damaged entries included."""
    listed = [entry.get("files") for entry in entries.values()]
    return {name for files in listed if isinstance(files, dict) for name in files}


def check_finished(path: Path, unlisted: list[str], *, any_engine: bool) -> None:
    """BundleError where an engine's files stand there and the manifest does not know them."""
    unfinished = sorted(set(unlisted) & set(engine_file_names()))
    if any_engine and not unfinished:
        return
    message = f"{path} has no finished engine"
    raise BundleError(
        message + (f" for {', '.join(unfinished)}" if unfinished else ""),
        "A build was interrupted, or files were lost: run edgespec build again.",
    )


def with_config(engine: EngineSummary, path: Path, role: Role) -> EngineSummary:
    """The same with what the engine's config says. BundleError where it is damaged."""
    if role is Role.VISUAL:
        encoder = engines.config_of(VisionEngineConfig, path, role, engine.entry)
        return replace(engine, config=encoder)
    config = engines.config_of(EngineConfig, path, role, engine.entry)
    backend = find_backend(engine.entry.backend)
    per_token = None if backend is None else backend.memory(config).kv_bytes_per_token
    return replace(engine, config=config, cache_bytes_per_token=per_token)


def runs_here(entry: EngineEntry, name: str) -> RunsHere:
    """Whether this machine is the one that the engine was built for; `why` where it is not."""
    backend = find_backend(entry.backend)
    if backend is None:
        why = f"this version runs {', '.join(BACKENDS)}, not {entry.backend!r}"
        return RunsHere(False, why)
    try:
        backend.check_fingerprint(entry.fingerprint, name)
    except EnvironmentProblem as error:
        return RunsHere(False, error.what)
    return RunsHere(True)


def pairing_summary(
    summaries: Mapping[Role, EngineSummary], problems: list[EdgeSpecError]
) -> PairingSummary | None:
    """Whether base and draft fit, and how that is known; None where one is not there."""
    configs = {
        role: engine.config
        for role, engine in summaries.items()
        if isinstance(engine.config, EngineConfig)
    }
    of_draft = configs.get(Role.DRAFT)
    if of_draft is not None:
        with noted(problems):
            check_not_plain(summaries.keys(), of_draft.component, None)
    target = None if of_draft is None else target_of(summaries.keys(), of_draft.component)
    of_base = None if target is None else configs.get(target)
    if of_base is None or of_draft is None:
        return None
    base, draft = of_base.component, of_draft.component
    try:
        check_pairing(base, draft)
    except PairingError as error:
        problems.append(error)
        return PairingSummary(False, None)
    assert draft.pair is not None
    if draft.pair.base_identity is None:
        return PairingSummary(True, "shapes")
    same = draft.pair.base_identity == base.identity
    return PairingSummary(True, "identity" if same else "origin")
