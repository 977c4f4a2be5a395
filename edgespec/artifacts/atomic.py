"""Files and directories that are written whole or not at all, and what killed runs leave of them.

A directory is written to a sibling with a temporary name, which takes its place at the end. Locks
say which siblings belong to a run that lives.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from edgespec.errors import OutputError

CHUNK_BYTES = 8 << 20


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


def sync_directory(directory: Path) -> None:
    """Returns once the files of a directory, and their names, are on the disk. Raises OSError."""
    for path in (*directory.iterdir(), directory):
        if path.is_file() or path == directory:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


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


def keep(directory: Path, owner: object) -> None:
    """Has `remove_unused` leave a directory alone as long as its owner is there. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY)
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_SH)
    weakref.finalize(owner, os.close, handle)


def remove_unused(directory: Path) -> bool:
    """Removes a directory, so that half of it is never found; returns False where a process uses
    it. Where the file system has no locks, it is removed. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        away = directory.with_name(temporary_name(directory.name))
        directory.replace(away)
        remove_whole(away)
    finally:
        os.close(handle)
    return True


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
