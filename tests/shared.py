"""Directories that are made once per run and shared by its workers, each under a key that says what
is in it.

Knows files and locks. Knows nothing of what is in them. What stands in the store is only read; a
test that changes a directory copies it first, and the end of a run checks that nobody forgot.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "EDGESPEC_TESTS_SHARED"  # where the store stands; workers inherit it
_ours: list[Path] = []


def begin() -> None:
    """Make the store, unless the process that started this one has made it."""
    if VARIABLE not in os.environ:
        atexit.register(end)
        _ours.append(Path(tempfile.mkdtemp(prefix="edgespec-tests-")))
        os.environ[VARIABLE] = str(_ours[-1])
        os.environ["EDGESPEC_CACHE"] = str(_ours[-1] / "cache")


def end() -> None:
    """Remove the store, where `begin` of this process made it."""
    for path in _ours:
        shutil.rmtree(path)
        del os.environ[VARIABLE], os.environ["EDGESPEC_CACHE"]
    _ours.clear()


def made_once(key: object, make: Callable[[Path], object]) -> Path:
    """The directory that `make` fills, made by the first worker to ask for `key`.

    Keys are compared by their repr: it must say all that the content depends on.
    """
    begin()
    path = Path(os.environ[VARIABLE]) / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    with locked(path.with_suffix(".lock")):
        if not fingerprint_file(path).exists():
            shutil.rmtree(path, ignore_errors=True)  # of a maker that failed
            path.mkdir()
            make(path)
            fingerprint_file(path).write_text(json.dumps(fingerprint(path)))
    return path


def copied(make: Callable[..., Path]) -> Callable[..., Path]:
    """`make(path, ...)` that is run once for each set of arguments, and copied to every other path.
    What it writes must not depend on the path."""

    @functools.wraps(make)
    def made(path: str | Path, *args: object, **options: object) -> Path:
        key = (make.__module__, make.__name__, args, sorted(options.items()))
        source = made_once(key, lambda out: make(out, *args, **options))
        return shutil.copytree(source, path, dirs_exist_ok=True, copy_function=shutil.copyfile)

    return made


def changed() -> list[str]:
    """Files of the store that are not as they were when their directory was made.

    Empty in a worker, which does not own the store.
    """
    found = []
    for record in (record for store in _ours for record in store.glob("*.json")):
        path = record.with_suffix("")
        was, now = json.loads(record.read_text()), fingerprint(path)
        names = [name for name in was.keys() | now.keys() if was.get(name) != now.get(name)]
        found += [str(path / name) for name in sorted(names)]
    return found


def fingerprint(path: Path) -> dict[str, list[int]]:
    """Size and time of change of every file."""
    stats = {file: file.stat() for file in path.rglob("*") if file.is_file()}
    return {
        str(file.relative_to(path)): [stat.st_size, stat.st_mtime_ns]
        for file, stat in stats.items()
    }


def fingerprint_file(path: Path) -> Path:
    return path.with_suffix(".json")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
