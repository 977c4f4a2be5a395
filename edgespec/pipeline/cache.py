"""The cache of `edgespec run`: finished engine directories, each under the key of all that it was
made of.

    ROOT/entries/KEY/engine       the engine directory
    ROOT/entries/KEY/entry.json   what it is; its time stamp is that of the last use
    ROOT/starts/KEY.json          the entry that a command led to, so that it need not be looked for
    ROOT/locks/KEY.lock           held shared while an entry is used, alone while it is made

Beside them are what `checkpoint.digests` keeps of weights that were read, and directories that
whoever uses them holds a lock of: in `gguf` those that stand for GGUF files, in `gptq` the layers
that a build has rounded which was stopped.

Knows directories, keys, locks, ages and sizes. Knows nothing of what is in an entry.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.artifacts import atomic, file_names, json_files
from edgespec.errors import BundleError, OutputError

ENTRY, ENGINE, EXPORT = "entry.json", "engine", "export"
ENGINES, GGUF, GPTQ = "engines", "gguf", "gptq"  # kinds of entries
KEY_DIGITS = 32
DAY_S = 24 * 3600.0
ELSEWHERE = "EDGESPEC_CACHE names another directory; `edgespec cache prune` frees space."
# Backup programs leave out a directory with this file (https://bford.info/cachedir)
TAG = "CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55\n"
STAGING = re.compile(r"\.([0-9a-f]+)\.tmp-(\d+)")
ROOT_USER, WRITTEN_BY_ALL = 0, 0o002


def key_of(parts: Mapping[str, Any]) -> str:
    """The key of what an entry is made of: hexadecimal digits of a hash of `parts`, as JSON."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]


@dataclass(frozen=True, slots=True)
class Entry:
    """A directory of the cache. `about` is empty where it is not finished: a run makes it now, or
    was killed."""

    key: str
    path: Path
    size_bytes: int
    used_s: float  # the last use, in seconds since the epoch
    about: Mapping[str, Any]
    kind: str = ENGINES

    @property
    def is_finished(self) -> bool:
        """Whether a run has finished it."""
        return bool(self.about)

    def age_days(self, now_s: float) -> float:
        """Days since the last use."""
        return max(0.0, now_s - self.used_s) / DAY_S


class Busy(Exception):
    """Another process holds the lock of an entry."""


