"""An engine directory: base and draft together, with what the runtime needs beside them, and an
image encoder in `visual` below it.

Knows file names, roles, and how a built engine gets in without ever looking finished when it is
not. Knows no engine library: each backend writes its own engine files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from edgespec.artifacts import atomic, file_names, hashes, json_files, page_cache
from edgespec.artifacts.component import ComponentConfig
from edgespec.artifacts.component_files import required_arrays
from edgespec.artifacts.directories import DirectoryKind, build_command, kind_of, not_engines
from edgespec.backends.divergence import Divergence
from edgespec.backends.engine_config import HEAD_FILE, EngineConfig
from edgespec.backends.manifest import EngineEntry, EngineManifest, FileEntry, read_entries
from edgespec.backends.onnx_dir import AnyOnnxDir, OnnxDir
from edgespec.backends.pair_check import check_not_plain, check_pairing, target_of
from edgespec.backends.vision.config import VisionEngineConfig
from edgespec.contract import DECODERS, Role
from edgespec.errors import BundleError
from edgespec.methods import METHODS

STEMS = {
    Role.LLM: "llm",
    Role.BASE: "spec_base",
    Role.DRAFT: "spec_draft",
    Role.VISUAL: "visual",
}
CONFIGS = {
    Role.LLM: file_names.CONFIG,
    Role.BASE: "base_config.json",
    Role.DRAFT: "draft_config.json",
    Role.VISUAL: file_names.CONFIG,
}
DRAFT_EMBEDDING = "draft_embedding.safetensors"
_OF_BASE = {name: name for name in (file_names.EMBEDDING, *file_names.TOKENIZER_FILES)}
# Engine file name -> the exported file that it is copied from, where that is there
SIDECARS: Mapping[Role, Mapping[str, str]] = {
    Role.LLM: _OF_BASE,
    Role.BASE: _OF_BASE,
    Role.DRAFT: {
        file_names.D2T: file_names.D2T,
        file_names.HEADS: file_names.HEADS,
        DRAFT_EMBEDDING: file_names.EMBEDDING,
    },
    Role.VISUAL: {name: name for name in file_names.PROCESSOR_FILES},
}
# Of the runtime, beside the engines and not in the manifest: what steps cost, the plan that `tune`
# found best, and what it has measured so far
COST_PROFILE, TUNED, TUNE_JOURNAL = "cost_profile.json", "tuned.json", "tune_journal.jsonl"
OF_THE_RUNTIME = (COST_PROFILE, TUNED, TUNE_JOURNAL)
MOVING, MOVING_KEYS = "moving.json", ("bytes", "mtime_ns")
SAME_MODEL = {Role.BASE: Role.LLM, Role.LLM: Role.BASE}
AnyConfig = TypeVar("AnyConfig", EngineConfig, VisionEngineConfig)


def home(engine_dir: Path, role: Role) -> Path:
    """The directory of an engine that is built into `engine_dir`: an encoder's is below it, by the
    name of its role, unless it has that name itself."""
    if role in DECODERS or engine_dir.absolute().name == role.value:
        return engine_dir
    return engine_dir / role.value


def holds_encoder(path: Path, role: Role) -> bool:
    """Whether a directory says that it holds an encoder. Never raises."""
    try:
        return read_entries(path).keys() == {role.value}
    except (BundleError, OSError):
        return False


def find_encoder(path: Path, role: Role) -> Path:
    """The directory of an encoder at a path or below it. BundleError where there is none."""
    for directory in (path / role.value, path):
        if holds_encoder(directory, role):
            return directory
    message = f"{path} has no engine of an image encoder"
    raise BundleError(message, missing_remedy(role))


def read_config(engine_dir: Path, role: Role) -> EngineConfig:
    """The config of a decoder's engine of the directory; BundleError where it is damaged."""
    return EngineConfig.read(engine_dir / CONFIGS[role])


def golden_name(role: Role) -> str:
    """The file of an engine's golden outputs, kept beside one that could not be run where it was
    built."""
    return f"{STEMS[role]}.golden.safetensors"


def variant_name(name: str, capacity: int) -> str:
    """The name that a file of the engine of a smaller capacity has beside that of the largest:
    spec_base.engine becomes spec_base.1024.engine."""
    stem, _, suffix = name.partition(".")
    return f"{stem}.{capacity}.{suffix}"


