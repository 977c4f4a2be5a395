"""The cache of `edgespec run`: where it is, whole entries or none, locks, what prune removes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from edgespec.artifacts import atomic, provenance
from edgespec.checkpoint.files import open_checkpoint
from edgespec.cli.cache import is_chosen
from edgespec.errors import BundleError, OutputError
from edgespec.pipeline import cache
from edgespec.pipeline.cache import DAY_S, Busy, Cache, key_of
from tests import gguf_files, toys

KEY, OTHER = key_of({"a": 1}), key_of({"a": 2})
ABOUT = {"target": "org/model", "method": None}


@pytest.fixture
def kept(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def fill(kept: Cache, key: str = KEY, **about: object) -> Path:
    with kept.locked(key), kept.fill(key, ABOUT | about) as staging:
        (staging / "engine").mkdir()
        (staging / "engine" / "data").write_bytes(b"12345")
    return kept.entries_dir / key


def is_busy(kept: Cache) -> bool:
    try:
        with kept.locked(KEY):
            return False
    except Busy:
        return True


def dead_pid() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"EDGESPEC_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"EDGESPEC_CACHE": "~/a"}, "~/a"),
        ({"EDGESPEC_CACHE": "a"}, str(Path("a").absolute())),
        ({"EDGESPEC_CACHE": "", "XDG_CACHE_HOME": "/b"}, "/b/edgespec"),
        ({"XDG_CACHE_HOME": "relative"}, "~/.cache/edgespec"),
        ({}, "~/.cache/edgespec"),
    ],
)
def test_root_follows_the_environment(
    environ: dict[str, str], root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("EDGESPEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert atomic.user_cache() == Path(root).expanduser()


def test_key_does_not_depend_on_order_and_depends_on_all_values() -> None:
    assert key_of({"a": 1, "b": [2, None]}) == key_of({"b": [2, None], "a": 1})
    assert len({key_of(parts) for parts in ({"a": 1}, {"a": "1"}, {"a": None}, {"b": 1}, {})}) == 5


def test_entry_is_there_with_its_description(kept: Cache) -> None:
    path = fill(kept)
    assert kept.about(KEY) == ABOUT
    assert (kept.engine_dir(KEY) / "data").read_bytes() == b"12345"
    (entry,) = kept.entries()
    assert (entry.key, entry.path, entry.is_finished, entry.about) == (KEY, path, True, ABOUT)
    assert entry.size_bytes == 5 + (path / "entry.json").stat().st_size
    assert (kept.root / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BundleError("x"), RuntimeError("x")])
def test_failed_block_leaves_no_entry(kept: Cache, error: BaseException) -> None:
    def fail(staging: Path) -> None:
        (staging / "data").write_bytes(b"12345")
        raise error

    with pytest.raises(type(error)), kept.locked(KEY), kept.fill(KEY, ABOUT) as staging:
        fail(staging)
    assert list(kept.entries_dir.iterdir()) == []


def test_full_disk_is_told_with_the_place_and_the_ways_out(kept: Cache) -> None:
    with pytest.raises(OutputError) as error, kept.fill(KEY, ABOUT) as staging:
        raise OSError(28, "No space left on device", str(staging / "engine"))
    assert str(kept.root) in error.value.what
    assert "No space left on device" in error.value.what
    assert "EDGESPEC_CACHE" in error.value.remedy
    assert "edgespec cache prune" in error.value.remedy
    assert kept.entries() == []


def test_too_little_room_is_refused_before_work(
    kept: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 2_000_000

    monkeypatch.setattr("shutil.disk_usage", lambda place: Usage())
    kept.check_room(2_000_000)
    with pytest.raises(OutputError, match=r"at least 2\.1 MB are needed, and 2\.0 MB are free"):
        kept.check_room(2_100_000)


def test_cache_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="EDGESPEC_CACHE"):
        Cache(tmp_path / "file").make_root()


# ---- starts


def test_start_is_known_again(kept: Cache) -> None:
    assert kept.started("00") is None
    kept.remember("00", KEY)
    assert kept.started("00") == KEY


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"entry": 5}', '{"entry": "../x"}'])
def test_damaged_start_is_no_start(kept: Cache, text: str) -> None:
    kept.remember("00", KEY)
    (kept.starts_dir / "00.json").write_text(text)
    assert kept.started("00") is None


# ---- locks


def test_lock_is_for_one_unless_shared(kept: Cache) -> None:
    with kept.locked(KEY):
        for shared in (False, True):
            with pytest.raises(Busy), kept.locked(KEY, shared=shared):
                pass
        with kept.locked(OTHER):
            pass
    with kept.locked(KEY, shared=True), kept.locked(KEY, shared=True):
        assert is_busy(kept)
    assert not is_busy(kept)


def test_second_one_says_that_it_waits_and_then_has_the_lock(kept: Cache) -> None:
    waits, order = threading.Event(), []

    def second() -> None:
        with kept.locked(KEY, waiting=waits.set):
            order.append("second")

    thread = threading.Thread(target=second)
    with kept.locked(KEY):
        thread.start()
        assert waits.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_lock_file_that_was_removed_meanwhile_is_not_taken_for_the_lock(kept: Cache) -> None:
    """Else one process holds a file that is gone, and the next one a new file."""
    waits, order = threading.Event(), []
    path = kept.root / "locks" / f"{KEY}.lock"

    def second() -> None:
        with kept.locked(KEY, waiting=waits.set):
            order.append(path.exists())

    thread = threading.Thread(target=second)
    with kept.locked(KEY):
        thread.start()
        assert waits.wait(10)
        path.unlink()
    thread.join(10)
    assert order == [True]


# ---- pruning


def test_entries_come_by_their_last_use(kept: Cache) -> None:
    for key, days in ((KEY, 3), (OTHER, 1)):
        path = fill(kept, key) / "entry.json"
        past = path.stat().st_mtime - days * DAY_S
        os.utime(path, (past, past))
    assert [entry.key for entry in kept.entries()] == [OTHER, KEY]
    kept.touch(KEY)
    first, second = kept.entries()
    assert first.key == KEY
    assert second.age_days(second.used_s + 1.5 * DAY_S) == pytest.approx(1.5)


def test_pruned_entry_takes_its_starts_and_its_lock_along(kept: Cache) -> None:
    fill(kept)
    fill(kept, OTHER)
    kept.remember("00", KEY)
    kept.remember("01", OTHER)
    entry = next(entry for entry in kept.entries() if entry.key == KEY)
    assert kept.prune(entry)
    assert [entry.key for entry in kept.entries()] == [OTHER]
    assert (kept.started("00"), kept.started("01")) == (None, OTHER)
    assert not (kept.root / "locks" / f"{KEY}.lock").exists()


def test_entry_in_use_stays(kept: Cache) -> None:
    fill(kept)
    (entry,) = kept.entries()
    with kept.locked(KEY, shared=True):
        assert not kept.prune(entry)
    assert kept.engine_dir(KEY).is_dir()
    assert kept.prune(entry)


def test_gguf_files_and_rounded_layers_are_entries_and_stay_while_they_are_used(
    kept: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(kept.root))
    gguf_files.write(toys.make_base(tmp_path / "hf", layers=1), tmp_path / "m.gguf")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    (kept.root / "gptq" / KEY).mkdir(parents=True)
    entries = {entry.kind: entry for entry in kept.entries()}
    assert entries["gguf"].about["target"] == str(tmp_path / "m.gguf")
    assert entries["gguf"].size_bytes > 1000
    assert not kept.prune(entries["gguf"])
    now = time.time()
    assert not any(is_chosen(kept, entry, now, None, False) for entry in entries.values())
    (tmp_path / "m.gguf").rename(tmp_path / "gone.gguf")
    assert is_chosen(kept, entries["gguf"], now, None, False)
    path = checkpoint.path
    del checkpoint
    gc.collect()
    assert kept.prune(entries["gguf"])
    assert kept.prune(entries["gptq"])
    assert not path.exists()
    assert kept.entries() == []


def test_interrupted_removal_leaves_no_half_entry(
    kept: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(kept)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt), kept.locked(KEY):
        kept.remove(KEY)
    assert not (kept.entries_dir / KEY).exists()
    (entry,) = kept.entries()
    assert not entry.is_finished


def test_leftovers_of_killed_runs_go_and_those_of_living_ones_stay(kept: Cache) -> None:
    fill(kept)
    dead, living = (kept.entries_dir / f".{KEY}.tmp-{pid}" for pid in (dead_pid(), os.getppid()))
    dead.mkdir()
    living.mkdir()
    handle = os.open(living, os.O_RDONLY)
    atomic.hold(handle)  # as who writes it does
    unfinished = [entry for entry in kept.entries() if not entry.is_finished]
    assert sorted(kept.prune(entry) for entry in unfinished) == [False, True]
    os.close(handle)
    assert [entry.path for entry in kept.entries() if not entry.is_finished] == [living]
    assert kept.about(KEY) == ABOUT  # of the same key, and finished


def test_foreign_directories_are_no_entries(kept: Cache) -> None:
    fill(kept)
    (kept.entries_dir / "notes").mkdir()
    (kept.entries_dir / KEY / "entry.json").write_text("{")
    (entry,) = kept.entries()
    assert (entry.key, entry.is_finished) == (KEY, False)


def test_no_prompt_is_kept_in_a_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine outlives a conversation, and may be given away."""
    words: list[Any] = ["run", "m", "--prompt", "secret", "--system=secret", "--seed", "5"]
    monkeypatch.setattr("sys.argv", ["/x/edgespec", *words])
    command = provenance.provenance()["command"]
    assert "secret" not in json.dumps(command)
    assert command == ["edgespec", "run", "m", "--prompt", "...", "--system=...", "--seed", "5"]


def test_a_cache_that_others_may_have_filled_is_warned_of(
    kept: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept.warning() is None  # there is none
    kept.make_root()
    kept.root.chmod(0o775)  # as with a group of one's own
    assert kept.warning() is None
    kept.root.chmod(0o777)
    assert f"{kept.root}, and anybody may write to it" in str(kept.warning())
    kept.root.chmod(0o755)
    owner = kept.root.stat().st_uid
    monkeypatch.setattr("edgespec.pipeline.cache.ROOT_USER", -1)
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert f"it belongs to user {owner}" in str(kept.warning())
