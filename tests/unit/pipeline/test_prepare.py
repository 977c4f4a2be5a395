"""What `edgespec run` knows before it makes anything: what a start is known by, and what is no
model."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.backends.ort.options import WeightFormat
from edgespec.contract import Limits
from edgespec.errors import (
    BundleError,
    CheckpointError,
    EdgeSpecError,
    OptionError,
    UnsupportedModel,
)
from edgespec.pipeline import prepare
from edgespec.pipeline.cache import Cache
from edgespec.pipeline.prepare import RunRequest, is_settled, made_once, prepared, start_of

Change = Callable[[RunRequest, Path], RunRequest]


class Report:
    """A Reporter that remembers."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.notes: list[str] = []

    def step(self, title: str) -> None:
        self.steps.append(title)

    def finish(self) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)

    def start(self, stage: str, total: int) -> None:
        pass

    def advance(self, amount: int) -> None:
        pass


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        (path / name).write_text("{}")
    return path


def rewrite(request: RunRequest, path: Path) -> RunRequest:
    """The same inode, size and time stamp of the content."""
    file = path / "model.safetensors"
    stat = file.stat()
    file.write_text("[]")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return request


def touch(request: RunRequest, path: Path) -> RunRequest:
    os.utime(path / "model.safetensors", (1, 1))
    return request


def add_file(request: RunRequest, path: Path) -> RunRequest:
    (path / "chat_template.jinja").write_text("")
    return request


CHANGES: dict[str, Change] = {
    "other bytes": rewrite,
    "time stamp": touch,
    "a new file": add_file,
    "draft": lambda r, path: replace(r, draft="org/draft"),
    "weights": lambda r, path: replace(r, options=WeightFormat("int4")),
    "block": lambda r, path: replace(r, options=WeightFormat("int4", 32)),
    "limits": lambda r, path: replace(r, limits=Limits(max_input_len=1000)),
    "aux layers": lambda r, path: replace(r, aux_layers=(1, 2, 3)),
    "golden": lambda r, path: replace(r, golden=False),
    "pickle": lambda r, path: replace(r, allow_pickle=True),
}


def test_start_is_known_by_all_that_it_depends_on(model: Path) -> None:
    request = RunRequest(target=str(model))
    starts = [start_of(request), *(start_of(change(request, model)) for change in CHANGES.values())]
    assert len(set(starts)) == len(starts)


def test_start_does_not_depend_on_how_the_directory_is_spelled(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    assert start_of(RunRequest(target="model")) == start_of(RunRequest(target=f"{model}/../model/"))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("edgespec.pipeline.prepare.__version__", "0.0.0"),
        ("edgespec.backends.ort.fingerprint.ort_version", lambda: "1.0"),
        ("edgespec.backends.ort.fingerprint.cpu_features", lambda: ["other"]),
    ],
)
def test_start_depends_on_version_library_and_machine(
    model: Path, monkeypatch: pytest.MonkeyPatch, place: str, value: Any
) -> None:
    before = start_of(RunRequest(target=str(model)))
    monkeypatch.setattr(place, value)
    assert start_of(RunRequest(target=str(model))) != before


def test_hub_name_is_known_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "download", lambda *_, **__: pytest.fail("the hub was asked"))
    assert start_of(RunRequest(target="org/model")) != start_of(RunRequest(target="org/other"))


def test_files_that_may_change_within_their_time_stamp_are_not_trusted(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in model.iterdir():
        os.utime(file, (1, 1))  # as cp -p does: the inode's own time stays
    assert not is_settled(str(model))
    monkeypatch.setattr(prepare.time, "time", lambda: time.time_ns() / 1e9 + 3)
    assert is_settled(str(model))
    assert is_settled("org/model")


def refused(error: type[EdgeSpecError], said: str, tmp_path: Path, **asked: Any) -> Report:
    report = Report()
    preparing = prepared(RunRequest(**asked), Cache(tmp_path / "cache"), report)
    with pytest.raises(error, match=said) as found, preparing:
        pass
    assert found.value.remedy
    assert not (tmp_path / "cache").exists()
    return report


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("recipe.yaml", UnsupportedModel, "does not run recipes yet"),
        ("model.gguf", CheckpointError, "there is no file 'model.gguf'"),
        ("no/such/model", CheckpointError, "there is no directory"),
        ("./model2", CheckpointError, "there is no directory"),
        ("", CheckpointError, "an empty name"),
    ],
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_what_is_no_model_is_refused_by_name(
    tmp_path: Path, model: Path, role: str, name: str, error: type[EdgeSpecError], said: str
) -> None:
    report = refused(error, said, tmp_path, **({"target": str(model)} | {role: name}))
    assert report.steps == []


def test_weights_file_is_refused_with_its_directory(tmp_path: Path, model: Path) -> None:
    file = model / "model.safetensors"
    refused(CheckpointError, "is a file, not a model", tmp_path, target=str(file))


def test_unknown_backend_is_refused(tmp_path: Path, model: Path) -> None:
    refused(OptionError, "no backend 'x'", tmp_path, target=str(model), backend="x")


def test_entry_that_is_damaged_and_in_use_is_told(tmp_path: Path) -> None:
    kept, report = Cache(tmp_path), Report()
    making = made_once("00", kept, lambda: pytest.fail("made"), report)
    damaged = pytest.raises(BundleError, match="is damaged, and another run uses it")
    with kept.locked("00", shared=True), damaged, making:
        pass


def test_maker_that_fails_leaves_the_work_to_the_one_who_waits(tmp_path: Path) -> None:
    """The first one is interrupted once the second one waits."""
    kept, waits, made = Cache(tmp_path), threading.Event(), []

    class Waiting(Report):
        def note(self, text: str) -> None:
            waits.set()

    def make() -> None:
        made.append(True)

    def second() -> None:
        with made_once("00", Cache(tmp_path), make, Waiting()):
            made.append(False)

    thread = threading.Thread(target=second)
    with kept.locked("00"):
        thread.start()
        assert waits.wait(10)
    thread.join(10)
    assert made == [True, False]
