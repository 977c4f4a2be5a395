"""That `output.json` is written whole or not at all, and that a bad path is told before any
work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.errors import OutputError
from edgespec.prompts import END_OF_SEQUENCE, check_writable, write_output


def test_output_is_readable_json_with_its_characters_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "output.json"
    write_output(path, "input.json", [{"output_text": "😀 né", "finish_reason": END_OF_SEQUENCE}])
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == {
        "input_file": "input.json",
        "responses": [{"output_text": "😀 né", "finish_reason": "end-of-sequence"}],
    }
    assert '\n    "responses"' in text
    assert "😀 né" in text
    assert [item.name for item in tmp_path.iterdir()] == ["output.json"]


def test_text_without_utf8_is_escaped_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "output.json"
    write_output(path, "in\udcff.json", [{"error": "no file a\udcff", "output_text": "é"}])
    assert json.loads(path.read_bytes()) == {
        "input_file": "in\ufffd.json",
        "responses": [{"error": "no file a\udcff", "output_text": "é"}],
    }


def test_failed_write_leaves_the_old_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "output.json"
    path.write_text("old")

    def disk_is_full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_is_full)
    with pytest.raises(OutputError, match="No space left"):
        write_output(path, "input.json", [])
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["output.json"]


def test_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_output(tmp_path / "link.json", "input.json", [])
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").is_file()


def test_writable_path_is_left_as_it_was(tmp_path: Path) -> None:
    check_writable(tmp_path / "output.json")
    assert list(tmp_path.iterdir()) == []


def test_path_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, said in [
        (tmp_path, "is a directory"),
        (tmp_path / "absent" / "output.json", "there is no directory"),
        (tmp_path / "file" / "output.json", "file"),
        (Path("/dev/null"), "not an ordinary file"),
        (
            Path("/proc/output.json"),
            "cannot be written",
        ),  # a directory where not even root may create a file
    ]:
        with pytest.raises(OutputError, match=said):
            check_writable(path)
    with pytest.raises(OutputError, match="not an ordinary file"):
        write_output("/dev/null", "input.json", [])


def test_read_only_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "output.json"
    path.write_text("old")
    path.chmod(0o444)
    (tmp_path / "link.json").symlink_to(path)
    for name in (path, tmp_path / "link.json"):
        with pytest.raises(OutputError, match="is read-only"):
            check_writable(name)
        with pytest.raises(OutputError, match="is read-only"):
            write_output(name, "input.json", [])
    assert path.read_text() == "old"


def test_what_a_killed_run_left_of_the_output_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".output.json.tmp-99999999").write_text('{"resp')
    write_output(tmp_path / "output.json", "input.json", [])
    assert [item.name for item in tmp_path.iterdir()] == ["output.json"]
