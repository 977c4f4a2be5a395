"""An engine directory: base and draft together, with what the runtime needs beside them.

Knows file names, roles, and how a built engine gets in without ever looking finished when it is
not. Knows no engine library: each backend writes its own engine files.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from edgespec import bundle
from edgespec.backends.engine_config import EngineConfig
from edgespec.backends.manifest import EngineEntry, EngineManifest, FileEntry
from edgespec.backends.onnx_dir import OnnxDir
from edgespec.backends.pair_check import check_pairing
from edgespec.component_files import required_arrays
from edgespec.contract import Role
from edgespec.errors import BundleError
from edgespec.methods import METHODS

STEMS = {Role.LLM: "llm", Role.BASE: "spec_base", Role.DRAFT: "spec_draft"}
CONFIGS = {Role.LLM: "config.json", Role.BASE: "base_config.json", Role.DRAFT: "draft_config.json"}
DRAFT_EMBEDDING = "draft_embedding.safetensors"
_OF_BASE = {name: name for name in (bundle.EMBEDDING, *bundle.TOKENIZER_FILES)}
# Engine file name -> the exported file that it is copied from, where that is there
SIDECARS: Mapping[Role, Mapping[str, str]] = {
    Role.LLM: _OF_BASE,
    Role.BASE: _OF_BASE,
    Role.DRAFT: {bundle.D2T: bundle.D2T, DRAFT_EMBEDDING: bundle.EMBEDDING},
}
SAME_MODEL = {Role.BASE: Role.LLM, Role.LLM: Role.BASE}
OTHER_HALF = {Role.BASE: Role.DRAFT, Role.DRAFT: Role.BASE}


def read_config(engine_dir: Path, role: Role) -> EngineConfig:
    """The config of an engine of the directory; BundleError where it is damaged."""
    return EngineConfig.read(engine_dir / CONFIGS[role])


def check_against_others(engine_dir: Path, onnx: OnnxDir) -> None:
    """Check what is to be built against what the directory already holds: one model a directory
    (BundleError), and a draft that fits its base (PairingError)."""
    there = EngineManifest.read(engine_dir).engines
    twin = SAME_MODEL.get(onnx.role)
    if twin is not None and twin in there:
        check_same_model(engine_dir, twin, onnx)
    other = OTHER_HALF.get(onnx.role)
    if other is None or other not in there:
        return
    partner = read_config(engine_dir, other).component
    base, draft = (partner, onnx.config) if other is Role.BASE else (onnx.config, partner)
    check_pairing(base, draft, onnx.role)


def check_same_model(engine_dir: Path, twin: Role, onnx: OnnxDir) -> None:
    """BundleError where a plain engine and a base in one directory have other weights."""
    if read_config(engine_dir, twin).component.identity != onnx.config.identity:
        what = (
            f"{engine_dir} holds the {twin.value} engine of another model; both would share one"
            " tokenizer"
        )
        raise BundleError(what, "Choose another --engine-dir.")


# ---- files


def sidecars(onnx: OnnxDir) -> dict[str, Path]:
    """Engine file name -> exported file that is copied to it."""
    wanted = SIDECARS[onnx.role]
    listed = onnx.manifest.files
    return {new: onnx.path / old for new, old in wanted.items() if old in listed}


def copy_sidecars(onnx: OnnxDir, staging: Path, *, with_embedding: bool = True) -> None:
    """Copy what the runtime needs beside the engine. Raises OSError."""
    for name, source in sidecars(onnx).items():
        if with_embedding or source.name != bundle.EMBEDDING:
            shutil.copyfile(source, staging / name)


def install(staging: Path, engine_dir: Path, role: Role, entry: EngineEntry) -> EngineEntry:
    """Move a finished engine's files from `staging` into `engine_dir`; returns the entry with them.

    The manifest is without the role while files move, and gains it last: a run killed between
    leaves a directory that says that this engine is not there. Raises OSError.
    """
    entry = replace(entry, files={p.name: FileEntry.of(p) for p in sorted(staging.iterdir())})
    with locked(engine_dir):
        others = remove_engine(engine_dir, role)
        try:
            for name in entry.files:
                (staging / name).replace(engine_dir / name)
            others.with_engine(role, entry).write(engine_dir)
        except BaseException:
            for name in set(entry.files) - others.files:
                (engine_dir / name).unlink(missing_ok=True)
            raise
    return entry


def remove_engine(engine_dir: Path, role: Role) -> EngineManifest:
    """Take an engine out of the directory, if it is there, with the files that no other one needs;
    returns the manifest of the others."""
    manifest = EngineManifest.read(engine_dir)
    old = manifest.engines.get(role)
    others = manifest.without(role)
    if old is not None:
        others.write(engine_dir)
        for name in set(old.files) - others.files:
            bundle.contained(engine_dir, name).unlink(missing_ok=True)
    return others


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, so that a base and a draft built at the same time both get in."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


# ---- finished engines


def open_engine(engine_dir: Path, role: Role) -> tuple[EngineConfig, EngineEntry]:
    """Config and manifest entry of a finished engine, its files checked; BundleError with the
    remedy otherwise."""
    manifest = EngineManifest.read(engine_dir) if engine_dir.is_dir() else EngineManifest({})
    entry = manifest.engines.get(role)
    if entry is None:
        there = ", ".join(role.value for role in manifest.engines) or "no engine"
        what = f"{engine_dir} has no {role.value} engine (it has: {there})"
        raise BundleError(what, missing_remedy(role))
    check_listing(engine_dir, role, manifest)
    bundle.check_files(engine_dir, entry.files_dict(), trust_unchanged=True)
    config = read_config(engine_dir, role)
    bundle.refuse_unlisted(engine_dir, entry.files, required_sidecars(config), ())
    return config, entry


def check_listing(engine_dir: Path, role: Role, manifest: EngineManifest) -> None:
    """BundleError unless the manifest lists the engine's own files, every file that may be read
    beside them and is there, and no others."""
    stem, listed = f"{STEMS[role]}.", manifest.engines[role].files
    known = [CONFIGS[role], *SIDECARS[role]]
    own = [path.name for path in engine_dir.iterdir() if path.name.startswith(stem)]
    required = [CONFIGS[role], *([] if role is Role.DRAFT else [bundle.TOKENIZER])]
    bundle.refuse_unlisted(engine_dir, listed, required, own)
    bundle.refuse_unlisted(engine_dir, manifest.files, (), known)
    engines = [name for name in listed if name.startswith(stem)]
    bundle.refuse_unknown(engine_dir, listed, {*engines, *known})
    if not engines:
        what = f"{engine_dir / bundle.MANIFEST} lists no file of the {role.value} engine"
        raise BundleError(what, bundle.EDITED)


def required_sidecars(config: EngineConfig) -> list[str]:
    """The arrays beside an engine that its config says there are."""
    names = required_arrays(config.component)
    if config.weights.embedding is not None:  # its lm_head is the embedding
        names = tuple(name for name in names if name != bundle.EMBEDDING)
    return [new for new, old in SIDECARS[config.role].items() if old in names]


def missing_remedy(role: Role) -> str:
    """The remedy for a missing engine of that role: the commands that make it."""
    flags = " or ".join(row.export_flag for row in METHODS.values() if row.export_flag)
    made = {
        Role.LLM: "edgespec export MODEL OUT",
        Role.BASE: f"edgespec export MODEL OUT with {flags}",
    }
    export = made.get(role, "edgespec export DRAFT OUT")
    return f"Run {export}, then edgespec build with --engine-dir naming this directory."
