"""Files below the directories that may be read, and nothing outside them."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path

import pytest

from edgespec.errors import RequestError
from edgespec.images import files
from edgespec.images.files import read


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of an input file; beside it an empty working directory, and a secret."""
    (tmp_path / "work").mkdir()
    (tmp_path / "inputs" / "deep").mkdir(parents=True)
    (tmp_path / "inputs" / "a.png").write_bytes(b"a")
    (tmp_path / "inputs" / "deep" / "b.png").write_bytes(b"b")
    (tmp_path / "secret.png").write_bytes(b"secret")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "inputs"


def found(
    name: str, directory: Path | None, *roots: Path, max_bytes: int = 100, also_work: bool = False
) -> bytes:
    shown = f'"{name}"'
    return read(name, shown, directory, roots, max_bytes, also_working_directory=also_work)


def refusal(name: str, directory: Path | None, *roots: Path, also_work: bool = False) -> str:
    with pytest.raises(RequestError) as caught:
        found(name, directory, *roots, also_work=also_work)
    assert caught.value.remedy
    return caught.value.what


def test_paths_begin_at_the_directory_of_the_input(inputs: Path) -> None:
    assert found("a.png", inputs) == b"a"
    assert found("deep/b.png", inputs) == b"b"
    assert found("./deep/../a.png", inputs) == b"a"
    assert found(str(inputs / "a.png"), inputs) == b"a"


def test_without_an_input_file_they_begin_at_the_working_directory(inputs: Path) -> None:
    Path("c.png").write_bytes(b"c")
    assert found("c.png", None) == b"c"
    assert "is not there" in refusal("a.png", None)
    assert "outside" in refusal(str(inputs / "a.png"), None)


