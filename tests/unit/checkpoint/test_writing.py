"""Claims about checkpoint/writing.py: shards as transformers writes them, and rows without the
rest."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.writing import copied, stored_pieces, write_model, write_safetensors
from edgespec.errors import CheckpointError
from tests import toys


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(
        toys.make_base(tmp_path_factory.mktemp("tensors") / "base", layers=2, dtype="bfloat16")
    )


def test_large_results_are_sharded_and_read_alike(checkpoint: Checkpoint, tmp_path: Path) -> None:
    told: list[int] = []
    limit = 40_000
    write_model(
        tmp_path, [copied(checkpoint, name) for name in checkpoint.tensors], told.append, limit
    )
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, 1 + len(files))
    ]
    sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
    assert len(files) > 2
    assert max(sizes) <= limit
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes) == sum(told)
    (tmp_path / "config.json").write_text("{}")
    again = Checkpoint(tmp_path)
    assert list(again.tensors) == list(checkpoint.tensors)
    assert all(
        again.read(name).tobytes() == checkpoint.read(name).tobytes() for name in again.tensors
    )
    from transformers import AutoModelForCausalLM

    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(
        model.get_parameter(name).bfloat16(), load_file(checkpoint.path / "model.safetensors")[name]
    )


def test_tensor_larger_than_a_shard_has_one_of_its_own(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    write_model(
        tmp_path, [copied(checkpoint, name) for name in checkpoint.tensors], lambda _: None, 1
    )
    assert len(list(tmp_path.glob("*.safetensors"))) == len(checkpoint.tensors)


def test_small_results_are_one_file_without_an_index(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    write_model(tmp_path, [copied(checkpoint, name) for name in checkpoint.tensors], lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_pieces_of_a_file_are_copied_byte_for_byte(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint.path / "model.safetensors"
    write_safetensors(tmp_path / "copy", stored_pieces(source), lambda _: None)
    ours, theirs = load_file(tmp_path / "copy"), load_file(source)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (3, 8), (250, 999)])
def test_rows_are_those_of_the_whole(checkpoint: Checkpoint, low: int, high: int) -> None:
    name = "model.embed_tokens.weight"
    rows = checkpoint.read_rows(name, low, high)
    assert rows.dtype == checkpoint.read(name).dtype
    assert np.array_equal(rows, checkpoint.read(name)[low:high])


def test_file_that_became_shorter_is_told(tmp_path: Path) -> None:
    checkpoint = Checkpoint(toys.make_base(tmp_path / "base", layers=1))
    last = max(checkpoint.tensors.values(), key=lambda info: info.offset)
    data = (checkpoint.path / "model.safetensors").read_bytes()
    (checkpoint.path / "model.safetensors").write_bytes(data[:-8])
    with pytest.raises(CheckpointError, match="was truncated while"):
        checkpoint.read_rows(last.name, 0, last.shape[0])


def test_a_row_of_a_pickled_table_is_all_that_is_copied(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    name, table = "model.embed_tokens.weight", torch.arange(4096.0 * 64).reshape(4096, 64)
    torch.save({name: table}, tmp_path / "pytorch_model.bin")
    pickled = Checkpoint(tmp_path, allow_pickle=True)
    assert pickled.tensors[name].num_bytes == table.nbytes
    tracemalloc.start()
    try:
        row = pickled.read_rows(name, 7, 8)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(row, table[7:8].numpy())
    assert peak < table.nbytes / 16
    row[:] = 0
    assert pickled.read_rows(name, 7, 8).any()
