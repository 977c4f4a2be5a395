"""Claims about identities: they see every byte, and nothing that an earlier run kept is believed of
a file that has changed since."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from edgespec.checkpoint import digests
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.checkpoint.source import RowRange
from edgespec.errors import CheckpointError

TENSORS = {
    "a": np.arange(5000, dtype=np.float32).reshape(100, 50),
    "b": np.arange(9, dtype=np.uint8),
    "c": np.ones((7, 5), np.float16),
    "empty": np.zeros((0, 4), np.float32),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "checkpoint")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for digests, for files that were written just now as well."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "SETTLED_NS", -(10**12))
    return tmp_path / "cache" / "digests"


def write(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file(TENSORS, path / "model.safetensors")
    return path


def write_shards(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    files = {name: f"model-{number}.safetensors" for number, name in enumerate(TENSORS)}
    for name, file in files.items():
        save_file({name: TENSORS[name]}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return path


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as raw:
        raw.seek(at)
        byte = raw.read(1)[0]
        raw.seek(at)
        raw.write(bytes([byte ^ 1]))


def identity(path: Path) -> str:
    return open_checkpoint(path).identity()


def unread(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The identity, which must not read a tensor for it."""
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "_chunks", lambda *_: pytest.fail("a tensor was read"))
        return identity(path)


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_identity_sees_every_byte(path: Path, name: str, place: float) -> None:
    before, info = identity(path), Checkpoint(path).tensors[name]
    flip(path / "model.safetensors", info.offset + int(place * (info.num_bytes - 1)))
    assert identity(path) != before


def test_identity_is_that_of_the_tensors_however_they_are_spread(
    path: Path, tmp_path: Path
) -> None:
    assert identity(write_shards(tmp_path / "shards")) == identity(path)


def test_what_is_read_is_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, checkpoint = identity(path), Checkpoint(path)
    checkpoint.hash_while_reading()
    for name in ("a", "empty"):
        checkpoint.write_to(name, io.BytesIO())
    checkpoint.renamed({"own": RowRange("b")}).read("own")
    checkpoint.read("c")
    monkeypatch.setattr(Checkpoint, "_chunks", lambda *_: pytest.fail("a tensor was read"))
    assert checkpoint.identity() == expected


def test_parts_of_tensors_do_not_count_as_tensors(path: Path) -> None:
    expected, checkpoint = identity(path), Checkpoint(path)
    checkpoint.hash_while_reading()
    checkpoint.renamed({"own": RowRange("a", 0, 50)}).write_to("own", io.BytesIO())
    checkpoint.read_rows("a", 0, 100)
    assert checkpoint.identity() == expected


def test_identity_of_a_file_that_changes_meanwhile_is_refused(path: Path) -> None:
    checkpoint = Checkpoint(path)
    checkpoint.read("a")
    flip(path / "model.safetensors", -1 + (path / "model.safetensors").stat().st_size)
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        checkpoint.identity()


# What an earlier run kept


def test_unchanged_file_is_read_once(
    path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert identity(path) == unread(path, monkeypatch)
    assert len(list(kept.iterdir())) == 1


def test_file_that_changed_just_before_it_was_read_is_not_kept(
    path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change in the same tick of the file system's clock would not be seen."""
    monkeypatch.setattr(digests, "SETTLED_NS", 2 * 10**9)
    identity(path)
    assert not kept.exists()


def rewritten(path: Path) -> None:
    file = path / "model.safetensors"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    flip(file, file.stat().st_size - 1)
    os.utime(file, ns=times)  # as `cp -p` and archives set it


def replaced(path: Path) -> None:
    file = path / "model.safetensors"
    data, times = file.read_bytes(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    file.unlink()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(file, ns=times)


@pytest.mark.parametrize("change", [rewritten, replaced])
def test_change_that_keeps_size_and_time_is_seen(
    path: Path, kept: Path, change: Callable[[Path], None]
) -> None:
    before = identity(path)
    change(path)
    assert identity(path) != before


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record | {"tensors": {}},
        lambda record: record | {"tensors": record["tensors"] | {"a": 7}},
        lambda record: record | {"tensors": record["tensors"] | {"a": "../x"}},
        lambda record: record | {"format": 0},
        lambda record: [],
    ],
)
def test_record_that_is_none_is_not_believed(
    path: Path, kept: Path, damage: Callable[[dict[str, object]], object]
) -> None:
    expected = identity(path)
    (record,) = kept.iterdir()
    record.write_text(json.dumps(damage(json.loads(record.read_text()))))
    assert identity(path) == expected


def test_no_place_for_digests_is_no_error(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(digests, "SETTLED_NS", -(10**12))
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "file" / "below"))
    assert identity(path) == identity(path)
