"""Claims about checkpoint/files.py and its formats, held against files that safetensors and torch
write."""

from __future__ import annotations

import importlib
import io
import json
import pickle
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file

from edgespec.checkpoint import safetensors
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.checkpoint.source import TensorInfo
from edgespec.checkpoint.tokenizer import refuse_growth
from edgespec.errors import CheckpointError, MissingDependency, UnsupportedModel


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(5, 7, generator=generator)
    return {
        "float32": noise,
        "float16": noise.half(),
        "bfloat16": noise.bfloat16(),
        "int64": torch.arange(-3, 4),
        "int32": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "uint8": torch.arange(9, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
    }


def write_config(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


def write_single(path: Path) -> Path:
    save_file(some_tensors(), write_config(path) / "model.safetensors", metadata={"format": "pt"})
    return path


def write_shards(path: Path) -> Path:
    write_config(path)
    names = list(some_tensors())
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:4], names[4:])):
        file = f"model-{number}.safetensors"
        save_file({name: some_tensors()[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return path


def write_pickle(path: Path) -> Path:
    torch.save(some_tensors(), write_config(path) / "pytorch_model.bin")
    return path


def write_old_pickle(path: Path) -> Path:
    torch.save(
        some_tensors(),
        write_config(path) / "pytorch_model.bin",
        _use_new_zipfile_serialization=False,
    )
    return path


def write_pickled_shards(path: Path) -> Path:
    write_config(path)
    names = list(some_tensors())
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:4], names[4:])):
        torch.save(
            {name: some_tensors()[name] for name in part}, path / f"pytorch_model-{number}.bin"
        )
        weight_map |= dict.fromkeys(part, f"pytorch_model-{number}.bin")
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


WRITERS = [write_single, write_shards, write_pickle, write_old_pickle, write_pickled_shards]


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("write", WRITERS)
def test_every_tensor_is_read_as_it_was_written(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(write(tmp_path), allow_pickle=True)
    assert set(checkpoint.tensors) == set(some_tensors())
    for name, tensor in some_tensors().items():
        array, info, copy = checkpoint.read(name), checkpoint.tensors[name], io.BytesIO()
        checkpoint.write_to(name, copy)
        assert info.dtype == array.dtype.name == str(tensor.dtype).removeprefix("torch.")
        assert info.shape == array.shape == tuple(tensor.shape)
        assert info.num_bytes == tensor.nbytes
        assert array.tobytes() == copy.getvalue() == as_bytes(tensor)


@pytest.mark.parametrize("write", WRITERS)
def test_arrays_are_fresh_at_each_reading(write: Callable[[Path], Path], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path), allow_pickle=True)
    checkpoint.read("float32")[:] = 0
    assert np.array_equal(checkpoint.read("float32"), some_tensors()["float32"].numpy())


def test_offset_is_where_the_bytes_lie_in_the_file(tmp_path: Path) -> None:
    info = open_checkpoint(write_shards(tmp_path)).tensors["uint8"]
    assert info.file is not None
    assert info.file.read_bytes()[info.offset : info.offset + info.num_bytes] == bytes(range(9))


def test_copying_a_large_tensor_needs_a_chunk_of_memory(tmp_path: Path) -> None:
    class Sink:
        size_bytes = largest = 0

        def write(self, data: bytes | memoryview, /) -> int:
            self.size_bytes += len(data)
            self.largest = max(self.largest, len(data))
            return len(data)

    save_file(
        {"big": torch.zeros(9 * 1024 * 1024 + 1)}, write_config(tmp_path) / "model.safetensors"
    )
    checkpoint, sink = open_checkpoint(tmp_path), Sink()
    tracemalloc.start()
    checkpoint.write_to("big", sink)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sink.size_bytes == 4 * (9 * 1024 * 1024 + 1)
    assert sink.largest <= 8 * 1024 * 1024
    assert peak < 20 * 1024 * 1024


# Which file