def move_variant(source: Path, target: Path, capacity: int, opened: str) -> str:
    """Move the files of the engine of a smaller capacity from the directory in which it was staged,
    which goes; the new name of the file `opened`. Raises OSError."""
    for path in source.iterdir():
        path.replace(target / variant_name(path.name, capacity))
    source.rmdir()
    return variant_name(opened, capacity)


def check_against_others(engine_dir: Path, onnx: AnyOnnxDir) -> None:
    """Check what is to be built against what the directory already holds: one model a directory,
    and an encoder in one of its own (BundleError), and a draft beside a base that fits it
    (PairingError)."""
    there = EngineManifest.read(engine_dir).engines
    check_kind(engine_dir, there, onnx.role)
    if not isinstance(onnx, OnnxDir):
        return
    twin = SAME_MODEL.get(onnx.role)
    if twin is not None and twin in there:
        check_same_model(engine_dir, twin, onnx)
    roles = {*there, onnx.role}
    if Role.DRAFT not in roles:
        return

    def component(role: Role) -> ComponentConfig:
        return onnx.config if role is onnx.role else read_config(engine_dir, role).component

    draft = component(Role.DRAFT)
    check_not_plain(roles, draft, onnx.role)
    target = target_of(roles, draft)
    if target is not None and onnx.role in (target, Role.DRAFT):
        check_pairing(component(target), draft, onnx.role)


def check_kind(engine_dir: Path, there: Iterable[Role], role: Role) -> None:
    """BundleError where a directory holds the engine of an encoder and `role` is a decoder, or the
    other way round: both have a config.json."""
    if not any((other in DECODERS) is not (role in DECODERS) for other in there):
        return
    own, other = "an image encoder", "a language model"
    if role in DECODERS:
        own, other = other, own
    message = f"{engine_dir} holds the engine of {other}, and no {own.partition(' ')[2]}"
    raise BundleError(message, f"Name the directory of the {own.partition(' ')[2]}'s engines.")


def check_same_model(engine_dir: Path, twin: Role, onnx: OnnxDir) -> None:
    """BundleError where a plain engine and a base in one directory have other weights."""
    if read_config(engine_dir, twin).component.identity != onnx.config.identity:
        message = (
            f"{engine_dir} holds the {twin.value} engine of another model; both would share one"
            " tokenizer"
        )
        raise BundleError(message, "Choose another `engine_dir`.")


# ---- files


def sidecars(onnx: AnyOnnxDir) -> dict[str, Path]:
    """Engine file name -> exported file that is copied to it."""
    wanted = SIDECARS[onnx.role]
    listed = onnx.manifest.files
    return {new: onnx.path / old for new, old in wanted.items() if old in listed}


def copy_sidecars(onnx: AnyOnnxDir, staging: Path, *, with_embedding: bool = True) -> None:
    """Copy what the runtime needs beside the engine. Raises OSError."""
    for name, source in sidecars(onnx).items():
        if with_embedding or source.name != file_names.EMBEDDING:
            shutil.copyfile(source, staging / name)


def install(staging: Path, engine_dir: Path, role: Role, entry: EngineEntry) -> EngineEntry:
    """Move a finished engine's files from `staging` into `engine_dir`; returns the entry with them.

    The manifest is without the role while files move, and gains it last: a run killed between
    leaves a directory that says that this engine is not there. What it leaves is listed in
    `staging`, for `remove_killed`. Raises OSError, and BundleError for files of others.
    """
    for path in staging.iterdir():
        page_cache.renew(path)
    new = {p.name: FileEntry.of(p) for p in sorted(staging.iterdir())}  # read anew, as it will run
    entry = replace(entry, files=new)
    with atomic.locked(engine_dir):
        refuse_foreign(engine_dir, entry.files)
        list_moving(staging, engine_dir, role, entry)
        others = remove_engine(engine_dir, role)
        kept = kept_files(engine_dir, new, others)
        entry = replace(entry, files=new | kept)
        try:
            for name in new.keys() - kept.keys():
                (staging / name).replace(engine_dir / name)
            others.with_engine(role, entry).write(engine_dir)
        except BaseException:
            for name in set(entry.files) - others.files:
                (engine_dir / name).unlink(missing_ok=True)
            raise
    return entry


def kept_files(
    engine_dir: Path, new: Mapping[str, FileEntry], others: EngineManifest
) -> dict[str, FileEntry]:
    """Of new files those that are there already, as other engines have them: an lm_head that a pair
    has in common."""
    kept = {}
    for entry in others.engines.values():
        for name, there in entry.files.items():
            if (
                name in new
                and new[name].sha256 == there.sha256
                and is_as_listed(engine_dir, name, there)
            ):
                kept[name] = there
    return kept


