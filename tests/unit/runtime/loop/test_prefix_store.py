"""A file of a prefix is what was written, for whom it was written, or it is not used; nothing that
is wrong with files is an error of whoever asks."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgespec.backends.base import PacksRows
from edgespec.backends.ort.lane_rows import LayerState, OrtLaneRows
from edgespec.backends.ort.runner import OrtRunner
from edgespec.errors import EnvironmentProblem, OptionError
from edgespec.runtime.loop import prefix_store
from edgespec.runtime.loop.prefix import Prefix, PrefixCache
from edgespec.runtime.loop.prefix_store import PrefixStore

LONG = [*range(100, 200)]


class Rows(PacksRows):
    pack, unpack = OrtRunner.pack, OrtRunner.unpack  # type: ignore[assignment]


def opened(path: Path, *, budget: int = 10**6, engine: str = "e", croppable: bool = True) -> Any:
    base: Any = SimpleNamespace(runner=Rows(), croppable=croppable)
    return PrefixStore(path, engine, PrefixCache(budget), base, None)


def prefix(key: Sequence[int], salt: str = "") -> Prefix:
    """Of 32 bytes a token."""
    kv = np.random.default_rng(list(key)).random((2, 1, len(key), 4), np.float32)
    return Prefix(np.array(key, np.int64), OrtLaneRows(kv), salt=salt)


def kept(path: Path, *keys: Sequence[int], salt: str = "") -> list[Path]:
    """The files of some prefixes, once the engine that read them is closed."""
    store = opened(path)
    for key in keys:
        store.cache.keep(prefix(key, salt))
    store.close()
    return sorted(path.iterdir())


def found(store: Any, prompt: Sequence[int], salt: str = "") -> int:
    """How much of a prompt memory has once it was fetched."""
    store.fetch(prompt, None, salt)
    return max(store.cache.lengths(prompt, None, salt), default=0)


def test_the_longest_is_found_again_bit_for_bit(tmp_path: Path) -> None:
    files = kept(tmp_path / "new", [*LONG[:30], 7], [*LONG[:60], 1, 2, 3])
    assert [path.stat().st_mode & 0o777 for path in (*files, tmp_path / "new")] == [
        *(0o600, 0o600, 0o700)
    ]
    store = opened(tmp_path / "new")
    assert found(store, LONG) == 60
    (entry,) = store.cache.entries
    assert entry.base.kv.tobytes() == prefix([*LONG[:60], 1, 2, 3]).base.kv.tobytes()
    assert found(store, [5, *LONG]) == 0
    assert found(opened(tmp_path / "new", budget=1000), LONG) == 30  # what memory has room for


def test_what_is_little_of_a_prefix_is_not_read(tmp_path: Path) -> None:
    kept(tmp_path, [*range(1000)])
    store = opened(tmp_path)
    for length, reused in ((31, 0), (32, 32)):
        assert found(store, [*range(length), 7777]) == reused


def test_a_state_is_found_whole_or_not_at_all(tmp_path: Path) -> None:
    store = opened(tmp_path, croppable=False)
    state = LayerState(*np.random.default_rng(1).random((3, 2, 3, 5), np.float32))
    rows = OrtLaneRows(np.zeros((0, 1, 50, 4), np.float32), state)
    store.cache.keep(Prefix(np.array(LONG[:50]), rows, croppable=False))
    store.close()
    again = opened(tmp_path, croppable=False)
    assert (found(again, LONG[:40]), found(again, LONG)) == (0, 50)
    assert np.array_equal(again.cache.entries[0].base.state.pending, state.pending)


def test_other_engines_and_other_salts_find_nothing(tmp_path: Path) -> None:
    (path,) = kept(tmp_path, LONG, salt="mine")
    assert found(opened(tmp_path), LONG, "mine") == 99
    assert found(opened(tmp_path), LONG, "yours") == found(opened(tmp_path), LONG) == 0
    assert found(opened(tmp_path, engine="other"), LONG, "mine") == 0
    assert path.exists()


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "spoil",
    [
        *(flipped(at) for at in (3, 20, 400, 1500, -40, -1)),
        *(lambda data, end=end: data[:end] for end in (0, 5, 300, 2000, -1)),
        lambda data: data + b"0",
    ],
)
def test_a_damaged_file_is_not_used_and_goes(
    tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    (path,) = kept(tmp_path, LONG)
    reads = opened(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    for store in (reads, opened(tmp_path)):  # it was good when the first one was opened
        assert found(store, LONG) == 0
        assert found(store, [*LONG, 7]) == 0
    assert not path.exists()


def test_a_file_under_anothers_name_is_not_used(tmp_path: Path) -> None:
    (yours,) = kept(tmp_path / "a", LONG, salt="yours")
    (mine,) = kept(tmp_path / "b", LONG, salt="mine")
    yours.replace(mine)
    assert found(opened(tmp_path / "b"), LONG, "mine") == 0


def test_what_killed_processes_leave_goes_and_what_others_write_stays(tmp_path: Path) -> None:
    (path,) = kept(tmp_path, LONG)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead = tmp_path / f".{path.name}.tmp-{ended.pid}"
    foreign = tmp_path / ".notes.tmp-1"
    for half in (dead, foreign):
        half.write_bytes(path.read_bytes()[:100])
    opened(tmp_path)
    assert sorted(tmp_path.iterdir()) == [foreign, path]


def test_a_full_disk_loses_the_prefix_and_is_said_once(tmp_path: Path) -> None:
    store, said = opened(tmp_path), list[str]()
    store.said = said.append
    store.cache.keep(prefix(LONG))
    store.cache.keep(prefix(LONG[50:]))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # in the middle of each file
    try:
        store.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [*tmp_path.iterdir()] == []
    (line,) = said
    assert "File too large" in line


def test_the_least_recently_used_go_of_whatever_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file has 32 bytes a token for the rows, 8 for the key, and a header."""
    (other,) = kept(tmp_path, LONG)
    os.utime(other, (1, 1))
    store = opened(tmp_path, budget=3300, engine="mine")
    keys = [[n, *LONG[:99]] for n in range(14)]
    for n, key in enumerate(keys):
        store.write(prefix(key))
        for path in store.index:
            if store.index[path].cache_key[0] == n:
                os.utime(path, (n + 2, n + 2))
    there = {int(one.cache_key[0]) for one in store.index.values()}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 16 * 3300
    assert there == set(range(14 - len(there), 14))
    assert 9 < len(there) < 14
    assert not other.exists()
    monkeypatch.setattr(prefix_store, "MAX_FILES", len(there))
    oldest = 14 - len(there)
    assert found(store, keys[oldest]) == 99
    store.write(prefix([77, *LONG[:9]]))
    assert {int(one.cache_key[0]) for one in store.index.values()} == {
        *(there - {oldest + 1}),
        77,
    }


