"""A draft's vocabulary: which tokens, which share of the answers, and files as ModelOpt writes
them. And what `data show` paints of the same answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from edgespec.cli.main import run
from edgespec.errors import RequestError
from edgespec.training.data import Row, Rows
from edgespec.training.vocabulary import (
    coverage,
    most_frequent,
    read_vocabulary,
    size_for,
    token_counts,
    write_vocabulary,
)
from tests import toys


def rows(*texts: tuple[list[int], list[int]]) -> Rows:
    made = [Row(np.array(ids), np.array(learned, np.bool_)) for ids, learned in texts]
    return Rows(tuple(made), 0, 0)


def test_tokens_that_are_learned_are_counted_and_ends_are_always_in() -> None:
    counts = token_counts(rows(([5, 5, 3, 3, 1], [0, 1, 1, 1, 0]), ([7, 5, 9], [0, 1, 0])), 12)
    assert {i: int(c) for i, c in enumerate(counts) if c} == {1: 1, 3: 2, 9: 1}
    assert most_frequent(counts, 3, [11]).tolist() == [1, 3, 11]
    assert coverage(counts, [11])[:4].tolist() == [0, 0.5, 0.75, 1]


@pytest.mark.parametrize(("target", "size"), [(0.45, 8), (0.9, 16), (1.0, 20)])
def test_the_size_for_a_target_is_the_smallest_multiple_of_eight(target: float, size: int) -> None:
    shares = np.minimum(np.arange(1, 21) / 16, 1) * 0.97 + np.arange(20) / 19 * 0.03
    assert size_for(shares, target) == size
    assert shares[size - 1] >= target


@pytest.mark.parametrize("name", ["d2t.pt", "vocab.safetensors"])
def test_a_vocabulary_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    ids = torch.tensor([0, 2, 3, 9])
    write_vocabulary(tmp_path / name, ids)
    assert read_vocabulary(tmp_path / name, 4, 10).tolist() == ids.tolist()
    if name == "d2t.pt":  # ModelOpt's order is by frequency: offsets may go down
        torch.save(torch.tensor([9, -1, 1]), tmp_path / name)
        assert read_vocabulary(tmp_path / name, 3, 10).tolist() == [9, 0, 3]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([5, 4, 7], "names a token twice: entries 0 and 1 are 5"),
        ([0, 0, 8], "entry 2 leads to token 10, and the base has 10"),
        ([-1, 0, 0], "entry 0 leads to token -1"),
        ([0, 0], "does not hold 3 offsets"),
        ([0.0, 0.0, 0.0], "does not hold 3 offsets"),
        (None, "holds no d2t"),
    ],
)
def test_a_broken_vocabulary_is_refused(
    offsets: list[int] | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "d2t.pt"
    path.write_bytes(b"no pickle")
    if offsets is not None:
        torch.save(torch.tensor(offsets), path)
    with pytest.raises(RequestError, match=message):
        read_vocabulary(path, 3, 10)
    save_file({"other": torch.zeros(3)}, tmp_path / "a.safetensors")
    with pytest.raises(RequestError, match="holds no d2t"):
        read_vocabulary(tmp_path / "a.safetensors", 3, 10)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = toys.make_base(tmp_path_factory.mktemp("base"), "qwen3", layers=2)
    chat = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes yes yes."}
    (path.parent / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    return path


def test_the_command_writes_the_vocabulary_and_its_picture(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out, picture = base.parent / "chats.jsonl", tmp_path / "d2t.pt", tmp_path / "a.svg"
    words = ["train", "vocab", "--base-model", str(base), "--data", str(data)]
    more = ["--coverage", "1", "--output-file", str(out), "--picture", str(picture), "--json"]
    assert run([*words, *more]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["coverage"] == 1
    assert found["size"] == found["sizes"]["0.999"]
    vocab_size = json.loads((base / "config.json").read_text())["vocab_size"]
    assert len(read_vocabulary(out, found["size"], vocab_size)) == found["size"]
    assert "<svg" in picture.read_text()
    assert run(words) == 2
    assert run([*words, "--size", str(vocab_size + 1)]) == 2


def test_show_marks_the_answer_with_what_ends_it(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = base.parent / "chats.jsonl"
    assert run(["data", "show", str(data), "--base-model", str(base)]) == 0
    said = capsys.readouterr().out
    assert said.count(">>") == 1
    begin, end = said.index(">>"), said.index("<<", said.index(">>"))
    assert said[begin:end].startswith(">>Yes yes yes.")
    assert len(said[begin:end]) > len(">>Yes yes yes.")
    assert "1 conversations" in said
