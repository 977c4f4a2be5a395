"""Claims about paths.py: an empty name is no directory, and a name that no library opens is refused
at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.main import run

ODD = os.fsdecode(b"a\xffb")
COMMANDS: dict[str, list[str]] = {
    "engine-dir of infer": [
        *["infer", "--input-file", "a", "--output-file", "b", "--engine-dir"],
        "?",
    ],
    "engine-dir of chat": ["chat", "--engine-dir", "?"],
    "onnx-dir": ["build", "--onnx-dir", "?", "--engine-dir", "e"],
    "engine-dir of build": ["build", "--onnx-dir", "o", "--engine-dir", "?"],
    "model": ["export", "?", "out"],
    "out": ["export", "model", "?"],
    "base-model-dir": ["export", "model", "out", "--base-model-dir", "?"],
    "base of check": ["check", "?", "draft"],
    "draft of check": ["check", "base", "?"],
    "output-dir": [
        *["quantize", "llm", "--quantization", "fp8", "--model-dir", "m", "--output-dir"],
        "?",
    ],
    "model-dir": [
        *["quantize", "llm", "--quantization", "fp8", "--output-dir", "o", "--model-dir"],
        "?",
    ],
}
FILES = {
    "input-file": ["infer", "--engine-dir", "e", "--input-file", "?", "--output-file", "b"],
    "prompts": ["infer", "--engine-dir", "e", "--prompts", "?", "--output-file", "b"],
    "output-file": ["infer", "--engine-dir", "e", "--input-file", "a", "--output-file", "?"],
    "inspect": ["inspect", "?"],
}


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def given(line: list[str], value: str) -> int:
    return run([value if word == "?" else word for word in line])


@pytest.mark.parametrize("what", [*COMMANDS, *FILES])
def test_empty_name_is_not_the_directory_at_hand(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert given((COMMANDS | FILES)[what], "") == 2
    assert "it is empty: name a path" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", COMMANDS)
def test_directory_with_a_name_that_is_not_utf8_is_refused(
    tmp_path: Path, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ODD).mkdir()
    assert given(COMMANDS[what], ODD) == 2
    told = capfd.readouterr().err
    assert r"a\xffb is not UTF-8" in told
    assert "make a link to it" in told


@pytest.mark.parametrize("what", ["input-file", "prompts"])
def test_unreadable_file_is_refused_as_a_missing_one(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    os_open = os.open

    def locked(path: object, *how: int, **more: Any) -> int:
        if Path(str(path)).name == "file":
            raise PermissionError(13, "Permission denied", str(path))
        return os_open(str(path), *how, **more)

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may read everything
    monkeypatch.setattr(os, "open", locked)
    assert given(FILES[what], "file") == 3
    assert "file cannot be read: Permission denied" in capfd.readouterr().err
    assert given(FILES[what], "missing") == 3
