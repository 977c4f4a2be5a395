"""What an exported directory and an engine directory are, read from their JSON: no engine is
opened.

Knows what `inspect` shows. What cannot be read leaves a problem behind, and all else is shown all
the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec import bundle
from edgespec.backends import engine_dir as engines
from edgespec.backends.engine_config import EngineConfig
from edgespec.backends.manifest import EngineEntry, read_entries, role_of
from edgespec.backends.pair_check import check_pairing
from edgespec.backends.registry import BACKENDS, engine_file_names, find_backend
from edgespec.component import ComponentConfig
from edgespec.contract import Role, canonical_contract
from edgespec.errors import BundleError, EdgeSpecError, EnvironmentProblem, PairingError, noted


def export_summary(path: Path, problems: list[EdgeSpecError], read_up_to: float) -> dict[str, Any]:
    """What edgespec export wrote, as JSON. Hashes files of up to `read_up_to` bytes; what is wrong
    is added to `problems`. Raises BundleError without a manifest."""
    manifest = bundle.read_manifest(path)
    summary: dict[str, Any] = {
        "kind": "export",
        "manifest": {k: v for k, v in manifest.items() if k != "files"},
    }
    faults = list(bundle.faults(path, manifest.get("files"), read_up_to=read_up_to))
    problems += faults
    files = bundle.listed_files(path, manifest.get("files"))
    summary |= {
        "bytes": sum(entry["bytes"] for entry in files.values()),
        "files": {name: entry["bytes"] for name, entry in files.items()},
        "golden": bundle.GOLDEN in files,
        "not_in_manifest": unlisted_files(path, set(files)),
    }
    with noted(problems):
        if not is_faulty(path / bundle.CONFIG, faults):
            summary |= component_summary(path / bundle.CONFIG)
    return summary


def component_summary(where: Path) -> dict[str, Any]:
    """The role, config.json and cache size (bytes per token) of an export. Raises BundleError."""
    config = ComponentConfig.read(where)
    return {
        "role": config.role.value,
        "config": config.to_dict(),
        "cache_bytes_per_token": canonical_contract(config.graph).kv_bytes_per_token,
    }


def is_faulty(path: Path, faults: list[BundleError]) -> bool:
    """Whether one of the faults names this file."""
    return any(str(path) in fault.what for fault in faults)


def unlisted_files(path: Path, known: set[str]) -> list[str]:
    """Names of the files of a directory that are neither `known` nor hidden, sorted."""
    names = {
        file.name for file in path.iterdir() if file.is_file() and not file.name.startswith(".")
    }
    return sorted(names - known - {bundle.MANIFEST})


# Engines


def engines_summary(path: Path, problems: list[EdgeSpecError], read_up_to: float) -> dict[str, Any]:
    """What edgespec build made, as JSON: each engine, whether this machine runs it, and whether
    base and draft are a pair. Raises BundleError where the manifest describes no engines."""
    shown: dict[str, Any] = {}
    configs: dict[Role, EngineConfig] = {}
    raw = read_entries(path)
    for name in raw:
        with noted(problems):
            role = role_of(name, path)
            entry = EngineEntry.from_dict(raw[name], path, name)
            faults = list(bundle.faults(path, entry.files_dict(), read_up_to=read_up_to))
            problems += faults
            shown[name] = entry_summary(entry, f"the {name} engine")
            if not is_faulty(path / engines.CONFIGS[role], faults):
                configs[role] = engines.read_config(path, role)
                shown[name] |= config_summary(configs[role], entry.backend)
    known = file_names(raw)
    unlisted = unlisted_files(path, known)
    with noted(problems):
        check_finished(path, unlisted, any_engine=bool(raw))
    return {
        "kind": "engines",
        "engines": shown,
        "pairing": pairing_summary(configs, problems),
        "bytes": sum((path / name).stat().st_size for name in known if (path / name).is_file()),
        "not_in_manifest": unlisted,
    }


def file_names(entries: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """The names of the files that entries list, those of damaged entries included."""
    listed = [entry.get("files") for entry in entries.values()]
    return {name for files in listed if isinstance(files, dict) for name in files}


def check_finished(path: Path, unlisted: list[str], *, any_engine: bool) -> None:
    """BundleError where an engine's files stand there and the manifest does not know them."""
    unfinished = sorted(set(unlisted) & set(engine_file_names()))
    if any_engine and not unfinished:
        return
    what = f"{path} has no finished engine"
    raise BundleError(
        what + (f" for {', '.join(unfinished)}" if unfinished else ""),
        "A build was interrupted, or files were lost: run edgespec build again.",
    )


def entry_summary(entry: EngineEntry, name: str) -> dict[str, Any]:
    """The manifest's entry of an engine, and whether it runs here."""
    return {
        "backend": entry.backend,
        "bytes": entry.size_bytes,
        "files": {file: stored.size_bytes for file, stored in entry.files.items()},
        "fingerprint": dict(entry.fingerprint),
        "runs_here": runs_here(entry, name),
        "source": None if entry.source is None else dict(entry.source),
        "golden_difference": entry.golden_difference,
        "golden_cosine": entry.golden_cosine,
    }


def config_summary(config: EngineConfig, backend: str) -> dict[str, Any]:
    """An engine's config; `exact` is the reason why it is not exact, null where it is. The cache of
    an engine whose backend is unknown here is null."""
    found = find_backend(backend)
    per_token = None if found is None else found.memory(config).kv_bytes_per_token
    return {
        "role": config.role.value,
        "config": config.to_dict(),
        "cache_bytes_per_token": per_token,
        "weights": config.weights.to_dict(),
        "rounding": config.weights.rounding,
        "exact": config.why_not_exact,
    }


def runs_here(entry: EngineEntry, name: str) -> dict[str, Any]:
    """Whether this machine is the one that the engine was built for; `why` where it is not."""
    backend = find_backend(entry.backend)
    if backend is None:
        why = f"this version runs {', '.join(BACKENDS)}, not {entry.backend!r}"
        return {"answer": False, "why": why}
    try:
        backend.check_fingerprint(entry.fingerprint, name)
    except EnvironmentProblem as error:
        return {"answer": False, "why": error.what}
    return {"answer": True, "why": None}


def pairing_summary(
    configs: dict[Role, EngineConfig], problems: list[EdgeSpecError]
) -> dict[str, Any] | None:
    """Whether base and draft fit, and how that is known; None where one is not there."""
    if Role.BASE not in configs or Role.DRAFT not in configs:
        return None
    base, draft = configs[Role.BASE].component, configs[Role.DRAFT].component
    try:
        check_pairing(base, draft)
    except PairingError as error:
        problems.append(error)
        return {"fits": False, "by": None}
    assert draft.pair is not None
    if draft.pair.base_identity is None:
        return {"fits": True, "by": "shapes"}
    return {
        "fits": True,
        "by": "identity" if draft.pair.base_identity == base.identity else "origin",
    }
