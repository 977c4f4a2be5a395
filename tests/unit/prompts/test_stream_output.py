"""Claims about stream_output.py: what is a stream, and that responses arrive there or are kept."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from edgespec.errors import OutputError
from edgespec.prompts import OutputStream, StreamOutput, stream_of

RESPONSES: list[dict[str, object]] = [{"output_text": "é" * 100_000}, {"output_text": "b"}]


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("-", 1),
        ("/dev/stdout", 1),
        ("/dev/stderr", 2),
        ("/dev/fd/7", 7),
        ("/proc/self/fd/12", 12),
        ("/dev/null", None),
    ],
)
def test_names_of_streams_are_known(path: str, number: int | None) -> None:
    stream = stream_of(Path(path))
    assert stream is not None
    assert stream.number == number


def test_files_are_no_streams(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    os.mkfifo(tmp_path / "pipe")
    names = ["there", "new", "-", "dev/stdout", "pipe", "there/below"]
    assert [stream_of(tmp_path / name) for name in names] == [None] * len(names)
    assert stream_of(None) is None


def test_all_bytes_arrive_in_order(tmp_path: Path) -> None:
    path = tmp_path / "redirected"
    number = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(number, b"first\n")
    with StreamOutput(OutputStream("it", number)) as output:
        for response in RESPONSES:
            output.add(response)
        output.finish(RESPONSES, "input.json")
    os.close(number)
    first, _, rest = path.read_text().partition("\n")
    assert first == "first"
    assert json.loads(rest) == {"input_file": "input.json", "responses": RESPONSES}
    assert [item.name for item in tmp_path.iterdir()] == ["redirected"]


def test_stream_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    number = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(OutputError, match="open for reading only"):
        OutputStream("it", number).check()
    os.close(number)
    with pytest.raises(OutputError, match="Bad file descriptor"):
        OutputStream("it", number).check()


def test_responses_that_a_full_device_refuses_are_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stream = stream_of(Path("/dev/full"))
    assert stream is not None
    with pytest.raises(OutputError, match="No space left") as caught:
        StreamOutput(stream).finish(RESPONSES, "input.json")
    (kept,) = tmp_path.iterdir()
    assert str(kept) in caught.value.what
    assert json.loads(kept.read_text())["responses"] == RESPONSES