def test_model_safetensors_wins_over_other_weights(tmp_path: Path) -> None:
    write_shards(tmp_path)
    write_pickle(tmp_path)
    save_file({"only": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(open_checkpoint(tmp_path).tensors) == ["only"]


def test_a_lone_safetensors_of_any_name_is_the_model(tmp_path: Path) -> None:
    (write_single(tmp_path) / "model.safetensors").rename(tmp_path / "draft.safetensors")
    assert set(open_checkpoint(tmp_path).tensors) == set(some_tensors())
    shutil.copy(tmp_path / "draft.safetensors", tmp_path / "again.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"again\.safetensors, draft\.safetensors.*no model\.safetensors\.index",
    ):
        _ = open_checkpoint(tmp_path).tensors


def test_a_file_behind_a_symlink_is_read(tmp_path: Path) -> None:
    blobs = write_single(tmp_path / "blobs")
    snapshot = write_config(tmp_path / "snapshot")
    (snapshot / "model.safetensors").symlink_to(blobs / "model.safetensors")
    assert open_checkpoint(snapshot).read("scalar") == 1.5


def test_missing_shard_is_named(tmp_path: Path) -> None:
    (write_shards(tmp_path) / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 shards.*model-1\.safetensors"):
        _ = open_checkpoint(tmp_path).tensors


def test_of_a_tensor_in_two_shards_the_one_of_the_index_counts(tmp_path: Path) -> None:
    write_shards(tmp_path)
    first, last = sorted(tmp_path.glob("*.safetensors"))
    name = next(iter(load_file(first)))
    save_file({**load_file(last), name: torch.full((2, 3), 7.0)}, last)
    assert open_checkpoint(tmp_path).tensors[name].file == first


def edit_index(path: Path, **changes: Any) -> None:
    index = path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": json.loads(index.read_text())["weight_map"] | changes})
    )


def test_tensor_that_is_not_in_its_shard_is_named(tmp_path: Path) -> None:
    edit_index(write_shards(tmp_path), lost="model-0.safetensors")
    with pytest.raises(CheckpointError, match=r"lost \(model-0\.safetensors\)"):
        _ = open_checkpoint(tmp_path).tensors


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/b.safetensors", "a\\b", "..", "", 7, None, "C:x"]
)
def test_index_cannot_lead_out_of_its_directory(name: Any, tmp_path: Path) -> None:
    edit_index(write_shards(tmp_path), float32=name)
    with pytest.raises(CheckpointError, match=r"'float32'.*not the plain name"):
        _ = open_checkpoint(tmp_path).tensors


# Damage


def test_truncated_file_tells_both_sizes(tmp_path: Path) -> None:
    file = write_single(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(
        CheckpointError, match=f"{len(whole) - 10} bytes where {len(whole)} are expected"
    ) as error:
        _ = open_checkpoint(tmp_path).tensors
    assert "Download it again" in error.value.remedy


def test_every_truncation_and_every_surplus_is_refused(tmp_path: Path) -> None:
    file = write_single(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    for size in [*range(20), *range(20, len(whole), 97), len(whole) - 1]:
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="truncated"):
            _ = open_checkpoint(tmp_path).tensors
    file.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="its tensors end at"):
        _ = open_checkpoint(tmp_path).tensors


def entry(
    begin: int = 0, end: int = 8, shape: object = (2,), dtype: object = "F32"
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"\xff\xfe",
        b"[]",
        b"[" * 100_000,
        b'{"a": 1}',
        b'{"a": {}}',
        (
            b'{"a": {"dtype":"U8","shape":[8],"data_offsets":[0,8]}, "a":'
            b' {"dtype":"U8","shape":[8],"data_offsets":[0,8]}}'
        ),
        {"a": entry(shape=[3])},
        {"a": entry(shape=[-2])},
        {"a": entry(shape=[2.0])},
        {"a": entry(shape=[True, 2])},
        {"a": entry(shape=None)},
        {"a": entry(shape=[2**70])},
        {"a": entry(shape=[2**62, 2**62])},
        {"a": entry(8, 0)},
        {"a": entry(), "b": entry()},
        {"a": entry(), "b": entry(4, 12)},
        {"a": entry(4, 12)},
        {"a": entry(), "b": entry(16, 24)},
        {"a": entry() | {"data_offsets": [0, 8, 8]}},
        {"a": entry(dtype=5)},
    ],
)
def test_garbage_header_is_refused(header: bytes | dict[str, Any], tmp_path: Path) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = write_config(tmp_path) / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))  # of two tensors
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is not a valid safetensors file"
    ):
        _ = open_checkpoint(tmp_path).tensors


def test_enormous_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = write_config(tmp_path) / "model.safetensors"
    file.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=f"{2**60} bytes long"):
        _ = open_checkpoint(tmp_path).tensors


