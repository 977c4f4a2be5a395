"""Claims about atomic.py and hashes.py: several directories are written together or not at all, and
files that are not those of their manifest are refused by name."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from edgespec.artifacts import atomic, hashes, json_files
from edgespec.backends.build import staging_directory
from edgespec.contract import Role
from edgespec.errors import BundleError, OutputError


def write(path: Path) -> None:
    (path / "file").write_text("whole")


def test_all_targets_are_there_in_the_end(tmp_path: Path) -> None:
    targets = [tmp_path / "out" / "a", tmp_path / "out" / "b"]
    with atomic.staged_directories(*targets) as stagings:
        for staging in stagings:
            write(staging)
        assert not any(target.exists() for target in targets)
    assert [(target / "file").read_text() for target in targets] == ["whole", "whole"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a", "b"]


def test_failure_in_the_block_leaves_none(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic.staged_directories(tmp_path / "out" / "a", tmp_path / "out" / "b") as stagings:
            write(stagings[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not (tmp_path / "out").exists()


def test_a_copy_that_finds_no_room_is_told_by_what_is_written(tmp_path: Path) -> None:
    """Of the two names of a copy the source has all the room that it needs."""
    target = tmp_path / "out"
    for written in (tmp_path / "copy", tmp_path / f"{target.name}.tmp-1-abc" / "file"):
        error = OSError(errno.EFBIG, "File too large", "source", None, str(written))
        with pytest.raises(OutputError) as refused, atomic.writing(target):
            raise error
        named = target if ".tmp-" in str(written) else written
        assert refused.value.what == f"{named}: File too large"
        assert "ulimit -f" in refused.value.remedy


@pytest.mark.parametrize("failing", ["a", "b"])
@pytest.mark.parametrize("made_before", [True, False])
def test_one_that_cannot_move_in_takes_the_other_out_again(
    tmp_path: Path, failing: str, made_before: bool
) -> None:
    real, out = Path.replace, tmp_path / "out"
    if made_before:
        out.mkdir()

    def replace(self: Path, target: Path) -> Path:
        if target.name == failing:
            raise OSError(errno.ENOSPC, "full", str(target))
        return real(self, target)

    def move_in() -> None:
        with atomic.staged_directories(out / "a", out / "b") as stagings:
            for staging in stagings:
                write(staging)

    with mock.patch.object(Path, "replace", replace), pytest.raises(OutputError, match="full"):
        move_in()
    assert out.exists() == made_before
    assert not made_before or not any(out.iterdir())


@pytest.mark.parametrize("occupied", ["a", "b"])
def test_what_stands_in_the_way_stays(tmp_path: Path, occupied: str) -> None:
    (tmp_path / occupied).mkdir()
    write(tmp_path / occupied)
    with (
        pytest.raises(OutputError, match=f"{occupied} already exists"),
        atomic.staged_directories(tmp_path / "a", tmp_path / "b"),
    ):
        raise AssertionError
    assert (tmp_path / occupied / "file").read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == [occupied]


def test_new_parents_do_not_outlive_a_failure(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()

    def fail(*targets: Path) -> None:
        with atomic.staged_directories(*targets):
            raise KeyboardInterrupt

    for parent in (tmp_path / "new" / "newer", tmp_path / "there" / "new"):
        with pytest.raises(KeyboardInterrupt):
            fail(parent / "a", parent / "b")
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*")] == [Path("there")]


def unwritable(tmp_path: Path, kind: str) -> Path:
    """A path below which nothing can be made; tests may run as root, whom permissions do not
    bind."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    return {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "sub",
        "a link to nothing": tmp_path / "dangling",
    }[kind]


@pytest.mark.parametrize("kind", ["a file", "below a file", "a link to nothing"])
@pytest.mark.parametrize("staged", ["an export", "an engine"])
def test_place_where_nothing_can_be_made_is_named(tmp_path: Path, kind: str, staged: str) -> None:
    out = unwritable(tmp_path, kind)
    entered = (
        atomic.staged_directory(out / "llm")
        if staged == "an export"
        else staging_directory(out, Role.BASE)
    )
    with pytest.raises(OutputError) as caught, entered:
        raise AssertionError
    assert str(out) in caught.value.what
    assert caught.value.remedy
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["dangling", "file"]


