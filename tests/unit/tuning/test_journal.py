"""What a stopped run leaves, and when the next one goes on with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.errors import OutputError
from edgespec.tuning.journal import RUN, TuneJournal

OF = {"engines": {"base": "a"}, "options": {"repeats": 3}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def kept(path: Path) -> None:
    with TuneJournal(path, OF) as journal:
        journal.put(RUN, "0 0 plain", [12.5])
        journal.put(RUN, "0 1 plain", [None])


def test_a_second_run_goes_on(path: Path) -> None:
    kept(path)
    with TuneJournal(path, OF) as journal:
        assert (journal.resumed, journal.other) == (2, False)
        assert journal.get(RUN, "0 0 plain") == [12.5]
        assert journal.get(RUN, "0 1 plain") == [None]
        assert journal.get(RUN, "0 2 plain") is None


def test_one_of_other_engines_or_options_is_begun_anew(path: Path) -> None:
    kept(path)
    with TuneJournal(path, OF | {"engines": {"base": "b"}}) as journal:
        assert (journal.resumed, journal.other) == (0, True)
    with TuneJournal(path, OF) as journal:
        assert journal.resumed == 0


@pytest.mark.parametrize("lost", range(1, 40, 3))
def test_a_killed_run_loses_its_last_line_alone(path: Path, lost: int) -> None:
    kept(path)
    path.write_bytes(path.read_bytes()[:-lost])
    with TuneJournal(path, OF) as journal:
        assert journal.get(RUN, "0 0 plain") == [12.5]
        journal.put(RUN, "0 3 plain", [1.0])
    with TuneJournal(path, OF) as journal:
        assert journal.get(RUN, "0 3 plain") == [1.0]
        assert journal.get(RUN, "0 0 plain") == [12.5]


def test_a_finished_run_leaves_none(path: Path) -> None:
    kept(path)
    with TuneJournal(path, OF) as journal:
        journal.remove()
    assert not path.exists()


@pytest.mark.parametrize("content", ["hello\n", '{"a": 1}\n', "[1]\n"])
def test_a_file_of_something_else_is_left_alone(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(OutputError) as refused:
        TuneJournal(path, OF)
    assert "is no journal of tune" in refused.value.what
    assert path.read_text() == content
