"""Exported directories on disk: file names, `manifest.json`, hashes, and atomic writes.

Knows files. Knows nothing of graphs, tokenizers or requests.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from edgespec.errors import BundleError, OutputError
from edgespec.stored.regular import open_regular, read_regular

MANIFEST = "manifest.json"
MODEL = "model.onnx"
MODEL_DATA = "model.onnx.data"
CONFIG = "config.json"
EMBEDDING = "embedding.safetensors"
D2T = "d2t.safetensors"
HEADS = "draft_heads.safetensors"
GOLDEN = "golden.safetensors"
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "processed_chat_template.json",
    "generation_config.json",
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")  # of images
EXPORT_FILES = (MODEL, MODEL_DATA, CONFIG, EMBEDDING, D2T, HEADS, GOLDEN, *TOKENIZER_FILES)
MANIFEST_FORMAT = 1
EDITED = "The file is damaged or was edited: copy or make the directory again."
CHUNK_BYTES = 8 << 20
TEXT_FLAGS = ("--prompt", "--system")


def sha256_file(path: Path) -> str:
    """Returns the sha256 of a file as hexadecimal digits."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_entries(
    directory: Path, known: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """Returns size and sha256 of each file beside the manifest, by name.

    `known` holds hashes that were computed while writing.
    """
    entries = {}
    for path in sorted(directory.iterdir()):
        if path.name == MANIFEST or not path.is_file():
            continue
        digest = (known or {}).get(path.name) or sha256_file(path)
        entries[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
    return entries


def user_cache() -> Path:
    """Returns the directory for what can be computed again: EDGESPEC_CACHE, or `edgespec` in
    XDG_CACHE_HOME or ~/.cache. Raises OSError where there is no home."""
    ours, caches = os.environ.get("EDGESPEC_CACHE"), os.environ.get("XDG_CACHE_HOME", "")
    try:
        if ours:
            return Path(ours).expanduser().absolute()
        # A relative XDG_CACHE_HOME is to be ignored, by its specification
        base = Path(caches) if Path(caches).is_absolute() else Path("~/.cache").expanduser()
        return base / "edgespec"
    except RuntimeError as error:
        raise OSError(errno.ENOENT, str(error)) from None


def provenance() -> dict[str, Any]:
    """Returns our version, the command line without prompts, and the versions of the packages that
    write files."""
    versions = {
        name: installed_version(name) for name in ("numpy", "onnx", "onnx-ir", "safetensors")
    }
    command = [Path(sys.argv[0]).name, *without_texts(sys.argv[1:])]
    return {"edgespec": installed_version("edgespec"), "command": command, "packages": versions}


def without_texts(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of a command line with "..." for what was said to a model: an engine
    outlives a conversation and may be given away."""
    shown = []
    for before, argument in pairwise(["", *arguments]):
        flag, equals, _ = argument.partition("=")
        if before in TEXT_FLAGS:
            shown.append("...")
        else:
            shown.append(f"{flag}=..." if equals and flag in TEXT_FLAGS else argument)
    return shown


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write_json(path: Path, value: object) -> None:
    """Writes JSON atomically: a reader sees the old file or the new one. Raises OSError."""
    try:
        data = json.dumps(value, indent=2, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a file name that is not UTF-8
        data = json.dumps(value, indent=2).encode()
    replace_file(path, data + b"\n")


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all; removes what killed runs left of it. Raises OSError."""
    remove_dead(path.parent, path.name)
    staged = path.parent / temporary_name(path.name)
    try:
        with staged.open("xb") as file:
            hold(file.fileno())
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object. Raises BundleError that names a damaged or missing file."""
    try:
        value = json.loads(read_regular(path))
    except FileNotFoundError:
        raise BundleError(
            f"{path} does not exist", "Export or build the directory again."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BundleError(
            f"{path} cannot be read: {reason}", "Export or build the directory again."
        ) from None
    if not isinstance(value, dict):
        raise BundleError(f"{path} is not a JSON object", "Export or build the directory again.")
    return value


def read_manifest(directory: Path) -> dict[str, Any]:
    """Returns a directory's manifest. Raises BundleError for a damaged one or another format."""
    manifest = read_json(directory / MANIFEST)
    if manifest.get("format") != MANIFEST_FORMAT:
        raise BundleError(
            f"{directory / MANIFEST} has format {manifest.get('format')!r}, this version reads"
            f" {MANIFEST_FORMAT}",
            "Remove the directory, and export or build it again with this version of edgespec.",
        )
    return manifest


def check_files(directory: Path, files: object, *, trust_unchanged: bool = False) -> None:
    """Raises BundleError for the first file that differs from its manifest entry; see `faults`."""
    for fault in faults(directory, files, trust_unchanged=trust_unchanged):
        raise fault


def faults(
    directory: Path, files: object, *, read_up_to: float = math.inf, trust_unchanged: bool = False
) -> Iterator[BundleError]:
    """Yields an error for each file that differs from its manifest entry in size or hash.

    Only the size counts for files of more than `read_up_to` bytes and, with `trust_unchanged`, for
    files with the recorded modification time: these are not read.
    """
    for name, entry in listed_files(directory, files).items():
        path = contained(directory, name)
        if not path.is_file():
            yield BundleError(
                f"{path} is missing", "The directory is incomplete: copy or make it again."
            )
            continue
        stat = path.stat()
        if stat.st_size != entry["bytes"]:
            what = f"{path} has {stat.st_size} bytes, its manifest says {entry['bytes']}"
            yield BundleError(
                what, "The file is truncated or was replaced: copy or make the directory again."
            )
            continue
        if stat.st_size > read_up_to or (
            trust_unchanged and entry.get("mtime_ns") == stat.st_mtime_ns
        ):
            continue
        if sha256_file(path) != entry["sha256"]:
            what = f"{path} does not have the hash that its manifest records"
            yield BundleError(
                what, "The file is damaged or was replaced: copy or make the directory again."
            )


def listed_files(directory: Path, files: object) -> dict[str, dict[str, Any]]:
    """Returns the manifest's entries by file name, each with `bytes` and `sha256`.

    Raises BundleError if `files` is not of that form, or empty.
    """
    what = f"{directory / MANIFEST} does not list its files with their sizes and hashes"
    if not isinstance(files, dict) or not files:
        raise BundleError(what, EDITED)
    for name, entry in files.items():
        contained(directory, name)
        if not is_entry(entry):
            raise BundleError(f"{what}: the entry of {name!r:.80} is not of that form", EDITED)
    return files


def is_entry(value: object) -> bool:
    """Returns whether a value is a manifest entry: `bytes`, `sha256` and, for engines,
    `mtime_ns`."""
    return (
        isinstance(value, dict)
        and value.keys() <= {"bytes", "sha256", "mtime_ns"}
        and all(type(value[key]) is int and value[key] >= 0 for key in value.keys() - {"sha256"})
        and "bytes" in value
        and isinstance(value.get("sha256"), str)
        and re.fullmatch("[0-9a-f]{64}", value["sha256"]) is not None
    )


def refuse_unlisted(
    directory: Path, listed: Collection[str], required: Iterable[str], known: Iterable[str]
) -> None:
    """Raises BundleError unless a manifest lists every file that is read: those that are
    `required`, and those of the `known` names that are there."""
    for name in required:
        if name not in listed:
            what = f"{directory / MANIFEST} does not list {name}, which is read"
            raise BundleError(what, EDITED)
    for name in known:
        if name not in listed and os.path.lexists(directory / name):
            what = f"{directory / MANIFEST} does not list {name}, which is there"
            raise BundleError(what, f"Remove {directory / name}, or make the directory again.")


def refuse_unknown(
    directory: Path, listed: Iterable[str], known: Collection[str], role: str
) -> None:
    """Raises BundleError where a manifest lists a file that is not of the `known` names, those that
    a component of the role has."""
    for name in listed:
        if name not in known:
            what = (
                f"{directory / MANIFEST} lists {name!r:.80}, which nothing of the role {role} has"
            )
            raise BundleError(what, EDITED)


def contained(directory: Path, name: str) -> Path:
    """Returns `directory/name`. Raises BundleError if `name` could point outside the directory."""
    if not name or name in {".", ".."} or Path(name).name != name:
        raise BundleError(
            f"{directory / MANIFEST} names the file {name!r}",
            "File names in it must be plain names.",
        )
    return directory / name


@contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """Yields a temporary sibling that becomes `target` at the end of the block.

    It is removed if the block fails. `target` must not exist or be an empty directory. Raises
    OutputError if it is occupied or cannot be written.
    """
    refuse_occupied(target)
    new = missing_parents(target)
    try:
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with staging_in(target.parent, target.name) as staging:
                yield staging
                if target.exists():
                    target.rmdir()
                staging.replace(target)
    finally:
        remove_if_empty(*new)


@contextmanager
def staged_directories(*targets: Path) -> Iterator[list[Path]]:
    """Does the same for several targets: afterwards all of them exist, or none."""
    new_parents = [parent for target in targets for parent in missing_parents(target)]
    moved_in: list[Path] = []
    try:
        with ExitStack() as stack:
            stagings = []
            for target in targets:
                stack.push(on_success(moved_in.append, target))
                stagings.append(stack.enter_context(staged_directory(target)))
            yield stagings
    except BaseException:
        for target in moved_in:
            shutil.rmtree(target, ignore_errors=True)
        remove_if_empty(*new_parents)
        raise


def on_success(call: Callable[[Path], None], target: Path) -> Callable[..., None]:
    """Returns an exit callback for ExitStack.push that calls `call(target)` after a success."""

    def ended(kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            call(target)

    return ended


def missing_parents(target: Path) -> list[Path]:
    """Returns the missing directories above `target`, the nearest first."""
    return list(takewhile(lambda parent: not parent.exists(), target.parents))


def remove_if_empty(*directories: Path) -> None:
    """Removes the empty ones, in this order: list a directory before its parent."""
    for directory in directories:
        with suppress(OSError):
            directory.rmdir()


@contextmanager
def staging_in(parent: Path, name: str) -> Iterator[Path]:
    """Yields a new directory `parent`/.NAME.tmp-PID, and removes it at the end unless it was moved.

    Removes those of killed runs first. Raises OutputError where another run has one, and OSError.
    """
    staging = parent / temporary_name(name)
    with locked(parent):  # until it is held, another run would take it for a killed one's
        remove_dead(parent, name)
        refuse_other_run(parent, name)
        staging.mkdir()
        handle = os.open(staging, os.O_RDONLY)
        hold(handle)
    try:
        yield staging
    finally:
        os.close(handle)
        shutil.rmtree(staging, ignore_errors=True)


def take_place(staging: Path, target: Path) -> None:
    """Move a finished directory to `target`; the one that is there goes. Raises OSError."""
    if not target.exists():
        staging.replace(target)
        return
    old = target.parent / f"{temporary_name(target.name)}.old"  # a killed run's is removed
    target.replace(old)
    try:
        staging.replace(target)
    except OSError:
        old.replace(target)
        raise
    remove_whole(old)


def link_or_copy(source: Path, target: Path) -> None:
    """Makes `target` a second name of a file, or a copy where the file system has no such names."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def temporary_name(name: str) -> str:
    """The name of a file or directory until it is complete."""
    return f"{temporary_prefix(name)}{os.getpid()}"


def temporary_prefix(name: str) -> str:
    """The same without the process id. Long names are replaced by a hash: a file's name may have
    255 bytes."""
    data = os.fsencode(name)
    return f".{name if len(data) < 200 else hashlib.sha256(data).hexdigest()}.tmp-"


def temporaries(parent: Path, name: str) -> list[Path]:
    """What is or was to become `parent`/NAME."""
    if not parent.is_dir():
        return []
    prefix = temporary_prefix(name)
    return sorted(path for path in parent.iterdir() if path.name.startswith(prefix))


def remove_dead(parent: Path, name: str) -> None:
    """Removes what killed runs left of `parent`/NAME, which may be a complete model."""
    for old in temporaries(parent, name):
        if not is_held(old):
            remove_whole(old)


def remove_whole(path: Path) -> None:
    """Removes a file, or a directory with all that is in it, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def refuse_other_run(parent: Path, name: str) -> None:
    """Raises OutputError where another run is writing `parent`/NAME."""
    if others := temporaries(parent, name):
        pid = others[0].name.rpartition("-")[2]
        raise OutputError(
            f"{parent / name} is being written by another run (process {pid})",
            "Wait until it has ended, or choose another directory.",
        )


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds a directory's lock, so that one run after the other does what is in the block. Where
    the file system has no locks, it does nothing. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def hold(handle: int) -> None:
    """Locks an open file or directory until it is closed, so that `is_held`. Some network file
    systems have no locks: there the process id in the name must do."""
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(path: Path) -> bool:
    """Returns whether a run that goes on holds a temporary file or directory."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # not ours
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pid = path.name.rpartition("-")[2]
        return pid != str(os.getpid()) and process_lives(pid)
    finally:
        os.close(handle)
    return False


def process_lives(pid: str) -> bool:
    """Returns whether a process runs; True if that cannot be found out."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OSError):
        return True
    return True


def refuse_occupied(target: Path) -> None:
    """Raises OutputError if `target` exists and is not an empty directory."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists():
        raise OutputError(
            f"{target} already exists", "Choose another directory, or remove this one first."
        )


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Converts an OSError of writing into an OutputError with a remedy; others pass through."""
    try:
        yield
    except OSError as error:
        remedies = {
            errno.ENOSPC: (
                "The disk is full: free some space, or choose another directory. No partial output"
                " is left."
            ),
            errno.EFBIG: (
                "No file may become so large here: raise the limit (ulimit -f), or choose another"
                " file system. No partial output is left."
            ),
            errno.EDQUOT: "The quota is used up: free some space, or choose another directory.",
            errno.EACCES: "Check the permissions of this path, or choose another.",
            errno.EPERM: "Check the permissions of this path, or choose another.",
            errno.EROFS: "The file system is read-only: choose another directory.",
            errno.ENOTDIR: "A part of the path is a file: choose another directory.",
            errno.EEXIST: "A file of that name exists: choose another directory.",
            errno.ENOTEMPTY: (
                "Another run has written it meanwhile: use that, or choose another directory."
            ),
        }
        if error.errno not in remedies:
            raise
        # Of two names, as a copy has them, the second is the one that is written
        name = error.filename2 or error.filename
        culprit = name if name and ".tmp-" not in str(name) else target
        raise OutputError(f"{culprit}: {error.strerror}", remedies[error.errno]) from error
