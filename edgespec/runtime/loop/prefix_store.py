"""Keeps prefixes that memory has no room for on disk, and all of them when an engine is closed, so
that they are there after a restart.

Knows files, and what makes one valid: the engines and the machine that computed it, the salt, the
prompt's key, the hash of its bytes. Nothing that is wrong with a file or with the disk is a
request's error: its prompt is computed then. Knows nothing of how rows are computed.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.artifacts import atomic
from edgespec.backends.base import PacksRows
from edgespec.backends.host import HostStates
from edgespec.errors import BundleError, EnvironmentProblem, OptionError
from edgespec.runtime.drafters.base import Drafter, PacksSnapshots
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.loop.prefix import (
    MIN_NEW,
    NEW_SHARE,
    NO_DRAFT,
    Prefix,
    PrefixCache,
    reusable_length,
)
from edgespec.runtime.loop.prefix_file import (
    BASE,
    DRAFT,
    KEY,
    PAIRS,
    STATE,
    Arrays,
    StoredPrefix,
    read_arrays,
    write_arrays,
)

logger = logging.getLogger(__name__)

FORMAT = 1  # part of what a file is valid for: those of another one are never read
DISK_TIMES = 16  # bytes on disk for each that memory may take
MAX_FILES = 1024  # each of a salt is compared with each of its prompts
SUFFIX = ".prefix.safetensors"
NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-[0-9a-f]{32}" + re.escape(SUFFIX))


class PrefixStore:
    """The prefixes of an engine in a directory, which others may share: all together take 16 times
    the budget of memory at most, and the least recently used go first.

    `identity` says what their bits depend on. What `drafter` keeps of a prefix is stored beside its
    rows, where that can be; what another keeps is not. `said` is told once why nothing can be
    stored. Raises OptionError for a base whose rows cannot be taken out of it, EnvironmentProblem
    for a directory that cannot be written, or that others can write.
    """

    def __init__(
        self,
        directory: Path,
        identity: str,
        cache: PrefixCache,
        base: CachedDecoder,
        drafter: Drafter | None,
    ) -> None:
        if not isinstance(base.runner, PacksRows):
            message = "engines of this backend keep their prefixes on the device alone"
            raise OptionError(message, "Leave `prefix_cache_dir` out.")
        if not cache.budget_bytes:
            message = "`prefix_cache_dir` is given, and memory keeps no prefixes"
            raise OptionError(message, "Give `prefix_cache_bytes` above 0.")
        self.runner, self.croppable = base.runner, base.croppable
        self.drafter = drafter
        self.packer = drafter if isinstance(drafter, PacksSnapshots) else None
        self.cache, self.directory = cache, private(directory)
        self.identity = hashlib.sha256(f"{FORMAT} {identity}".encode()).hexdigest()
        self.bound_bytes = DISK_TIMES * cache.budget_bytes
        self.said: Callable[[str], object] = logger.warning
        self.has_failed = False
        self.waiting_bytes = 0  # of what is to be written
        self.lock, self.loading = Lock(), Lock()
        self.writer = ThreadPoolExecutor(1, "edgespec-prefixes")
        self.index: dict[Path, StoredPrefix] = {}
        self.sweep()
        for path in self.files():
            engine, salt, _ = path.name.split("-")
            if engine == self.identity[:16] and (stored := self.opened(path, salt)) is not None:
                self.index[path] = stored
        cache.evicted = self.put

    # ---- found

    def fetch(self, cache_key: Sequence[int], drafter: Drafter | None, salt: str) -> None:
        """Let memory have what is stored of a prompt, where that is much more than it has already.
        Any thread may ask, and waits for the file: none that steps should."""
        if drafter is not None and (drafter is not self.drafter or self.packer is None):
            return
        wanted, salt_hash = np.asarray(cache_key, np.int64), self.hash_of(salt)
        with self.loading:
            have = max(self.cache.lengths(cache_key, drafter, salt), default=0)
            stored, length = self.find(wanted, salt_hash, drafts=drafter is not None)
            if stored is None or length - have < max(MIN_NEW, NEW_SHARE * len(stored.cache_key)):
                return
            prefix = self.load(stored, salt)
            if prefix is not None:
                self.cache.keep(prefix)

    def find(
        self, wanted: NDArray[np.int64], salt: str, *, drafts: bool
    ) -> tuple[StoredPrefix | None, int]:
        """The file that has most of a prompt, and how much."""
        best, most = None, 0
        with self.lock:
            there = [one for one in self.index.values() if one.salt == salt]
        for one in there:
            length = reusable_length(
                one.cache_key,
                wanted,
                self.croppable,
                one.pairs if drafts else None,
                has_state=one.has_state,
            )
            if length > most and one.size_bytes <= self.cache.budget_bytes:
                best, most = one, length
        return best, most

    def load(self, stored: StoredPrefix, salt: str) -> Prefix | None:
        """A prefix with its rows; None where its file is damaged, which then goes, or gone."""
        try:
            arrays = read_arrays(stored.path)
            touch(stored.path)
        except (BundleError, OSError, MemoryError) as error:
            self.refuse(stored.path, error)
            return None
        draft = None
        if self.packer is not None and stored.pairs != NO_DRAFT:
            draft = self.packer.unpack(part(arrays, DRAFT), stored.pairs)
        return Prefix(
            arrays[KEY],
            self.runner.unpack(part(arrays, BASE)),
            draft,
            HostStates(arrays[STATE]) if STATE in arrays else None,
            self.croppable,
            None if draft is None else self.drafter,
            salt,
        )

    # ---- written

    def put(self, prefix: Prefix) -> None:
        """Write a prefix soon, in a thread of its own. It is lost where those that wait for that
        take as much as memory may already: the disk is too slow."""
        with self.lock:
            if self.waiting_bytes + prefix.size_bytes > self.cache.budget_bytes:
                return
            self.waiting_bytes += prefix.size_bytes
        try:
            self.writer.submit(self.write_waiting, prefix)
        except RuntimeError as error:  # no thread can be started
            self.failed(error)

    def write_waiting(self, prefix: Prefix) -> None:
        """Write what has waited."""
        try:
            self.write(prefix)
        finally:
            with self.lock:
                self.waiting_bytes -= prefix.size_bytes

    def close(self) -> None:
        """Write what waits and what memory holds. Closing twice is harmless."""
        self.writer.shutdown()
        for prefix in self.cache.entries:
            self.write(prefix)
        self.cache.clear()

    def write(self, prefix: Prefix) -> None:
        """Write a prefix, unless it is there; what it serves goes, and the least recently used go
        until all fit."""
        salt, draft = self.hash_of(prefix.salt), None
        if self.packer is not None and prefix.draft is not None and prefix.drafter is self.drafter:
            draft = prefix.draft
        pairs = NO_DRAFT if draft is None else len(draft)
        with self.lock:
            known = [*self.index.values()]
        for old in known:
            if old.serves(salt, prefix.cache_key, pairs, self.croppable):
                return touch(old.path)
        arrays = {KEY: prefix.cache_key, PAIRS: np.array([pairs])}
        arrays |= {BASE + name: array for name, array in self.runner.pack(prefix.base).items()}
        if draft is not None and self.packer is not None:
            arrays |= {DRAFT + name: array for name, array in self.packer.pack(draft).items()}
        if prefix.hidden_state is not None:
            arrays[STATE] = prefix.hidden_state.numpy()
        of = hashlib.sha256(f"{salt} {pairs} ".encode() + prefix.cache_key.tobytes()).hexdigest()
        path = self.directory / f"{self.identity[:16]}-{salt}-{of[:32]}{SUFFIX}"
        try:
            if not self.make_room(sum(array.nbytes for array in arrays.values())):
                return
            write_arrays(path, arrays)
            new = StoredPrefix.read(path, salt)
        except (BundleError, OSError, MemoryError) as error:
            return self.failed(error)
        with self.lock:
            self.index[path] = new
        for old in known:
            if old.path != path and new.serves(old.salt, old.cache_key, old.pairs, self.croppable):
                self.remove(old.path)

    def make_room(self, size_bytes: int) -> bool:
        """Remove the least recently used files, of whatever engine, until so much more fits; False
        where it never does."""
        there = []
        for path in self.files():
            with suppress(FileNotFoundError):  # of another process, which has removed it
                stat = path.stat()
                there.append((stat.st_mtime_ns, stat.st_size, path))
        there.sort()
        total = size_bytes + sum(size for _, size, _ in there)
        while there and (total > self.bound_bytes or len(there) >= MAX_FILES):
            _, size, path = there.pop(0)
            self.remove(path)
            total -= size
        return total <= self.bound_bytes

    def failed(self, error: Exception) -> None:
        """Say once why something is not stored."""
        if not self.has_failed:
            why = getattr(error, "strerror", None) or error
            self.said(f"{self.directory}: prefixes are lost when the engine is closed: {why}")
        self.has_failed = True

    # ---- files

    def hash_of(self, salt: str) -> str:
        """What stands for a salt in names."""
        return hashlib.sha256(f"{self.identity} {salt}".encode()).hexdigest()[:16]

    def files(self) -> Iterator[Path]:
        """All files of prefixes."""
        return (path for path in self.directory.iterdir() if NAME.fullmatch(path.name))

    def sweep(self) -> None:
        """Remove what killed processes have left of files."""
        for path in self.directory.iterdir():
            name, temporary, _ = path.name.partition(".tmp-")
            if temporary and NAME.fullmatch(name[1:]) and not atomic.is_held(path):
                atomic.remove_whole(path)

    def opened(self, path: Path, salt: str) -> StoredPrefix | None:
        """What is known of a file; None where it cannot be read."""
        try:
            return StoredPrefix.read(path, salt)
        except (BundleError, OSError) as error:
            self.refuse(path, error)
            return None

    def refuse(self, path: Path, error: Exception) -> None:
        """Forget a file that cannot be read, with a word unless another process has removed it; a
        damaged one goes."""
        if isinstance(error, BundleError):
            self.remove(path)
        with self.lock:
            self.index.pop(path, None)
        if not isinstance(error, FileNotFoundError):
            logger.warning("%s is not used: %s", path, getattr(error, "what", error))

    def remove(self, path: Path) -> None:
        """Remove a file, and forget it."""
        with suppress(OSError):
            path.unlink(missing_ok=True)
        with self.lock:
            self.index.pop(path, None)

    def clear(self) -> None:
        """Remove all files of this engine."""
        for path in [*self.index]:
            self.remove(path)


def private(directory: Path) -> Path:
    """A directory that its owner alone can write; it is made where it is not there."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        stat = directory.stat()
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        message = f"`prefix_cache_dir` {directory} cannot be used: {error.strerror}"
        raise EnvironmentProblem(message, "Name a directory that this user can write.") from error
    if stat.st_uid != os.geteuid() or stat.st_mode & 0o022:
        message = f"`prefix_cache_dir` {directory} can be written by other users"
        raise EnvironmentProblem(message, "Name one of your own, or a new one below it.")
    return directory.absolute()


def part(arrays: Arrays, prefix: str) -> dict[str, NDArray[Any]]:
    """Those whose names begin so, by the rest."""
    return {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}


def touch(path: Path) -> None:
    """Note that a file was used."""
    with suppress(OSError):  # another process has removed it
        os.utime(path)
