"""What lies at a path, by names of files and the kind in a manifest: so that a command that is
given the wrong directory can say what it is, and which command takes it.

Knows the names that this project and Hugging Face use. Reads nothing but manifests.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path

from edgespec.artifacts import file_names
from edgespec.errors import BundleError, command

GRAPHS = (".onnx", ".engine")  # how files of exports and of engines end


class DirectoryKind(Enum):
    """What a path is. The values are the words of messages."""

    MISSING = "not there"
    FILE = "a file"
    EMPTY = "an empty directory"
    CHECKPOINT = "a checkpoint"
    EXPORT = "an export"
    ENGINES = "an engine directory"
    EMITTED = "a graph for another tool to build"
    UNKNOWN = "a directory of another kind"


MANIFEST_KINDS = {
    "quantize": DirectoryKind.CHECKPOINT,
    "export": DirectoryKind.EXPORT,
    "engine": DirectoryKind.ENGINES,
    "emitted": DirectoryKind.EMITTED,
}


def kind_of(path: Path) -> DirectoryKind:
    """What a path is. A manifest decides; without one of ours, a config.json or weights are a
    checkpoint, unless a graph stands beside them. Never raises for what a file contains."""
    if not path.is_dir():
        return DirectoryKind.FILE if path.exists() else DirectoryKind.MISSING
    if (kind := manifest_kind(path)) is not None:
        return kind
    names = {file.name for file in path.iterdir()}
    if not names:
        return DirectoryKind.EMPTY
    graphs = any(name.endswith(GRAPHS) for name in names)
    weights = any(name.lower().endswith((".safetensors", ".bin", ".gguf")) for name in names)
    if file_names.CONFIG in names or weights:
        return DirectoryKind.UNKNOWN if graphs else DirectoryKind.CHECKPOINT
    return DirectoryKind.UNKNOWN


def manifest_kind(path: Path) -> DirectoryKind | None:
    """What the manifest of a directory says; None without one, and for one that is not ours."""
    manifest = path / file_names.MANIFEST
    try:
        value = json.loads(manifest.read_bytes()) if manifest.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    kind = value.get("kind") if isinstance(value, dict) else None
    return MANIFEST_KINDS.get(kind) if isinstance(kind, str) else None


def below(path: Path, kind: DirectoryKind) -> list[Path]:
    """The directories of a kind up to two levels below a path, sorted; those of a run that was
    killed are left out."""
    manifests = [
        manifest
        for stars in ("*", "*/*")
        for manifest in path.glob(f"{stars}/{file_names.MANIFEST}")
    ]
    directories = {file.parent for file in manifests}
    return sorted(d for d in directories if manifest_kind(d) is kind and ".tmp-" not in str(d))


# ---- messages


def not_an_export(path: Path, param: str = "onnx_dir") -> BundleError:
    """The error for a path that `build` cannot read as an export: what it is, and what to do."""
    kind, flag = kind_of(path), f"`{param}`"
    remedies = {
        DirectoryKind.MISSING: "Give a directory that edgespec export wrote.",
        DirectoryKind.FILE: f"Give its directory: {flag} {path.parent}",
        DirectoryKind.EMPTY: "Run edgespec export first: edgespec export MODEL OUT",
        DirectoryKind.CHECKPOINT: (
            f"Export it first: edgespec export {path} OUT, then pass OUT/llm."
        ),
        DirectoryKind.ENGINES: (
            f"Give a directory that edgespec export wrote to {flag}, and this one to `engine_dir`."
        ),
    }
    if kind is DirectoryKind.EMITTED:
        return BundleError(described(flag, path, kind), import_remedy(path))
    if inside := below(path, DirectoryKind.EXPORT):
        return BundleError(
            f"{flag} {path} is not an export itself", f"Give the component: {flag} {inside[0]}"
        )
    usual = "Give a directory that edgespec export wrote, such as OUT/llm."
    return BundleError(described(flag, path, kind), remedies.get(kind, usual))


def not_engines(path: Path) -> BundleError:
    """The error for a path that holds no engine: what it is, and what to do."""
    kind = kind_of(path)
    remedies = {
        DirectoryKind.MISSING: "Give a directory that edgespec build made.",
        DirectoryKind.FILE: f"Give its directory: {path.parent}",
        DirectoryKind.EMPTY: f"Build an engine into it: {build_command('OUT/llm', path)}",
        DirectoryKind.CHECKPOINT: (
            f"Export it, then build it: edgespec export {path} OUT, then {build_command('OUT/llm')}"
        ),
        DirectoryKind.EXPORT: f"Build it first: {build_command(path)}",
    }
    if kind is DirectoryKind.EMITTED:
        return BundleError(described("", path, kind), import_remedy(path))
    if inside := below(path, DirectoryKind.ENGINES):
        return BundleError(f"{path} is not an engine directory itself", f"Give {inside[0]}")
    if inside := below(path, DirectoryKind.EXPORT):
        message = f"{path} holds exports, no engines"
        return BundleError(message, f"Build them first: {command('build', onnx_dir=inside[0])} ...")
    if kind is not DirectoryKind.EXPORT and any(file.suffix in GRAPHS for file in path.glob("*.*")):
        message = (
            f"{path} has engine files and no {file_names.MANIFEST}: it is half-written, or part"
        )
        return BundleError(f"{message} of a copy", "Copy all of it, or run edgespec build again.")
    usual = "Give a directory that edgespec build made."
    return BundleError(described("", path, kind), remedies.get(kind, usual))


def build_command(onnx_dir: Path | str, engine_dir: Path | str = "ENGINES") -> str:
    """The command that builds the engine of an export."""
    return command("build", onnx_dir=onnx_dir, engine_dir=engine_dir)


def import_remedy(path: Path) -> str:
    """The remedy for a graph that --emit-onnx wrote, where something else is wanted."""
    return f"Build and import its engine: {command('import', path, engine_dir='ENGINES')}"


def not_a_checkpoint(path: Path) -> BundleError | None:
    """The error for a directory that one of our commands wrote from a checkpoint; None for any
    other path."""
    kind = kind_of(path)
    if kind is DirectoryKind.EXPORT:
        message = f"{path} is an export, not a checkpoint"
        return BundleError(message, f"Build it: {build_command(path)}")
    if kind in (DirectoryKind.ENGINES, DirectoryKind.EMITTED):
        message = f"{path} is {kind.value}, not a checkpoint"
        return BundleError(message, "Give the model's checkpoint, a directory or a hub id.")
    return None


def described(flag: str, path: Path, kind: DirectoryKind) -> str:
    """A path with what it is, behind its flag where that says which of several is meant."""
    place = f"{flag} {path}".strip()
    return (
        f"{place} does not exist" if kind is DirectoryKind.MISSING else f"{place} is {kind.value}"
    )