def is_as_listed(engine_dir: Path, name: str, entry: FileEntry) -> bool:
    """Whether a file has the size and the time of its entry."""
    path = hashes.contained(engine_dir, name)
    if not path.is_file():
        return False
    stat = path.stat()
    return (stat.st_size, stat.st_mtime_ns) == (entry.size_bytes, entry.mtime_ns)


def remove_engine(engine_dir: Path, role: Role) -> EngineManifest:
    """Take an engine out of the directory, if it is there, with the files that no other one needs;
    returns the manifest of the others."""
    manifest = EngineManifest.read(engine_dir)
    old = manifest.engines.get(role)
    others = manifest.without(role)
    if old is not None:
        others.write(engine_dir)
        for name in set(old.files) - others.files:
            hashes.contained(engine_dir, name).unlink(missing_ok=True)
    return others


def record_divergence(engine_dir: Path, role: Role, divergence: Divergence) -> None:
    """Keep what the weights of a finished engine cost. BundleError where it is not there."""
    with atomic.locked(engine_dir):
        manifest = EngineManifest.read(engine_dir)
        entry = replace(checked_entry(engine_dir, role, manifest), divergence=divergence)
        manifest.with_engine(role, entry).write(engine_dir)


# ---- what killed builds leave


def list_moving(staging: Path, engine_dir: Path, role: Role, entry: EngineEntry) -> None:
    """Write down in `staging` which files of `engine_dir` come or go from now on."""
    old = EngineManifest.read(engine_dir).engines.get(role)
    files = [*entry.files_dict().items(), *(old.files_dict().items() if old else ())]
    moving = [{"name": name, **{key: file[key] for key in MOVING_KEYS}} for name, file in files]
    json_files.write_json(staging / MOVING, {"files": moving})


def remove_killed(engine_dir: Path) -> None:
    """Remove what killed builds left: staging directories, and files that had come or should have
    gone when the run was killed. Others' files stay, and so do those of finished engines."""
    if not engine_dir.is_dir():
        return
    with atomic.writing(engine_dir), atomic.locked(engine_dir):
        finished = EngineManifest.read(engine_dir).files
        for role in Role:
            for staging in atomic.temporaries(engine_dir, role.value):
                if atomic.is_held(staging):
                    continue
                for path in moved_files(staging, engine_dir):
                    if path.name not in finished:
                        path.unlink(missing_ok=True)
                atomic.remove_whole(staging)
        for name in (file_names.MANIFEST, *OF_THE_RUNTIME):
            atomic.remove_dead(engine_dir, name)


def moved_files(staging: Path, engine_dir: Path) -> Iterator[Path]:
    """Yields the files of the list of a killed build that are still as it knew them."""
    try:
        listed = json_files.read_json(staging / MOVING).get("files")
    except BundleError:
        return  # it was killed before it moved anything
    for entry in listed if isinstance(listed, list) else ():
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or Path(name).name != name:
            continue
        path = engine_dir / name
        if path.is_file() and not path.is_symlink():
            stat = path.stat()
            if (stat.st_size, stat.st_mtime_ns) == (entry.get("bytes"), entry.get("mtime_ns")):
                yield path


# ---- files of others


def names_to_write(
    onnx: AnyOnnxDir, suffixes: Iterable[str], smaller: Iterable[int] = ()
) -> set[str]:
    """The names that files of this export's engine may have, and those of its engines of `smaller`
    capacities; `suffixes` are the backend's."""
    own = [f"{STEMS[onnx.role]}{suffix}" for suffix in suffixes]
    variants = [variant_name(name, capacity) for capacity in smaller for name in own]
    return {CONFIGS[onnx.role], *sidecars(onnx), *own, *variants}


def refuse_foreign(engine_dir: Path, names: Iterable[str]) -> None:
    """BundleError where the directory has files of these names that no build put there."""
    ours = EngineManifest.read(engine_dir).files
    foreign = [name for name in sorted(set(names) - ours) if os.path.lexists(engine_dir / name)]
    if foreign:
        raise BundleError(
            f"{engine_dir} has files that edgespec build did not write and would overwrite:"
            f" {', '.join(foreign)}",
            "Choose another `engine_dir`, or move these files away.",
        )


# ---- finished engines


