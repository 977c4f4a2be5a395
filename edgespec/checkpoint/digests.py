"""The sha256 of each tensor of a checkpoint: taken while the tensor is read, kept from run to run.

Knows hashes, and when a file cannot have changed since it was read. Knows nothing of models.

A digest of an earlier run counts only for a file with the same device, inode, size and times. A
change of the inode (`ctime`) cannot be set back as the time of the content can. Clocks of file
systems are coarse, so a file that changed just before it was read is not kept.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.artifacts import atomic, json_files
from edgespec.errors import BundleError, CheckpointError

logger = logging.getLogger(__name__)

FORMAT = 1
SETTLED_NS = 2 * 10**9  # the coarsest clock of a file system: FAT's
Span = tuple[Path, int, int]  # file, offset and size in bytes


@dataclass(frozen=True, slots=True)
class FileState:
    """What changes with a file's content."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """The state of an existing file. Raises OSError."""
        s = path.stat()
        return cls(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)

    def as_list(self) -> list[int]:
        """The same for JSON."""
        return [self.device, self.inode, self.size_bytes, self.mtime_ns, self.ctime_ns]

    def settled_at(self, now_ns: int) -> bool:
        """Whether a change after `now_ns` would have another time than this state has."""
        return max(self.mtime_ns, self.ctime_ns) < now_ns - SETTLED_NS


class Digests:
    """The digests of the tensors of some files. Make it before the files are read.

    `wanted` turns hashing while reading on: `start` then returns a hash for a tensor that has none.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.began_ns = time.time_ns()
        self.states = {file: _state(file) for file in files}
        self.wanted = False
        self._known: dict[Span, str] = {}
        self._spans: set[Span] = set()  # those of whole tensors

    def expect(self, spans: Iterable[Span]) -> None:
        """The places of the tensors whose digests count; parts of them have none."""
        self._spans.update(spans)

    def start(self, span: Span) -> Any | None:
        """A new hash for the bytes of a tensor; None where its digest is known or not wanted."""
        if not self.wanted or span in self._known or span not in self._spans:
            return None
        return hashlib.sha256()

    def finish(self, span: Span, digest: Any) -> None:
        """Keep the digest of a tensor that was read to its end."""
        self._known[span] = digest.hexdigest()

    def known(self, span: Span) -> str | None:
        """The digest of a tensor, or None."""
        return self._known.get(span)

    def check_unchanged(self) -> None:
        """Raises CheckpointError where a file is not as it was when its first byte was read."""
        for file, state in self.states.items():
            if _state(file) != state:
                raise CheckpointError(
                    f"{file} was changed while it was read",
                    "Run again when nothing writes to the checkpoint any more.",
                )

    def recall(self, tensors: Mapping[str, Span]) -> None:
        """Take the digests that an earlier run kept of unchanged files; `tensors` are all."""
        for file, state in self.states.items():
            names = {name: span for name, span in tensors.items() if span[0] == file}
            if all(span in self._known for span in names.values()):
                continue
            for name, digest in _kept(file, state, names.keys()).items():
                self._known.setdefault(names[name], digest)

    def keep(self, tensors: Mapping[str, Span]) -> None:
        """Keep the digests of the files for later runs, where there is a place for them."""
        for file, state in self.states.items():
            digests = {n: self._known[span] for n, span in tensors.items() if span[0] == file}
            if not state.settled_at(self.began_ns) or _kept(file, state, digests.keys()):
                continue
            try:
                _write(file, state, digests)
            except OSError as error:
                logger.debug("the digests of %s are not kept: %s", file, error)


def _state(file: Path) -> FileState:
    try:
        return FileState.of(file)
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read: {error.strerror or error}.",
            "Check its permissions and the disk.",
        ) from error


# The store: one JSON file per file of weights


def store() -> Path:
    """The directory of the kept digests. Raises OSError where the user has no home."""
    return atomic.user_cache() / "digests"


def _record(file: Path) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.realpath(file))).hexdigest()[:32]
    return store() / f"{name}.json"


def _kept(file: Path, state: FileState, names: Iterable[str]) -> dict[str, str]:
    """The digests of an unchanged file by tensor; empty where there are none of just these."""
    try:
        path = _record(file)
        record = json_files.read_json(path) if path.is_file() else {}
    except (BundleError, OSError):
        return {}
    tensors = record.get("tensors")
    usable = (
        record.get("format") == FORMAT
        and record.get("state") == state.as_list()
        and isinstance(tensors, dict)
        and tensors.keys() == set(names)
        and all(isinstance(digest, str) and len(digest) == 64 for digest in tensors.values())
    )
    return tensors if usable and isinstance(tensors, dict) else {}


def _write(file: Path, state: FileState, digests: Mapping[str, str]) -> None:
    store().mkdir(parents=True, exist_ok=True, mode=0o700)
    value = {
        "format": FORMAT,
        "path": os.path.realpath(file),
        "state": state.as_list(),
        "tensors": dict(digests),
    }
    json_files.write_json(_record(file), value)