class Cache:
    """The entries below a directory, which is made when something is first kept there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries_dir, self.starts_dir = root / "entries", root / "starts"

    def engine_dir(self, key: str) -> Path:
        """The engine directory of an entry, whether it is there or not."""
        return self.entries_dir / key / ENGINE

    def about(self, key: str) -> dict[str, Any]:
        """What a finished entry is, as it was given to `fill`. Raises BundleError."""
        return json_files.read_json(self.entries_dir / key / ENTRY)

    def touch(self, key: str) -> None:
        """Notes that an entry is used now. A cache that is read-only keeps no such notes."""
        with suppress(OSError):
            os.utime(self.entries_dir / key / ENTRY)

    def warning(self) -> str | None:
        """Why what is in the cache may be another user's work; None where it is ours, or root's."""
        try:
            stat = self.root.stat()
        except OSError:
            return None
        own = stat.st_uid in (os.getuid(), ROOT_USER)
        if own and not stat.st_mode & WRITTEN_BY_ALL:
            return None
        whose = "anybody may write to it" if own else f"it belongs to user {stat.st_uid}"
        return f"warning: engines come from {self.root}, and {whose}; EDGESPEC_CACHE names another"

    # ---- starts

    def started(self, start: str) -> str | None:
        """The entry that a command led to last time; None where there was none."""
        path = self.starts_dir / f"{start}.json"
        if not path.is_file():
            return None
        try:
            key = json_files.read_json(path).get("entry")
        except BundleError:  # damaged: the entry is looked for by its identity
            return None
        return key if isinstance(key, str) and re.fullmatch(r"[0-9a-f]+", key) else None

    def remember(self, start: str, key: str) -> None:
        """Notes which entry a command led to. Raises OutputError."""
        with self.writing():
            self.starts_dir.mkdir(parents=True, exist_ok=True)
            json_files.write_json(self.starts_dir / f"{start}.json", {"entry": key})

    # ---- making and removing

    @contextmanager
    def fill(self, key: str, about: Mapping[str, Any]) -> Iterator[Path]:
        """Yields a new directory that becomes the entry at the end of the block, with `about` in
        it. It is removed if the block fails. Call it with the lock held. Raises OutputError."""
        assert about
        self.make_root()
        with self.writing(), atomic.staged_directory(self.entries_dir / key) as staging:
            yield staging
            json_files.write_json(staging / ENTRY, dict(about))

    def remove(self, key: str) -> None:
        """Removes an entry, if it is there. It is renamed first, so that half of it is never taken
        for an entry. Call it with the lock held. Raises OutputError."""
        path = self.entries_dir / key
        with self.writing():
            atomic.remove_dead(self.entries_dir, key)
            if path.exists():
                away = path.with_name(f".{key}.tmp-{os.getpid()}")
                path.replace(away)
                shutil.rmtree(away)

    def make_root(self) -> None:
        """Makes the cache's directories. Raises OutputError."""
        with self.writing():
            self.entries_dir.mkdir(parents=True, exist_ok=True)
            name, text = TAG
            if not (self.root / name).exists():
                (self.root / name).write_text(text, encoding="utf-8")

    def check_room(self, size_bytes: int) -> None:
        """Raises OutputError where the disk has less room than an entry takes at the least."""
        place = next(path for path in (self.root, *self.root.parents) if path.exists())
        free = shutil.disk_usage(place).free
        if free < size_bytes:
            needed, there = size_text(size_bytes), size_text(free)
            message = f"{self.root}: at least {needed} are needed, and {there} are free"
            raise OutputError(message, f"Free some space. {ELSEWHERE}")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Adds to an OutputError how to have the cache elsewhere; an OSError becomes one."""
        try:
            with atomic.writing(self.root):
                yield
        except OutputError as error:
            if ELSEWHERE in error.remedy:
                raise
            raise OutputError(error.what, f"{error.remedy} {ELSEWHERE}") from error

    @contextmanager
    def locked(
        self,
        key: str,
        *,
        shared: bool = False,
        waiting: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """Holds the lock of an entry in the block. Where another process holds it, calls `waiting`
        and waits; without it raises Busy. Raises OutputError."""
        path = self.root / "locks" / f"{key}.lock"
        with self.writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            handle = hold(path, how, waiting)
        try:
            yield
        finally:
            os.close(handle)

    # ---- what is there

    def entries(self) -> list[Entry]:
        """All entries, and what unfinished runs left or are writing; the last used first."""
        entries = [look_at(path) for path in directories(self.entries_dir)]
        entries += [
            beside(path, kind) for kind in (GGUF, GPTQ) for path in directories(self.root / kind)
        ]
        return sorted(
            (entry for entry in entries if entry), key=lambda entry: entry.used_s, reverse=True
        )

    def prune(self, entry: Entry) -> bool:
        """Removes an entry, or what a killed run left; False where a process uses or makes it.
        Raises OutputError."""
        if entry.kind != ENGINES:
            with self.writing():
                return not atomic.is_held(entry.path) and atomic.remove_unused(entry.path)
        staging = STAGING.fullmatch(entry.path.name)
        if staging and atomic.is_held(entry.path):
            return False
        try:
            with self.locked(entry.key):
                if staging:
                    atomic.remove_dead(self.entries_dir, entry.key)
                    return True
                self.remove(entry.key)
                (self.root / "locks" / f"{entry.key}.lock").unlink(missing_ok=True)
        except Busy:
            return False
        self.forget_starts(entry.key)
        return True

    def forget_starts(self, key: str) -> None:
        """Removes the notes of commands that led to an entry."""
        if self.starts_dir.is_dir():
            for path in self.starts_dir.glob("*.json"):
                if self.started(path.stem) in (key, None):
                    path.unlink(missing_ok=True)

    def forget_digests(self) -> None:
        """Removes the kept digests of weights: who needs one reads the weights again."""
        shutil.rmtree(self.root / "digests", ignore_errors=True)


def size_text(size_bytes: int) -> str:
    """A size in MB or GB."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"


def directories(parent: Path) -> list[Path]:
    """Those in a directory, which may not be there."""
    return [path for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []


def beside(path: Path, kind: str) -> Entry | None:
    """A directory that is kept beside the engines; None for one that just went. Of a GGUF file's
    the name of the file is known."""
    try:
        files = [file.stat() for file in path.rglob("*") if file.is_file()]
        used_s = max([path.stat().st_mtime, *(file.st_mtime for file in files)])
        whole = not path.name.startswith(".")
        note = json_files.read_json(path / file_names.GGUF_NOTE) if kind == GGUF and whole else {}
    except (FileNotFoundError, BundleError):
        return None
    about = {"kind": kind, "target": note.get("file")} if whole else {}
    return Entry(path.name, path, sum(file.st_size for file in files), used_s, about, kind)


def look_at(path: Path) -> Entry | None:
    """The entry in a directory; None for a directory of another kind, or one that just went."""
    staging = STAGING.fullmatch(path.name)
    key = staging[1] if staging else path.name
    if not re.fullmatch(r"[0-9a-f]+", key):
        return None
    try:
        size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        finished = not staging and (path / ENTRY).is_file()
        used_s = (path / ENTRY if finished else path).stat().st_mtime
        about = json_files.read_json(path / ENTRY) if finished else {}
    except (FileNotFoundError, BundleError):
        about, used_s, size_bytes = {}, time.time(), 0
        if not path.is_dir():
            return None
    return Entry(key, path, size_bytes, used_s, about)


def hold(path: Path, how: int, waiting: Callable[[], None] | None) -> int:
    """An open file whose lock is held; one that was removed meanwhile is not taken for it. Raises
    Busy, OSError."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(handle, how | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is None:
                    raise Busy from None
                waiting()
                fcntl.flock(handle, how)
            if is_same_file(path, handle):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def is_same_file(path: Path, handle: int) -> bool:
    """Whether a path still leads to an open file."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(handle))