def test_what_memory_has_no_room_for_is_written_and_read_again_and_not_written_twice(
    tmp_path: Path,
) -> None:
    store = opened(tmp_path, budget=3300)
    store.cache.keep(prefix(LONG))
    store.cache.keep(prefix(LONG[::-1]))  # the first one goes
    store.writer.shutdown()
    (path,) = tmp_path.iterdir()
    before = path.stat().st_ino
    assert found(store, LONG) == 99
    store.close()
    assert path.stat().st_ino == before


def test_what_a_longer_one_serves_goes(tmp_path: Path) -> None:
    kept(tmp_path, LONG[:50])
    assert len(kept(tmp_path, LONG[:80])) == 1
    assert len(kept(tmp_path, LONG[:50])) == 1
    assert found(opened(tmp_path), LONG) == 80


def test_what_cannot_be_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="memory keeps no prefixes"):
        opened(tmp_path, budget=0)
    device: Any = SimpleNamespace(runner=object(), croppable=True)
    with pytest.raises(OptionError, match="on the device alone"):
        PrefixStore(tmp_path, "e", PrefixCache(1), device, None)
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem, match="cannot be used"):
        opened(tmp_path / "file")
    tmp_path.chmod(0o777)
    with pytest.raises(EnvironmentProblem, match="by other users"):
        opened(tmp_path)