def test_the_working_directory_is_not_read_unasked(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("c.png").write_bytes(b"c")
    assert "is not there" in refusal("c.png", inputs)
    monkeypatch.chdir("/")
    assert "is not there" in refusal(str(inputs.parent / "secret.png")[1:], inputs)


def test_a_missing_path_is_not_there_however_it_is_written(inputs: Path) -> None:
    for name in ("x.png", str(inputs / "x.png")):
        assert "is not there" in refusal(name, inputs, also_work=True)


def test_a_file_of_the_working_directory_is_read_with_a_warning(
    inputs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path("c.png").write_bytes(b"c")
    Path("a.png").write_bytes(b"of the working directory")
    with caplog.at_level(logging.WARNING):
        assert found("a.png", inputs, also_work=True) == b"a"  # beside the input file comes first
        assert caplog.messages == []
        assert found("c.png", inputs, also_work=True) == b"c"
    said = 'image "c.png" is not beside the input file: read from the working directory'
    assert caplog.messages == [said]


def test_the_working_directory_is_not_left_either(inputs: Path) -> None:
    Path("link.png").symlink_to(inputs.parent / "secret.png")
    assert "outside" in refusal("link.png", inputs, also_work=True)
    assert "outside" in refusal("../secret.png", inputs, also_work=True)
    Path("c.png").write_bytes(b"c")
    whole = str(Path("c.png").absolute())
    assert "outside" in refusal(whole, inputs, also_work=True)  # for relative names alone


@pytest.mark.parametrize(
    "name", ["../secret.png", "deep/../../secret.png", "../inputs/../secret.png", "/etc/hostname"]
)
def test_what_is_outside_is_refused_whether_it_is_there_or_not(inputs: Path, name: str) -> None:
    said = refusal(name, inputs)
    assert said.endswith("is outside the directories that may be read.")
    assert refusal(f"{name}x", inputs).endswith("is outside the directories that may be read.")


def test_a_root_allows_its_own_files(inputs: Path) -> None:
    other = inputs.parent / "other"
    other.mkdir()
    (other / "c.png").write_bytes(b"c")
    assert "outside" in refusal(str(other / "c.png"), inputs)
    assert found(str(other / "c.png"), inputs, other) == b"c"
    assert found("../other/c.png", inputs, other) == b"c"
    assert found("../secret.png", inputs, inputs.parent) == b"secret"
    twin = inputs.parent / "other2"
    twin.mkdir()
    (twin / "c.png").write_bytes(b"c")
    assert "outside" in refusal(str(twin / "c.png"), inputs, other)  # a name that begins alike


def test_links_inside_are_followed_and_those_that_lead_out_are_refused(inputs: Path) -> None:
    (inputs / "in.png").symlink_to("deep/b.png")
    (inputs / "out.png").symlink_to("../secret.png")
    (inputs / "up").symlink_to("..")
    (inputs / "two.png").symlink_to("out.png")
    assert found("in.png", inputs) == b"b"
    assert "outside" in refusal("out.png", inputs)
    assert "outside" in refusal("up/secret.png", inputs)
    assert "outside" in refusal("two.png", inputs)
    assert found("up/inputs/a.png", inputs) == b"a"


def test_a_root_behind_a_link_is_a_root(inputs: Path) -> None:
    (inputs.parent / "link").symlink_to("inputs")
    assert found("a.png", inputs.parent / "link") == b"a"
    assert found(str(inputs / "a.png"), inputs.parent / "link") == b"a"


def test_a_link_that_leads_nowhere_or_to_itself_is_refused(inputs: Path) -> None:
    (inputs / "gone.png").symlink_to("missing.png")
    (inputs / "loop.png").symlink_to("loop.png")
    assert "is not there" in refusal("gone.png", inputs)
    assert "cannot be read" in refusal("loop.png", inputs)


def test_what_is_no_regular_file_is_refused_and_not_waited_for(inputs: Path) -> None:
    os.mkfifo(inputs / "pipe.png")
    listener = socket.socket(socket.AF_UNIX)
    os.chdir(inputs)  # the name of a socket is short
    listener.bind("socket.png")
    for name in ("pipe.png", "socket.png", "deep", ".", "deep/"):
        assert "is not a regular file" in refusal(name, inputs)
    assert "is not a regular file" in refusal("/dev/zero", inputs, Path("/dev"))
    listener.close()


def test_a_working_directory_that_was_removed_is_none(inputs: Path) -> None:
    Path.cwd().rmdir()
    assert found("a.png", inputs) == b"a"
    assert "is not there" in refusal("c.png", inputs, also_work=True)
    assert "is not there" in refusal("c.png", None)


def test_names_that_are_no_paths_are_refused(inputs: Path) -> None:
    assert "cannot be read" in refusal("a" * 4000, inputs)
    assert "is not there" in refusal("a.png/b.png", inputs)


def test_a_file_is_read_no_further_than_its_limit(inputs: Path) -> None:
    (inputs / "long.png").write_bytes(bytes(1000))
    assert len(found("long.png", inputs, max_bytes=100)) == 101


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(inputs: Path) -> None:
    (inputs / "a.png").chmod(0)
    assert "cannot be read: Permission denied" in refusal("a.png", inputs)


@pytest.mark.parametrize("has_proc", [True, False])
def test_a_directory_that_becomes_a_link_in_between_gives_nothing_away(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, has_proc: bool
) -> None:
    """Between the check of a path and its opening another program may exchange a directory."""
    if has_proc and not Path("/proc/self/fd").is_dir():
        pytest.skip("no /proc here")
    (inputs.parent / "b.png").write_bytes(b"secret")
    real_open, real_readlink = files.open_regular, os.readlink

    def exchanged(path: Path) -> object:
        (inputs / "deep").rename(inputs / "moved")
        (inputs / "deep").symlink_to("..")
        return real_open(path)

    def no_proc(path: str) -> str:
        if path.startswith("/proc/"):
            raise FileNotFoundError(path)
        return real_readlink(path)

    monkeypatch.setattr(files, "open_regular", exchanged)
    if not has_proc:
        monkeypatch.setattr(os, "readlink", no_proc)
    assert "outside" in refusal("deep/b.png", inputs)


def test_no_file_outside_is_opened(inputs: Path) -> None:
    """By the interpreter's own report of what is opened."""
    opened: list[str] = []
    is_on = [True]

    def hook(event: str, args: tuple[object, ...]) -> None:
        if is_on[0] and event == "open" and not isinstance(args[0], int):
            opened.append(str(args[0]))

    sys.addaudithook(hook)
    (inputs / "out.png").symlink_to("../secret.png")
    for name in ("../secret.png", "out.png", str(inputs.parent / "secret.png"), "/dev/zero"):
        refusal(name, inputs)
    assert found("a.png", inputs) == b"a"
    is_on[0] = False
    assert [Path(path).name for path in opened] == ["a.png"]
