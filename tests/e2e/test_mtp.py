"""What is MTP's own: one checkpoint makes two components, both or neither, and heads of other forms
are refused. What every method does stands in test_methods."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgespec.export import component
from tests import toys
from tests.e2e.methods import checkpoints
from tests.e2e.workshop import Cli, Outcome, cli, halted

__all__ = ["cli"]  # a fixture

REFUSED, ENVIRONMENT = 3, 4
Refused = Callable[..., Outcome]


@pytest.fixture
def checkpoint() -> Path:
    return checkpoints() / "mtp"


@pytest.fixture
def refused(cli: Cli, tmp_path: Path) -> Refused:
    """A command that must fail with one line that has these words, a remedy, and nothing
    written."""

    def call(words: list[object], *args: object, code: int = REFUSED) -> Outcome:
        before = everything(tmp_path)
        found = cli(*args)
        assert found.code == code, found.err
        assert len(found.err.splitlines()) == 2, found.err
        assert all(str(word) in found.err for word in words), found.err
        assert everything(tmp_path) == before
        return found

    return call


def everything(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


def edited(checkpoint: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(checkpoint, target)
    config = json.loads((target / "config.json").read_text())
    change(config)
    (target / "config.json").write_text(json.dumps(config))
    return target


def with_tensors(
    checkpoint: Path, target: Path, change: Callable[[dict[str, Any]], object]
) -> Path:
    shutil.copytree(checkpoint, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


# Writing both


def test_json_tells_of_both_components(checkpoint: Path, tmp_path: Path, cli: Cli) -> None:
    found = json.loads(cli("export", checkpoint, tmp_path / "onnx", "--mtp", "--json").out)
    assert (found["role"], found["directory"]) == ("base", str(tmp_path / "onnx" / "llm"))
    (draft,) = found["beside"]
    assert (draft["role"], draft["directory"]) == ("draft", str(tmp_path / "onnx" / "mtp_draft"))


def test_second_run_writes_nothing_and_a_lost_half_is_made_again(
    checkpoint: Path, tmp_path: Path, cli: Cli
) -> None:
    args = ("export", checkpoint, tmp_path / "onnx", "--mtp")
    assert cli(*args).code == 0
    before = everything(tmp_path)
    dead = tmp_path / "onnx" / ".llm.tmp-4194305"  # beyond the largest process id
    dead.mkdir()
    assert cli(*args).out.count("nothing was written") == 2
    assert everything(tmp_path) == before
    assert not dead.exists()
    for part in ("llm", "mtp_draft"):
        shutil.rmtree(tmp_path / "onnx" / part)
        assert cli(*args).out.count("nothing was written") == 1
        assert {path.rpartition("/")[0] for path in everything(tmp_path)} == {
            path.rpartition("/")[0] for path in before
        }


@pytest.mark.parametrize("calls", [1, 2])
def test_killed_run_leaves_neither_and_the_next_one_writes_both(
    checkpoint: Path, tmp_path: Path, cli: Cli, calls: int
) -> None:
    """Killed at the golden outputs of the base, and at those of the head, when the base is whole in
    its staging."""
    args = ("export", checkpoint, tmp_path / "onnx", "--mtp")
    with halted("edgespec.export.component:make_golden", calls, *args):
        pass
    assert [
        path.name for path in (tmp_path / "onnx").iterdir() if not path.name.startswith(".")
    ] == []
    assert cli(*args).code == 0
    assert sorted(path.name for path in (tmp_path / "onnx").iterdir()) == ["llm", "mtp_draft"]


@pytest.mark.parametrize(("calls", "part"), [(1, "llm"), (2, "mtp_draft")])
def test_full_disk_is_told_of_the_part_that_has_no_room(
    checkpoint: Path,
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    calls: int,
    part: str,
) -> None:
    real, made = component.make_golden, iter(range(1, 3))

    def full(*args: Any) -> Any:
        if next(made) == calls:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(component, "make_golden", full)
    done = cli("export", checkpoint, tmp_path / "new" / "onnx", "--mtp")
    assert done.code == ENVIRONMENT
    assert f"{tmp_path / 'new' / 'onnx' / part}: No space left" in done.err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("occupied", ["llm", "mtp_draft"])
def test_directory_that_is_taken_is_refused_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, refused: Refused, occupied: str
) -> None:
    (tmp_path / "onnx" / occupied).mkdir(parents=True)
    (tmp_path / "onnx" / occupied / "note").write_text("mine")
    line = ("export", checkpoint, tmp_path / "onnx", "--mtp")
    refused([occupied, "already exists"], *line, code=ENVIRONMENT)


def test_plain_export_in_the_same_place_is_not_taken_for_the_base_of_the_head(
    checkpoint: Path, tmp_path: Path, cli: Cli, refused: Refused
) -> None:
    assert cli("export", checkpoint, tmp_path / "onnx").code == 0
    line = ("export", checkpoint, tmp_path / "onnx", "--mtp")
    refused(["llm", "already exists"], *line, code=ENVIRONMENT)


def test_head_that_transformers_dropped(checkpoint: Path, tmp_path: Path, refused: Refused) -> None:
    def drop(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    path = with_tensors(checkpoint, tmp_path / "saved", drop)
    words: list[object] = [path, "transformers leaves mtp.* out", "original"]
    refused(words, "export", path, tmp_path / "onnx", "--mtp")


@pytest.mark.parametrize(
    "family", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"]
)
def test_heads_of_other_families_by_name(tmp_path: Path, refused: Refused, family: str) -> None:
    """Told by the config alone, and by the tensors, whether the base itself is one that this
    version takes or not."""
    base = toys.make_base(tmp_path / "base")
    told = edited(
        base,
        tmp_path / "told",
        lambda c: c.update(num_nextn_predict_layers=1, architectures=[family]),
    )
    words: list[object] = [told, "DeepSeek and GLM", "enorm, hnorm, eh_proj"]
    refused(words, "export", told, tmp_path / "onnx", "--mtp")
    tensor = {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)}
    path = with_tensors(told, tmp_path / "whole", lambda tensors: tensors.update(tensor))
    refused([path, *tensor, "enorm, hnorm, eh_proj"], "export", path, tmp_path / "onnx", "--mtp")
