"""Claims about stored/regular.py: regular files are read up to a size, and nothing else waits or
goes on for ever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgespec.artifacts.json_files import read_json
from edgespec.errors import BundleError, RequestError
from edgespec.prompts.source import read_bytes
from edgespec.safe_read.regular import open_regular, read_regular


def test_a_file_and_a_link_to_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "file", 5) == read_regular(tmp_path / "link", 5) == b"12345"


def test_a_file_beyond_the_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_regular(tmp_path / "file", 4)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match="a pipe, not a regular file"):
            open_regular(tmp_path / name)


def test_a_device_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="a device, not a regular file"):
        open_regular(Path("/dev/zero"))
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


def test_each_reader_says_so_in_its_own_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BundleError, match="pipe cannot be read: it is a pipe"):
        read_json(tmp_path / "pipe")
    with pytest.raises(RequestError, match="pipe cannot be read: it is a pipe") as caught:
        read_bytes(tmp_path / "pipe")
    assert "regular file" in caught.value.remedy


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": ' * 5000, "1" * 5000])
def test_what_is_no_json_object_is_refused_by_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(BundleError, match=r"x\.json"):
        read_json(tmp_path / "x.json")