# Two runs at once, and runs that were killed


def test_target_that_another_run_wrote_meanwhile_is_left_to_it(tmp_path: Path) -> None:
    def late() -> None:
        with atomic.staged_directory(tmp_path / "a") as staging:
            write(staging)
            (tmp_path / "a").mkdir()
            (tmp_path / "a" / "file").write_text("of the first")

    with pytest.raises(OutputError, match="Another run has written it meanwhile"):
        late()
    assert (tmp_path / "a" / "file").read_text() == "of the first"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_a_run_is_writing_is_not_taken_from_it(tmp_path: Path) -> None:
    def second() -> None:
        with atomic.staging_in(tmp_path, "a"):
            raise AssertionError

    with atomic.staging_in(tmp_path, "a") as staging:
        write(staging)
        with pytest.raises(OutputError, match="is being written by another run"):
            second()
        with atomic.staging_in(tmp_path, "b"):
            assert atomic.is_held(staging)
        assert (staging / "file").read_text() == "whole"
    assert list(tmp_path.iterdir()) == []


def test_what_killed_runs_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".a.json.tmp-1", ".a.json.tmp-99999999", ".b.json.tmp-1", "a.json.tmp-1"):
        (tmp_path / name).touch()
    (tmp_path / ".a.json.tmp-5").mkdir()
    write(tmp_path / ".a.json.tmp-5")
    atomic.replace_file(tmp_path / "a.json", b"new")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".b.json.tmp-1", "a.json", "a.json.tmp-1"]


def test_process_decides_where_a_file_system_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", none)
    for pid in (1, os.getpid(), 99999999):
        (tmp_path / f".a.tmp-{pid}").touch()
    held = [path.name for path in atomic.temporaries(tmp_path, "a") if atomic.is_held(path)]
    assert held == [".a.tmp-1"]


@pytest.mark.parametrize("length", [200, 255])
def test_file_with_a_long_name_is_replaced_too(tmp_path: Path, length: int) -> None:
    path = tmp_path / ("x" * length)
    atomic.replace_file(path, b"whole")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"whole"]


def test_json_with_a_file_name_that_is_not_utf8_can_be_written(tmp_path: Path) -> None:
    json_files.write_json(tmp_path / "a.json", {"é": "\udcff"})
    assert json_files.read_json(tmp_path / "a.json") == {"é": "\udcff"}


# Files and their manifest


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A directory of two files, and their entries in its manifest."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"content of {name}")
    return tmp_path, hashes.file_entries(tmp_path)


def test_files_as_recorded_pass(recorded: tuple[Path, dict[str, Any]]) -> None:
    hashes.check_files(*recorded)
    hashes.check_files(*recorded, trust_unchanged=True)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_text("content of c"), "does not have the hash"),
        (lambda path: path.write_text("content"), "has 7 bytes, its manifest says 12"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
@pytest.mark.parametrize("name", ["a", "b"])
def test_file_that_is_not_as_recorded_is_named(
    recorded: tuple[Path, dict[str, Any]], damage: Callable[[Path], object], said: str, name: str
) -> None:
    directory, files = recorded
    damage(directory / name)
    with pytest.raises(BundleError, match=f"{directory / name} {said}") as caught:
        hashes.check_files(directory, files)
    assert "make" in caught.value.remedy


def test_only_the_recorded_time_spares_reading_a_file(
    recorded: tuple[Path, dict[str, Any]],
) -> None:
    directory, files = recorded
    path = directory / "a"
    path.write_text("content of c")
    files["a"]["mtime_ns"] = path.stat().st_mtime_ns
    hashes.check_files(directory, files, trust_unchanged=True)
    for trusting in (False, True):
        files["a"]["mtime_ns"] += trusting
        with pytest.raises(BundleError, match="does not have the hash"):
            hashes.check_files(directory, files, trust_unchanged=trusting)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "..", ".", "sub/a", ""])
def test_name_that_leads_out_of_the_directory_is_refused(
    recorded: tuple[Path, dict[str, Any]], name: str
) -> None:
    directory, files = recorded
    with pytest.raises(BundleError) as caught:
        hashes.check_files(directory, {name: files["a"]})
    assert repr(name) in caught.value.what
