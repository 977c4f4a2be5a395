"""What was finished survives: a kill, a full disk, an output path that became unwritable."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import pytest

from edgespec.errors import OutputError
from edgespec.prompts import Journal

RESPONSES: list[dict[str, object]] = [
    {"output_text": text, "request_idx": index}
    for index, text in enumerate(["one é", "two\n", "😀"])
]
ONE, TWO, THREE = RESPONSES


def read_lines(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "output.json"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """The kernel refuses to let any file of this process grow beyond: a full disk, half-written
    lines and all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_device(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_open", lambda: FileIO("/dev/full", "w"))


def failing(journal: Journal, *responses: dict[str, object]) -> OutputError:
    with pytest.raises(OutputError) as caught:
        journal.finish(responses, "input.json")
    return caught.value


def interrupt(journal: Journal, *responses: dict[str, object]) -> None:
    with journal:
        for response in responses:
            journal.add(response)
        raise KeyboardInterrupt


def test_each_response_is_on_disk_as_one_line_as_soon_as_it_is_added(output: Path) -> None:
    with Journal(output) as journal:
        assert names(output.parent) == ["output.json.partial.jsonl"]
        for count, response in enumerate(RESPONSES, 1):
            journal.add(response)
            assert read_lines(journal.path) == RESPONSES[:count]
            assert journal.path.read_bytes().count(b"\n") == count
        assert journal.path.name == "output.json.partial.jsonl"
        assert "é" in journal.path.read_text(encoding="utf-8")


def test_finished_output_replaces_the_journal(output: Path) -> None:
    with Journal(output) as journal:
        journal.add(ONE)
        assert journal.finish([ONE, TWO], "input.json") == output
        assert names(output.parent) == ["output.json"]
    assert names(output.parent) == ["output.json"]
    assert json.loads(output.read_text()) == {"input_file": "input.json", "responses": [ONE, TWO]}


def test_exception_leaves_the_journal_where_it_is(output: Path) -> None:
    journal = Journal(output)
    with pytest.raises(KeyboardInterrupt):
        interrupt(journal, ONE)
    assert read_lines(journal.path) == [ONE]


def test_journal_of_nothing_leaves_nothing(output: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt(Journal(output))
    with Journal(output) as journal, largest_file(0):
        journal.add(ONE)
        assert names(output.parent) == ["output.json.partial.jsonl"]
    assert names(output.parent) == []


def test_killed_run_leaves_whole_lines(output: Path) -> None:
    source = (
        "import os, signal, sys; from edgespec.prompts import Journal; journal ="
        " Journal(sys.argv[1])\nfor index in range(3): journal.add({'request_idx':"
        " index})\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", source, str(output)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert read_lines(Path(f"{output}.partial.jsonl")) == [
        {"request_idx": index} for index in range(3)
    ]


def test_journal_of_a_killed_run_is_left_alone_and_named(output: Path) -> None:
    stale = Path(f"{output}.partial.jsonl")
    stale.write_text('{"from": "before"}\n')
    with Journal(output) as journal:
        assert journal.leftover == stale
        journal.add(ONE)
        assert journal.path.name == "output.json.partial-2.jsonl"
        journal.finish([ONE], "input.json")
    assert names(output.parent) == ["output.json", stale.name]
    assert stale.read_text() == '{"from": "before"}\n'
    stale.unlink()
    assert Journal(output).leftover is None


def test_second_run_on_one_output_is_refused_while_the_first_goes_on(output: Path) -> None:
    with Journal(output) as first:
        with pytest.raises(OutputError, match="Another run writes"):
            Journal(output)
        first.add(ONE)
        with pytest.raises(OutputError, match="Another run writes"):
            Journal(output)
        assert read_lines(first.path) == [ONE]
        first.finish([ONE], "input.json")
    with Journal(output):
        assert names(output.parent) == ["output.json", "output.json.partial.jsonl"]


def test_two_runs_that_began_together_do_not_share_a_journal(output: Path) -> None:
    first, second = Journal(output), Journal(output)  # neither has its file yet
    with first, second:
        first.add(ONE)
        second.add(TWO)
        assert (read_lines(first.path), read_lines(second.path)) == ([ONE], [TWO])


def test_empty_journal_of_a_killed_run_is_no_leftover(output: Path) -> None:
    stale = Path(f"{output}.partial.jsonl")
    stale.touch()
    with Journal(output) as journal:
        assert (journal.leftover, journal.path) == (None, stale)


def test_journal_lies_beside_the_file_that_a_link_means(output: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(output)
    with Journal(link) as journal:
        journal.add(ONE)
        assert journal.path.parent == output.parent


def test_response_without_utf8_is_one_valid_line(output: Path) -> None:
    odd = {"error": "no file \udcff", "output_text": "a\u2028b\nc"}
    with Journal(output) as journal:
        journal.add(odd)
        journal.add(ONE)
        assert [json.loads(line) for line in journal.path.read_bytes().split(b"\n")[:-1]] == [
            odd,
            ONE,
        ]
        journal.finish([odd, ONE], "input.json")
    assert json.loads(output.read_bytes())["responses"] == [odd, ONE]


def test_value_that_is_not_json_is_our_mistake_and_spoils_no_line(output: Path) -> None:
    with Journal(output) as journal:
        journal.add(ONE)
        with pytest.raises(ValueError, match="not JSON compliant"):
            journal.add({"metrics": float("nan")})
        journal.add(TWO)
        assert read_lines(journal.path) == [ONE, TWO]


def test_full_disk_stops_no_run_and_leaves_whole_lines(output: Path) -> None:
    with Journal(output) as journal:
        journal.add(ONE)
        with largest_file(journal.path.stat().st_size + 5):
            journal.add(TWO)
        assert journal.failure is not None
        assert journal.failure.errno == errno.EFBIG
        assert read_lines(journal.path) == [ONE]
        journal.add(THREE)  # space is there again: nothing is missing, nothing out of order
        assert journal.failure is None
        assert read_lines(journal.path) == RESPONSES


def test_half_a_line_is_taken_away_on_leaving(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(output) as journal:
        journal.add(ONE)
        with largest_file(journal.path.stat().st_size + 5), monkeypatch.context() as patch:
            patch.setattr(journal, "_cut", lambda: None)
            journal.add(TWO)
        assert len(journal.path.read_bytes().splitlines()) == 2
    assert read_lines(journal.path) == [ONE]


def test_unwritable_output_keeps_the_journal_and_says_where(output: Path, elsewhere: Path) -> None:
    with Journal(output) as journal:
        journal.add(ONE)
        journal.add(TWO)
        output.mkdir()
        error = failing(journal, ONE, TWO)
    assert f"{output} is a directory. The responses are kept in {journal.path}" in error.what
    assert "Nothing needs to run again" in error.remedy
    assert read_lines(journal.path) == [ONE, TWO]
    assert names(elsewhere) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_output_that_the_disk_refuses_keeps_the_journal(
    number: int, output: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with Journal(output) as journal:
        journal.add(ONE)
        monkeypatch.setattr("os.fsync", refuse)
        error = failing(journal, ONE)
    assert os.strerror(number) in error.what
    assert str(journal.path) in error.what
    assert names(output.parent) == [journal.path.name]
    assert read_lines(journal.path) == [ONE]
    assert names(elsewhere) == []


def test_what_the_journal_missed_is_tried_once_more_at_the_end(
    output: Path, elsewhere: Path
) -> None:
    with Journal(output) as journal:
        with largest_file(10):
            journal.add(ONE)
        output.mkdir()
        error = failing(journal, ONE)
    assert str(journal.path) in error.what
    assert read_lines(journal.path) == [ONE]
    assert names(elsewhere) == []


def test_without_a_journal_the_whole_output_is_kept_where_temporary_files_go(
    output: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(output)
    full_device(journal, monkeypatch)
    with journal:
        journal.add(ONE)
        assert journal.failure is not None
        assert journal.failure.errno == errno.ENOSPC
        output.mkdir()
        error = failing(journal, ONE, TWO)
    (kept,) = elsewhere.iterdir()
    assert f"The responses are kept in {kept}" in error.what
    assert json.loads(kept.read_text()) == {"input_file": "input.json", "responses": [ONE, TWO]}
    assert kept.stat().st_mode & 0o077 == 0


def test_journal_that_is_short_of_a_response_is_not_called_whole(
    output: Path, elsewhere: Path
) -> None:
    with Journal(output) as journal:
        journal.add(ONE)
        output.mkdir()
        error = failing(journal, ONE, TWO)
    (kept,) = elsewhere.iterdir()
    assert str(kept) in error.what
    assert read_lines(journal.path) == [ONE]


def test_journal_that_was_removed_is_not_said_to_hold_anything(
    output: Path, elsewhere: Path
) -> None:
    with Journal(output) as journal:
        journal.add(ONE)
        journal.path.unlink()
        output.parent.rmdir()
        error = failing(journal, ONE)
    (kept,) = elsewhere.iterdir()
    assert str(kept) in error.what
    assert str(journal.path) not in error.what


def test_when_nothing_can_be_saved_it_is_said(output: Path, elsewhere: Path) -> None:
    with Journal(output) as journal:
        output.mkdir()
        with largest_file(10):
            journal.add(ONE)
            error = failing(journal, ONE)
    assert "could not be saved anywhere else: File too large" in error.what
    assert "are kept" not in error.what
    assert names(elsewhere) == []
    assert names(output.parent) == ["output.json"]


def test_part_that_is_in_the_journal_is_named_when_the_rest_is_lost(
    output: Path, elsewhere: Path
) -> None:
    with Journal(output) as journal:
        output.mkdir()
        journal.add(ONE)
        with largest_file(journal.path.stat().st_size):
            journal.add(TWO)
            error = failing(journal, ONE, TWO)
    assert f"The first 1 are kept in {journal.path}" in error.what
    assert read_lines(journal.path) == [ONE]


def test_name_too_long_for_a_journal_costs_the_journal_only(output: Path) -> None:
    output = output.with_name("x" * 245 + ".json")
    with Journal(output) as journal:
        journal.add(ONE)
        assert journal.failure is not None
        assert journal.finish([ONE], "input.json") == output
    assert names(output.parent) == [output.name]
