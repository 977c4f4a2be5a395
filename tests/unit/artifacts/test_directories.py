"""A path of the wrong kind is told by name, with the command that takes it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.artifacts.directories import DirectoryKind, below, kind_of
from edgespec.cli.main import run


def manifest(path: Path, kind: str, **more: object) -> Path:
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"format": 1, "kind": kind, **more}))
    return path


def missing(path: Path) -> Path:
    return path


def file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    return path


def empty(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def checkpoint(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def quantized(path: Path) -> Path:
    return manifest(path, "quantize")


def export(path: Path) -> Path:
    return manifest(path, "export")


def component(path: Path) -> Path:
    """A whole export, its graph included."""
    export(path)
    (path / "model.onnx").write_bytes(b"")
    return path


def exports(path: Path) -> Path:
    export(path / "base" / "llm")
    return path


def engines(path: Path) -> Path:
    return manifest(path, "engine", engines={})


def torn(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "spec_base.onnx").write_bytes(b"")
    (path / "config.json").write_text("{}")
    return path


def torn_of_another_backend(path: Path) -> Path:
    (torn(path) / "spec_base.onnx").rename(path / "spec_base.engine")
    return path


def other(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "notes.txt").write_text("x")
    return path


KINDS: dict[Callable[[Path], Path], DirectoryKind] = {
    missing: DirectoryKind.MISSING,
    file: DirectoryKind.FILE,
    empty: DirectoryKind.EMPTY,
    checkpoint: DirectoryKind.CHECKPOINT,
    quantized: DirectoryKind.CHECKPOINT,
    export: DirectoryKind.EXPORT,
    exports: DirectoryKind.UNKNOWN,
    engines: DirectoryKind.ENGINES,
    torn: DirectoryKind.UNKNOWN,
    other: DirectoryKind.UNKNOWN,
}


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_kind_of_a_path(make: Callable[[Path], Path], tmp_path: Path) -> None:
    assert kind_of(make(tmp_path / "it")) is KINDS[make]


@pytest.mark.parametrize("content", ["{", "[]", '{"kind": 7}', '{"kind": ["export"]}', "\x00"])
def test_manifest_that_is_not_ours_decides_nothing(content: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "it")
    (path / "manifest.json").write_text(content)
    assert kind_of(path) is DirectoryKind.CHECKPOINT


def test_pipe_is_no_directory_and_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert kind_of(tmp_path / "pipe") is DirectoryKind.FILE


def test_what_a_killed_run_left_is_not_offered(tmp_path: Path) -> None:
    export(tmp_path / ".llm.tmp-1")
    export(tmp_path / "base" / "llm")
    assert below(tmp_path, DirectoryKind.EXPORT) == [tmp_path / "base" / "llm"]


# What the path is -> what is said of it, and what to do; {it} is the path
ONNX_DIR = {
    missing: ("--onnx-dir {it} does not exist", "Give a directory that edgespec export wrote"),
    file: ("--onnx-dir {it} is a file", "Give its directory"),
    empty: ("--onnx-dir {it} is an empty directory", "edgespec export MODEL OUT"),
    checkpoint: ("--onnx-dir {it} is a checkpoint", "Export it first: edgespec export {it} OUT"),
    quantized: ("--onnx-dir {it} is a checkpoint", "Export it first: edgespec export {it} OUT"),
    exports: ("--onnx-dir {it} is not an export itself", "--onnx-dir {it}/base/llm"),
    engines: ("--onnx-dir {it} is an engine directory", "this one to --engine-dir"),
    other: ("--onnx-dir {it} is a directory of another kind", "that edgespec export wrote"),
}
ENGINE_DIR = {
    missing: ("{it} does not exist", "Give a directory that edgespec build made"),
    file: ("{it} is a file", "Give its directory"),
    empty: ("{it} is an empty directory", "edgespec build --onnx-dir OUT/llm"),
    checkpoint: ("{it} is a checkpoint", "edgespec export {it} OUT"),
    quantized: ("{it} is a checkpoint", "edgespec export {it} OUT"),
    export: ("{it} is an export", "Build it first: edgespec build --onnx-dir {it}"),
    component: ("{it} is an export", "Build it first: edgespec build --onnx-dir {it}"),
    exports: ("{it} holds exports", "edgespec build --onnx-dir {it}/base/llm"),
    engines: ("{it} has no llm engine", "Run edgespec export"),
    torn: ("{it} has engine files and no manifest.json", "run edgespec build again"),
    torn_of_another_backend: ("{it} has engine files and no", "run edgespec build again"),
    other: ("{it} is a directory of another kind", "that edgespec build made"),
}
MODEL = {
    export: ("{it} is an export, not a checkpoint", "edgespec build --onnx-dir {it}"),
    engines: ("{it} is an engine directory, not a checkpoint", "Give the model's checkpoint"),
}
COMMANDS = [
    *((f"build --onnx-dir {{it}} --engine-dir {{out}} {flag}", ONNX_DIR) for flag in ("",)),
    ("infer --engine-dir {it} --input-file {input} --output-file {out}", ENGINE_DIR),
    ("infer --engine-dir {it} --input-file {input} --output-file {out} --spec-decode", ENGINE_DIR),
    ("chat --engine-dir {it}", ENGINE_DIR),
    ("export {it} {out}", MODEL),
    ("check {it}", MODEL),
]


@pytest.mark.parametrize(
    ("line", "make", "said"),
    [
        pytest.param(line, make, said, id=f"{line.split()[0]}-{make.__name__}-{number}")
        for number, (line, table) in enumerate(COMMANDS)
        for make, said in table.items()
    ],
)
def test_wrong_path_is_told_by_its_kind_with_the_remedy(
    line: str,
    make: Callable[[Path], Path],
    said: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    it, out, asked = make(tmp_path / "it"), tmp_path / "out", tmp_path / "input.json"
    asked.write_text('{"requests": [{"messages": [{"role": "user", "content": "Hi"}]}]}')
    words = [word.format(it=it, out=out, input=asked) for word in line.split()]
    assert run(words) == 3
    what, remedy = capsys.readouterr().err.splitlines()[-2:]
    if make is engines and "spec-decode" in line:
        said = ("{it} has no draft engine", "Run edgespec export")
    assert what.startswith(f"error: {said[0].format(it=it)}")
    assert said[1].format(it=it) in remedy
    assert not out.exists()
