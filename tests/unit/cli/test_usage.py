"""Command lines that cannot be understood: exit code 2, what is wrong, and where help is; nothing
is read and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.cli.main import run

EXPORT = ["export", "base", "out"]
BUILD = ["build", "--onnx-dir", "onnx", "--engine-dir", "engine"]
INFER = ["infer", "--engine-dir", "engine", "--input-file", "in.json", "--output-file", "out.json"]

MISUSED: dict[str, tuple[list[str], list[str]]] = {
    "unknown flag": ([*EXPORT, "--eagle-bass"], ["--eagle-bass"]),
    "unknown command": (["exprot"], ["exprot"]),
    "missing argument": (["export", "base"], ["OUT"]),
    "aux layers that are no numbers": (
        [*EXPORT, "--eagle-base", "--aux-layers", "two,4"],
        ["two,4", "--aux-layers"],
    ),
    "both of a pair": ([*BUILD, "--spec-base", "--spec-draft"], ["--spec-base", "--spec-draft"]),
    "check without drafts": ([*INFER, "--check-lossless"], ["--spec-decode"]),
    "top-k without drafts": ([*INFER, "--spec-draft-top-k", "2"], ["--spec-decode"]),
    "step without drafts": ([*INFER, "--spec-draft-step", "2"], ["--spec-decode"]),
    "verify size without drafts": ([*INFER, "--spec-verify-size", "2"], ["--spec-decode"]),
    "tree without drafts": ([*INFER, "--eagle-choices", "[[0]]"], ["--spec-decode"]),
    "dynamic tree without drafts": (
        [*INFER, "--eagle-use-dynamic-tree", "--eagle-dynamic-tree-max-top-k", "2"],
        ["--spec-decode"],
    ),
    "tree and sizes": (
        [*INFER, "--spec-decode", "--eagle-choices", "[[0]]", "--spec-draft-step", "2"],
        ["--eagle-choices", "--spec-draft-step"],
    ),
    "levels that are none": (
        [*INFER, "--spec-decode", "--num-eagle-layers", "0"],
        ["--num-eagle-layers"],
    ),
    "step that is no number": (
        [*INFER, "--spec-decode", "--spec-draft-step", "many"],
        ["many", "--spec-draft-step"],
    ),
}


@pytest.mark.parametrize("case", MISUSED)
def test_line_that_cannot_be_understood(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: str,
) -> None:
    line, words = MISUSED[case]
    monkeypatch.chdir(tmp_path)
    assert run(line) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for word in ("--help", "Error: ", *words):
        assert word in err
    assert list(tmp_path.iterdir()) == []
