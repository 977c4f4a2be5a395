"""Claims about outputs.py: nothing is written over or into what is read, by whatever name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.artifacts.directories import DirectoryKind
from edgespec.artifacts.outputs import model_directory, refuse_model_directory, refuse_overwriting
from edgespec.errors import OverwriteError

KINDS: dict[str, tuple[dict[str, str], DirectoryKind | None]] = {
    "checkpoint": ({"config.json": "{}", "model.safetensors": ""}, DirectoryKind.CHECKPOINT),
    "shards": (
        {"config.json": "{}", "model.safetensors.index.json": "{}"},
        DirectoryKind.CHECKPOINT,
    ),
    "pickled": ({"config.json": "{}", "pytorch_model.bin": ""}, DirectoryKind.CHECKPOINT),
    "quantized": ({"manifest.json": '{"kind": "quantize"}'}, DirectoryKind.CHECKPOINT),
    "export": ({"manifest.json": '{"kind": "export"}'}, DirectoryKind.EXPORT),
    "export without its manifest": ({"config.json": "{}", "model.onnx": ""}, DirectoryKind.EXPORT),
    "engines": ({"manifest.json": '{"kind": "engine"}'}, DirectoryKind.ENGINES),
    "engines with a damaged manifest": (
        {"manifest.json": "{", "spec_base.onnx": ""},
        DirectoryKind.ENGINES,
    ),
    "engine without its manifest": ({"llm.onnx": "", "config.json": "{}"}, DirectoryKind.ENGINES),
    "a project of its own": ({"manifest.json": '{"kind": "web"}', "config.json": "{}"}, None),
    "loose weights": ({"model.safetensors": ""}, None),
    "nothing": ({}, None),
}


def made(path: Path, files: dict[str, str]) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name).write_text(text)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_directories_of_models_are_known_by_their_files(tmp_path: Path, kind: str) -> None:
    files, expected = KINDS[kind]
    assert model_directory(made(tmp_path / "d", files)) == expected


@pytest.mark.parametrize("where", ["output.json", "config.json", "new/output.json"])
@pytest.mark.parametrize("kind", [kind for kind, (_, found) in KINDS.items() if found])
def test_nothing_goes_into_the_directory_of_a_model(tmp_path: Path, kind: str, where: str) -> None:
    files, expected = KINDS[kind]
    directory = made(tmp_path / "d", files)
    with pytest.raises(OverwriteError, match=rf"lies in .*d, which is {expected.value}"):
        refuse_overwriting(directory / where, [])


def symbolic(new: Path, old: Path) -> None:
    new.symlink_to(old)


NAMES: dict[str, Callable[[Path, Path], Path]] = {
    "the same": lambda source, place: source,
    "with dots": lambda source, place: source.parent / ".." / source.parent.name / source.name,
    "a symbolic link": lambda source, place: linked(place / "link", source, symbolic),
    "a link to a link": lambda source, place: linked(
        place / "more", linked(place / "link", source, symbolic), symbolic
    ),
}


def linked(new: Path, old: Path, link: Callable[[Path, Path], None]) -> Path:
    link(new, old)
    return new


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_an_input_is_no_output_by_whatever_name(tmp_path: Path, name: str, kind: str) -> None:
    place = made(tmp_path / "place", {})
    source = tmp_path / "in" / "source"
    source.parent.mkdir()
    source.mkdir() if kind == "directory" else source.write_text("x")
    with pytest.raises(OverwriteError, match="is an input of this command"):
        refuse_overwriting(NAMES[name](source, place), [None, "not/there", source])


def test_an_input_is_named_once(tmp_path: Path) -> None:
    file = tmp_path / "engines" / "base_config.json"
    file.parent.mkdir()
    file.write_text("{}")
    with pytest.raises(OverwriteError) as refused:
        refuse_overwriting(file, [file.parent])
    assert refused.value.what == f"{file} is an input of this command"


def test_a_hard_link_to_an_input_is_that_input(tmp_path: Path) -> None:
    source = tmp_path / "input.json"
    source.write_text("{}")
    os.link(source, tmp_path / "output.json")
    with pytest.raises(
        OverwriteError, match=r"output\.json is an input of this command: .*input\.json"
    ):
        refuse_overwriting(tmp_path / "output.json", [source])


def test_a_hard_link_to_a_file_of_an_input_directory_is_that_file(tmp_path: Path) -> None:
    source = made(tmp_path / "plain", {"weights": "x"})
    os.link(source / "weights", tmp_path / "output.json")
    with pytest.raises(OverwriteError, match=r"is an input of this command: .*weights"):
        refuse_overwriting(tmp_path / "output.json", [source])


def test_output_through_a_linked_directory_lies_where_it_is_written(tmp_path: Path) -> None:
    engines = made(tmp_path / "engines", {"manifest.json": json.dumps({"kind": "engine"})})
    (tmp_path / "link").symlink_to(engines)
    (tmp_path / "file.json").symlink_to(engines / "new.json")
    for path in (tmp_path / "link" / "output.json", tmp_path / "file.json"):
        with pytest.raises(OverwriteError, match="an engine directory"):
            refuse_overwriting(path, [])


def test_output_in_any_directory_that_is_read_is_refused(tmp_path: Path) -> None:
    plain = made(tmp_path / "plain", {})
    with pytest.raises(OverwriteError, match="lies in an input: "):
        refuse_overwriting(plain / "output.json", [plain])


def test_output_beside_what_is_read_is_fine(tmp_path: Path) -> None:
    made(tmp_path / "engines", {"manifest.json": '{"kind": "engine"}'})
    (tmp_path / "input.json").write_text("{}")
    for name in ("output.json", "new/output.json", "engines-2"):
        refuse_overwriting(tmp_path / name, [tmp_path / "engines", tmp_path / "input.json"])


def test_a_directory_of_the_right_kind_may_be_written(tmp_path: Path) -> None:
    engines = made(tmp_path / "engines", {"manifest.json": '{"kind": "engine"}'})
    refuse_model_directory(engines, "it is", "", but=(DirectoryKind.ENGINES,))
    with pytest.raises(OverwriteError, match="which is an engine directory"):
        refuse_model_directory(engines, "it is", "", but=(DirectoryKind.EXPORT,))
