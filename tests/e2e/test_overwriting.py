"""Nothing that is read is ever overwritten, and a killed run stands in nobody's way."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from edgespec.artifacts import file_names
from edgespec.backends.manifest import EngineManifest
from tests.e2e.workshop import Cli, cli, halted, infer
from tests.lossless.pairs import make_pair

__all__ = ["cli"]  # a fixture

REFUSED = 3
LIMITS = ["--max-input-len", 48, "--max-kv-cache-capacity", 64]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base` and `draft`, `onnx_base/llm` and `onnx_draft/llm`, `engines`. For reading."""
    path = tmp_path_factory.mktemp("shop")
    make_pair(path, "llama", "eagle", None)
    return path


def snapshot(root: Path) -> dict[str, tuple[int, int, int]]:
    stats = {path: path.lstat() for path in root.rglob("*")}
    return {str(path): (s.st_ino, s.st_size, s.st_mtime_ns) for path, s in stats.items()}


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


# Outputs of infer


@pytest.mark.parametrize("flag", ["--output-file", "--profile-output-file"])
@pytest.mark.parametrize(
    "name",
    ["spec_base.onnx", "manifest.json", "base_config.json", "tokenizer.json", "new.json", "x/y"],
)
def test_nothing_is_written_into_the_engines(
    shop: Path, tmp_path: Path, cli: Cli, flag: str, name: str
) -> None:
    engines = copied(shop / "engines", tmp_path / "engines")
    args = infer(engines, tmp_path)
    before = snapshot(tmp_path)
    found = cli(*args, flag, engines / name)
    assert (found.code, found.out) == (REFUSED, "")
    assert f"{engines / name} " in found.err
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("place", ["base", "draft", "onnx_base/llm", "onnx_draft/llm"])
def test_nothing_is_written_into_what_engines_are_made_of(
    shop: Path, tmp_path: Path, cli: Cli, place: str
) -> None:
    model = copied(shop / place, tmp_path / "model")
    args = infer(shop / "engines", tmp_path)
    before = snapshot(tmp_path)
    args[-1] = model / "output.json"
    found = cli(*args)
    assert found.code == REFUSED
    assert f"lies in {model}, which is " in found.err
    assert snapshot(tmp_path) == before


def test_a_link_to_an_engine_file_is_that_file(shop: Path, tmp_path: Path, cli: Cli) -> None:
    engines = copied(shop / "engines", tmp_path / "engines")
    args = infer(engines, tmp_path)
    os.link(engines / "spec_base.onnx", tmp_path / "output.json")
    assert cli(*args).code == REFUSED
    (tmp_path / "output.json").unlink()
    (tmp_path / "output.json").symlink_to(engines / "spec_base.onnx.data")
    assert cli(*args).code == REFUSED
    assert (tmp_path / "output.json").is_symlink()


def test_a_prompt_set_is_not_overwritten_by_its_answers(
    shop: Path, tmp_path: Path, cli: Cli
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"turns": ["a"]}) + "\n")
    before = prompts.read_text()
    args = ["infer", "--engine-dir", shop / "engines", "--prompts", prompts]
    found = cli(*args, "--output-file", prompts)
    assert (found.code, prompts.read_text()) == (REFUSED, before)


# Directories


@pytest.mark.parametrize("place", ["base", "draft", "onnx_base/llm"])
@pytest.mark.parametrize("below", ["", "engines"])
def test_engines_do_not_go_into_another_model(
    shop: Path, tmp_path: Path, cli: Cli, place: str, below: str
) -> None:
    model = copied(shop / place, tmp_path / "model")
    before = snapshot(tmp_path)
    args = ["build", "--onnx-dir", shop / "onnx_draft" / "llm", "--engine-dir", model / below]
    found = cli(*args)
    assert (found.code, found.out) == (REFUSED, "")
    assert str(model) in found.err
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["spec_draft.onnx", "draft_config.json", "d2t.safetensors"])
def test_files_of_others_are_not_overwritten_by_engines(
    shop: Path, tmp_path: Path, cli: Cli, name: str
) -> None:
    engines = tmp_path / "engines"
    engines.mkdir()
    (engines / name).write_text("of others")
    (engines / "notes.txt").write_text("may stay")
    args = ["build", "--onnx-dir", shop / "onnx_draft" / "llm", "--engine-dir", engines, *LIMITS]
    found = cli(*args)
    assert found.code == REFUSED
    assert f"would overwrite: {name}" in found.err
    assert sorted(path.name for path in engines.iterdir()) == sorted([name, "notes.txt"])
    (engines / name).unlink()
    assert cli(*args).code == 0
    assert cli(*args).code == 0
    assert (engines / "notes.txt").read_text() == "may stay"


@pytest.mark.parametrize("place", ["base", "draft", "onnx_base/llm", "engines"])
@pytest.mark.parametrize("below", ["", "onnx"])
def test_exports_do_not_go_into_another_model(
    shop: Path, tmp_path: Path, cli: Cli, place: str, below: str
) -> None:
    model = copied(shop / place, tmp_path / "model")
    before = snapshot(tmp_path)
    found = cli("export", shop / "base", model / below, "--no-golden")
    assert (found.code, found.out) == (REFUSED, "")
    assert str(model) in found.err
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("kind", ["llm", "draft"])
def test_quantized_checkpoints_do_not_go_into_what_they_are_made_of(
    shop: Path, tmp_path: Path, cli: Cli, kind: str
) -> None:
    base = copied(shop / "base", tmp_path / "base")
    sources: list[object] = ["--model-dir", base]
    if kind == "draft":
        sources = ["--base-model-dir", base, "--draft-model-dir", shop / "draft"]
    before = snapshot(tmp_path)
    found = cli(
        "quantize", kind, *sources, "--quantization", "fp8", "--output-dir", base / "quantized"
    )
    assert (found.code, found.out) == (REFUSED, "")
    assert f"{base / 'quantized'} lies in" in found.err
    assert snapshot(tmp_path) == before


