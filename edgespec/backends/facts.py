"""What can be told of an exported directory and of an engine directory from their JSON: no engine
is opened.

Knows what is worth telling. What cannot be told leaves a problem behind, and all else is told all
the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from edgespec import bundle
from edgespec.backends import engine_dir as engines
from edgespec.backends.loader import BACKENDS, FINGERPRINTS
from edgespec.backends.weights import rounding_of, weights_of, why_not_exact
from edgespec.contract import Role
from edgespec.errors import BundleError, EdgeSpecError, EnvironmentProblem, PairingError, noted

# What any component's config.json holds, and what those of one role hold beside it
_DECODER = (
    "model",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope",
    "identity",
    "graph",
)
_OF_ROLE = {
    Role.LLM: ("max_position_embeddings", "eos_token_id"),
    Role.BASE: ("max_position_embeddings", "eos_token_id"),
    Role.DRAFT: ("draft_vocab_size", "pair"),
}
_OF_KIND: dict[tuple[str, Role], tuple[str, ...]] = {
    ("eagle3", Role.BASE): ("eagle_hidden_state_layers",),
    ("dflash", Role.BASE): ("dflash_config",),
    ("dflash", Role.DRAFT): ("dflash_config",),
}
_MADE_AGAIN = "Make the directory again."
CACHE_BYTES = 4  # of one element: caches are float32


def export_facts(path: Path, problems: list[EdgeSpecError], read_up_to: float) -> dict[str, Any]:
    """What edgespec export wrote. Hashes files of up to `read_up_to` bytes."""
    manifest = bundle.read_manifest(path)
    facts: dict[str, Any] = {
        "kind": "export",
        "manifest": {k: v for k, v in manifest.items() if k != "files"},
    }
    faults = list(bundle.faults(path, manifest.get("files"), read_up_to=read_up_to))
    problems += faults
    files = bundle.listed_files(path, manifest.get("files"))
    facts |= {
        "bytes": sum(entry["bytes"] for entry in files.values()),
        "files": {name: entry["bytes"] for name, entry in files.items()},
        "golden": bundle.GOLDEN in files,
        "not_in_manifest": strangers(path, set(files)),
    }
    with noted(problems):
        if not any(str(path / bundle.CONFIG) in fault.what for fault in faults):
            facts |= component_facts(bundle.read_json(path / bundle.CONFIG), path / bundle.CONFIG)
    return facts


def component_facts(config: dict[str, Any], where: Path) -> dict[str, Any]:
    role = engines.role_of(config, where.parent)
    own = _OF_KIND.get((config["spec_decode_type"], role), ())
    if missing := [key for key in (*_DECODER, *_OF_ROLE[role], *own) if key not in config]:
        raise BundleError(f"{where} lacks {', '.join(missing)}", _MADE_AGAIN)
    layers = config["num_hidden_layers"] - len(
        (config["graph"].get("recurrent") or {}).get("layers", ())
    )
    per_token = 2 * layers * config["num_key_value_heads"] * config["head_dim"] * CACHE_BYTES
    return {"role": role.value, "config": config, "cache_bytes_per_token": per_token}


def strangers(path: Path, known: set[str]) -> list[str]:
    names = {
        file.name for file in path.iterdir() if file.is_file() and not file.name.startswith(".")
    }
    return sorted(names - known - {bundle.MANIFEST})


# Engines


def engines_facts(path: Path, problems: list[EdgeSpecError], read_up_to: float) -> dict[str, Any]:
    """What edgespec build made: each engine, whether this machine runs it, and whether base and
    draft are a pair."""
    entries = engines.read_engines(path)
    facts: dict[str, Any] = {"kind": "engines", "engines": {}, "pairing": None}
    for name, entry in entries.items():
        with noted(problems):
            facts["engines"][name] = engine_facts(path, name, entry, problems, read_up_to)
    known = engines.names_of(
        entry for entry in entries.values() if isinstance(entry["files"], dict)
    )
    facts["bytes"] = sum((path / name).stat().st_size for name in known if (path / name).is_file())
    facts["not_in_manifest"] = strangers(path, known)
    unfinished = [
        name for name in facts["not_in_manifest"] if name.endswith((".onnx", ".onnx.data"))
    ]
    if unfinished or not entries:
        what = f"{path} has no finished engine" + (
            f" for {', '.join(unfinished)}" if unfinished else ""
        )
        problems.append(
            BundleError(
                what, "A build was interrupted, or files were lost: run edgespec build again."
            )
        )
    base, draft = (
        facts["engines"].get(role.value, {}).get("config") for role in (Role.BASE, Role.DRAFT)
    )
    if base and draft:
        facts["pairing"] = pairing_facts(base, draft, problems)
    return facts


def engine_facts(
    path: Path,
    name: str,
    entry: Mapping[str, Any],
    problems: list[EdgeSpecError],
    read_up_to: float,
) -> dict[str, Any]:
    if name not in engines.CONFIGS:
        raise BundleError(
            f"{path / bundle.MANIFEST} names an engine {name!r}", "Build the engines again."
        )
    where = path / engines.CONFIGS[Role(name)]
    faults = list(bundle.faults(path, entry["files"], read_up_to=read_up_to))
    problems += faults
    facts: dict[str, Any] = {
        "backend": entry.get("backend"),
        "bytes": sum(file["bytes"] for file in entry["files"].values()),
        "files": {file: stored["bytes"] for file, stored in entry["files"].items()},
        "fingerprint": entry["fingerprint"],
        "runs_here": runs_here(entry, f"the {name} engine"),
        "source": entry.get("source"),
        "golden_difference": number(entry.get("golden_difference")),
        "golden_cosine": number(entry.get("golden_cosine")),
    }
    if any(str(where) in fault.what for fault in faults):
        return facts
    config = bundle.read_json(where)
    facts |= component_facts(config, where)
    if "builder_config" not in config:
        raise BundleError(f"{where} lacks builder_config", "Build the engine again.")
    return facts | {
        "weights": weights_of(config),
        "rounding": rounding_of(config, 0.0) or None,
        "exact": why_not_exact(config),
    }


def number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def runs_here(entry: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Whether this machine is the one that the engine was built for; `why` where it is not."""
    backend, stored = entry.get("backend"), entry["fingerprint"]
    if not isinstance(backend, str) or backend not in FINGERPRINTS:
        return {"answer": False, "why": f"this version runs {', '.join(BACKENDS)}, not {backend!r}"}
    if not isinstance(stored, dict) or not is_names(stored.get("cpu_features")):
        return {"answer": False, "why": f"{name} does not say for which machine it was built"}
    try:
        import_module(FINGERPRINTS[backend]).check(stored, name)
    except EnvironmentProblem as error:
        return {"answer": False, "why": error.what}
    return {"answer": True, "why": None}


def pairing_facts(
    base: Mapping[str, Any], draft: Mapping[str, Any], problems: list[EdgeSpecError]
) -> dict[str, Any]:
    """Whether they fit, and by what that was told."""
    try:
        engines.check_pairing(base, draft)
    except PairingError as error:
        problems.append(error)
        return {"fits": False, "by": None}
    recorded = draft["pair"]["base_identity"]
    if recorded is None:
        return {"fits": True, "by": "shapes"}
    return {"fits": True, "by": "identity" if recorded == base["identity"] else "origin"}