def finished_engines(engine_dir: Path) -> EngineManifest:
    """The decoders of a directory that must be there; BundleError that says what a path is that is
    no engine directory of theirs."""
    has_manifest = (engine_dir / file_names.MANIFEST).is_file()
    if not has_manifest or kind_of(engine_dir) in (
        DirectoryKind.EXPORT,
        DirectoryKind.CHECKPOINT,
        DirectoryKind.EMITTED,
    ):
        raise not_engines(engine_dir)
    manifest = EngineManifest.read(engine_dir)
    check_kind(engine_dir, manifest.engines, Role.LLM)
    return manifest


def open_engine(engine_dir: Path, role: Role) -> tuple[EngineConfig, EngineEntry]:
    """Config and manifest entry of a decoder's finished engine, its files checked; BundleError with
    the remedy otherwise."""
    entry = checked_entry(engine_dir, role, finished_engines(engine_dir))
    config = config_of(EngineConfig, engine_dir, role, entry)
    largest, required = config.weights.largest, required_sidecars(config)
    if largest is not None and largest.file is not None:
        required.append(largest.file)
    hashes.refuse_unlisted(engine_dir, entry.files, required, ())
    return config, entry


def open_vision(directory: Path) -> tuple[VisionEngineConfig, EngineEntry]:
    """Config and manifest entry of a finished image encoder, its files checked; BundleError
    otherwise."""
    entry = checked_entry(directory, Role.VISUAL, EngineManifest.read(directory))
    return config_of(VisionEngineConfig, directory, Role.VISUAL, entry), entry


def checked_entry(engine_dir: Path, role: Role, manifest: EngineManifest) -> EngineEntry:
    """The manifest entry of a finished engine, whose files are as listed; BundleError with the
    remedy otherwise."""
    entry = manifest.engines.get(role)
    if entry is None:
        there = ", ".join(role.value for role in manifest.engines) or "no engine"
        message = f"{engine_dir} has no {role.value} engine (it has: {there})"
        raise BundleError(message, missing_remedy(role))
    check_listing(engine_dir, role, manifest)
    hashes.check_files(engine_dir, entry.files_dict(), trust_unchanged=True)
    return entry


def config_of(kind: type[AnyConfig], engine_dir: Path, role: Role, entry: EngineEntry) -> AnyConfig:
    """The config of an engine, whose weights are those of its entry in the manifest; BundleError
    otherwise."""
    path = engine_dir / CONFIGS[role]
    config = kind.read(path)
    if config.weights != entry.weights:
        message = f"{path}: its 'weights' are not those of {file_names.MANIFEST}"
        raise BundleError(message, hashes.EDITED)
    return config


def check_listing(engine_dir: Path, role: Role, manifest: EngineManifest) -> None:
    """BundleError unless the manifest lists the engine's own files, every file that may be read
    beside them and is there, and no others."""
    stem, listed = f"{STEMS[role]}.", manifest.engines[role].files
    known = [CONFIGS[role], *SIDECARS[role]]
    own = [path.name for path in engine_dir.iterdir() if path.name.startswith(stem)]
    required = [CONFIGS[role], *([file_names.TOKENIZER] if role in SAME_MODEL else [])]
    hashes.refuse_unlisted(engine_dir, listed, required, own)
    hashes.refuse_unlisted(engine_dir, manifest.files, (), known)
    engines = [name for name in listed if name.startswith(stem)]
    heads = filter(HEAD_FILE.fullmatch, listed)
    hashes.refuse_unknown(engine_dir, listed, {*engines, *heads, *known}, role.value)
    if not engines:
        message = f"{engine_dir / file_names.MANIFEST} lists no file of the {role.value} engine"
        raise BundleError(message, hashes.EDITED)


def required_sidecars(config: EngineConfig) -> list[str]:
    """The arrays beside an engine that its config says there are."""
    names = required_arrays(config.component)
    if config.weights.embedding is not None:  # its lm_head is the embedding
        names = tuple(name for name in names if name != file_names.EMBEDDING)
    return [new for new, old in SIDECARS[config.role].items() if old in names]


def missing_remedy(role: Role) -> str:
    """The remedy for a missing engine of that role: the commands that make it."""
    if role is Role.VISUAL:
        return f"Build it: {build_command('OUT/visual')}"
    flags = " or ".join(f"`{row.export_param}`" for row in METHODS.values() if row.export_param)
    made = {
        Role.LLM: "edgespec export MODEL OUT",
        Role.BASE: f"edgespec export MODEL OUT with {flags}",
    }
    export = made.get(role, "edgespec export DRAFT OUT")
    return f"Run {export}, then edgespec build with `engine_dir` naming this directory."