def test_git_lfs_pointer_is_recognized(tmp_path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (write_config(tmp_path) / "model.safetensors").write_text(text)
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        _ = open_checkpoint(tmp_path).tensors


def test_unknown_tensor_type_is_named(tmp_path: Path) -> None:
    text = json.dumps({"a": entry(dtype="F4")}).encode()
    (write_config(tmp_path) / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + bytes(8)
    )
    with pytest.raises(UnsupportedModel, match="'F4'"):
        _ = open_checkpoint(tmp_path).tensors


def test_file_that_shrinks_after_opening_is_noticed(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_single(tmp_path))
    info = checkpoint.tensors["float32"]
    with (tmp_path / "model.safetensors").open("rb+") as file:
        file.truncate(info.offset + 4)
    with pytest.raises(CheckpointError, match="140 bytes, got 4"):
        checkpoint.read("float32")
    with pytest.raises(CheckpointError, match="140 bytes, got 4"):
        checkpoint.write_to("float32", io.BytesIO())


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_unreadable_config_is_refused(text: str, tmp_path: Path) -> None:
    (write_single(tmp_path) / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_directory_without_config_or_weights_says_which(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    checkpoint = open_checkpoint(write_config(tmp_path))
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.generation_config is None
    with pytest.raises(CheckpointError, match="has no weights"):
        _ = checkpoint.tensors


# Pickles


@pytest.mark.parametrize("write", [write_pickle, write_pickled_shards])
def test_pickles_are_refused_unless_allowed(write: Callable[[Path], Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="only pickled weights") as error:
        _ = open_checkpoint(write(tmp_path)).tensors
    assert "`allow_pickle`" in error.value.remedy


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("exploded"),))


@pytest.mark.parametrize("by", ["torch", "pickle"])
def test_pickled_code_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_config(tmp_path) / "pytorch_model.bin"
    if by == "torch":
        torch.save({"weight": Bomb()}, file)
    else:
        file.write_bytes(pickle.dumps({"weight": Bomb()}, protocol=2))
    with pytest.raises(CheckpointError, match="could not be unpickled"):
        _ = open_checkpoint(tmp_path, allow_pickle=True).tensors
    assert not Path("exploded").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and then nothing", b"\x80\x02garbage"])
def test_damaged_pickle_is_refused(content: bytes, tmp_path: Path) -> None:
    (write_config(tmp_path) / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin could not be unpickled"):
        _ = open_checkpoint(tmp_path, allow_pickle=True).tensors


def test_pickle_that_holds_no_tensors_is_refused(tmp_path: Path) -> None:
    torch.save(
        {"state_dict": {"weight": torch.ones(1)}}, write_config(tmp_path) / "pytorch_model.bin"
    )
    with pytest.raises(CheckpointError, match="'state_dict' is a dict"):
        _ = open_checkpoint(tmp_path, allow_pickle=True).tensors


def test_without_torch_a_pickle_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pickle(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependency, match=r"edgespec\[torch\]"):
        _ = open_checkpoint(tmp_path, allow_pickle=True).tensors


# Identity


def test_identity_is_that_of_the_weights_whatever_the_config_says(tmp_path: Path) -> None:
    first = open_checkpoint(write_single(tmp_path / "a")).identity()
    other_config = write_single(tmp_path / "b")
    (other_config / "config.json").write_text('{"model_type": "llama" }')
    assert open_checkpoint(other_config).identity() == first


def test_identity_tells_other_values_and_other_shapes_apart(tmp_path: Path) -> None:
    found = {open_checkpoint(write_single(tmp_path / "a")).identity()}
    for folder, tensor in (("b", torch.ones(5, 7)), ("c", torch.ones(7, 5))):
        path = write_config(tmp_path / folder)
        save_file(
            some_tensors() | {"float32": tensor}, path / "model.safetensors", {"format": "pt"}
        )
        found.add(open_checkpoint(path).identity())
    assert len(found) == 3


# The hub


def test_existing_directory_is_never_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub")
    )
    monkeypatch.chdir(tmp_path)
    write_single(tmp_path / "org" / "model")
    assert open_checkpoint("org/model").read("scalar") == 1.5


def test_hub_id_is_downloaded_without_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        return str(write_single(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_checkpoint("org/model").path == tmp_path
    open_checkpoint("org/model", allow_pickle=True)
    assert [repo for repo, _ in asked] == ["org/model", "org/model"]
    assert ["*.bin" in patterns for _, patterns in asked] == [False, True]
    assert "*.safetensors" in asked[0][1]
    assert not any(pattern.endswith(".py") for _, patterns in asked for pattern in patterns)


def test_failed_download_says_that_there_is_no_such_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])
    for failure in (OSError("no route"), ValueError("bad id"), client.ConnectError("no route")):

        def download(*_: object, error: Exception = failure, **__: object) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        with pytest.raises(CheckpointError, match="could not download 'org/model'") as error:
            open_checkpoint("org/model")
        assert "If this is a directory, it does not exist" in error.value.remedy


@pytest.mark.parametrize("source", ["/no/such/directory", "a/b/c", "./draft", "..", "", "a b"])
def test_what_cannot_be_a_hub_id_is_a_missing_directory(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub")
    )
    with pytest.raises(CheckpointError, match=r"there is no directory|has no config"):
        open_checkpoint(source)


def test_a_weights_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file") as error:
        open_checkpoint(write_single(tmp_path) / "model.safetensors")
    assert str(tmp_path) in error.value.remedy


def test_headers_are_read_once_and_only_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def note(file: Path) -> list[TensorInfo]:
        read.append(file)
        return []

    monkeypatch.setattr(safetensors, "read_header", note)
    checkpoint = Checkpoint(write_single(tmp_path))
    assert read == []
    assert checkpoint.tensors is checkpoint.tensors
    assert len(read) == 1


def test_what_is_read_is_what_safetensors_reads(tmp_path: Path) -> None:
    reference = load_file(write_single(tmp_path) / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    for name, tensor in reference.items():
        assert checkpoint.read(name).tobytes() == as_bytes(tensor)


def test_a_tokenizer_that_multiplies_texts_is_refused_before_it_is_run(tmp_path: Path) -> None:
    rule = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    (tmp_path / "config.json").write_text("{}")
    refuse_growth(Checkpoint(tmp_path))  # it has none
    (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": None}))
    refuse_growth(Checkpoint(tmp_path))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": rule}))
    with pytest.raises(CheckpointError, match="the normalizer makes a text"):
        refuse_growth(Checkpoint(tmp_path))