# Weights that changed


def test_a_changed_weight_is_noticed_wherever_it_is(shop: Path, tmp_path: Path, cli: Cli) -> None:
    """The very last byte of a tensor, far beyond its first 4 KiB."""
    base = copied(shop / "base", tmp_path / "base")
    export = ["export", base, tmp_path / "onnx", "--eagle-base", "--no-golden"]
    assert cli(*export).code == 0
    assert "already there and unchanged" in cli(*export).out
    flip_last_byte_of_the_largest_tensor(base)
    found = cli(*export)
    assert (found.code, "and the checkpoint has changed since" in found.err) == (REFUSED, True)
    again = ["export", base, tmp_path / "again", "--eagle-base", "--no-golden"]
    assert cli(*again).code == 0
    engines = copied(shop / "engines", tmp_path / "engines")
    build = ["build", "--onnx-dir", tmp_path / "again" / "llm", *LIMITS]
    found = cli(*build, "--engine-dir", engines)
    assert (found.code, "another base checkpoint" in found.err) == (REFUSED, True)
    assert cli(*build, "--engine-dir", tmp_path / "new").code == 0
    draft = ["build", "--onnx-dir", shop / "onnx_draft" / "llm", "--engine-dir", tmp_path / "new"]
    found = cli(*draft, *LIMITS)
    assert (found.code, "another base checkpoint" in found.err) == (REFUSED, True)


def flip_last_byte_of_the_largest_tensor(checkpoint: Path) -> None:
    from edgespec.checkpoint.files import Checkpoint

    info = max(Checkpoint(checkpoint).tensors.values(), key=lambda info: info.num_bytes)
    assert info.file is not None
    assert info.num_bytes > 4096
    with info.file.open("r+b") as file:
        file.seek(info.offset + info.num_bytes - 1)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


# What killed runs leave

REPLACE = "pathlib:Path.replace"


def complete(engines: Path) -> bool:
    """Whether a directory holds what its manifest lists, and nothing else."""
    names = {path.name for path in engines.iterdir()}
    return names == EngineManifest.read(engines).files | {file_names.MANIFEST}


@pytest.mark.deep
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("place", "calls"),
    [
        (REPLACE, 2),  # the list of what is to be moved
        (REPLACE, 4),  # the files themselves
        (REPLACE, 5),
        ("edgespec.backends.manifest:EngineManifest.write", 1),
        ("os:fsync", 3),  # the manifest, before it has its name
    ],
)
def test_killed_build_stands_in_nobodys_way(
    shop: Path, tmp_path: Path, cli: Cli, place: str, calls: int, again: bool
) -> None:
    engines = tmp_path / "engines"
    args = ["build", "--onnx-dir", shop / "onnx_draft" / "llm", "--engine-dir", engines, *LIMITS]
    if again:
        assert cli(*args).code == 0
    with halted(place, calls, *args):
        pass
    assert not complete(engines)
    assert cli("inspect", "--verify", engines).code in (0, REFUSED)
    assert cli(*args).code == 0
    assert complete(engines)
    assert cli("inspect", "--verify", engines).code == 0


def test_what_a_killed_build_left_is_removed_by_the_build_of_the_other_half(
    shop: Path, tmp_path: Path, cli: Cli
) -> None:
    engines = tmp_path / "engines"
    args = ["build", "--engine-dir", engines, *LIMITS, "--onnx-dir"]
    with halted(REPLACE, 5, *args, shop / "onnx_draft" / "llm"):
        pass
    assert cli(*args, shop / "onnx_base" / "llm").code == 0
    assert complete(engines)


def test_file_that_came_after_a_killed_build_is_not_removed(
    shop: Path, tmp_path: Path, cli: Cli
) -> None:
    engines = tmp_path / "engines"
    args = ["build", "--onnx-dir", shop / "onnx_draft" / "llm", "--engine-dir", engines, *LIMITS]
    with halted("edgespec.backends.manifest:EngineManifest.write", 1, *args):
        pass
    (engines / "draft_config.json").write_text("of others")
    found = cli(*args)
    assert (found.code, "would overwrite: draft_config.json" in found.err) == (REFUSED, True)
    assert (engines / "draft_config.json").read_text() == "of others"


# Two at once


def test_second_export_to_one_place_is_told_of_the_first(
    shop: Path, tmp_path: Path, cli: Cli
) -> None:
    args = ["export", shop / "base", tmp_path / "onnx", "--no-golden"]
    with halted("edgespec.export.writer:write_weights", 1, *args) as child:
        found = cli(*args)
        assert found.code == 4
        assert f"llm is being written by another run (process {child.pid})" in found.err
        assert "Wait until it has ended" in found.err
    assert cli(*args).code == 0
    assert [path.name for path in (tmp_path / "onnx").iterdir()] == ["llm"]
