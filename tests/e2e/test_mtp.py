"""The guide's MTP commands on a toy, and what they refuse: one checkpoint, two components, no draft
asked for."""

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
from tests.e2e.workshop import Cli, Outcome, asked, cli, halted, infer, responses

__all__ = ["cli"]  # a fixture

REFUSED, ENVIRONMENT = 3, 4
SIZES = ("--maxBatchSize", 1, "--maxInputLen", 64, "--maxKVCacheCapacity", 128)
Refused = Callable[..., Outcome]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.make_qwen3_5(
        tmp_path_factory.mktemp("checkpoint"),
        hidden=32,
        heads=2,
        head_dim=16,
        layers=2,
        layer_types=["linear_attention", "full_attention"],
    )


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


# The guide


def test_guide_s_commands_from_checkpoint_to_answer(
    checkpoint: Path, tmp_path: Path, cli: Cli
) -> None:
    onnx, engines = tmp_path / "onnx", tmp_path / "engines"
    assert cli("export", checkpoint, onnx, "--mtp").code == 0
    for args in (
        (onnx / "llm", "--maxVerifyTreeSize", 7, "--specBase"),
        (onnx / "mtp_draft", "--maxDraftTreeSize", 7, "--specDraft"),
    ):
        assert (
            cli("build", "--onnxDir", args[0], "--engineDir", engines, *SIZES, *args[1:]).code == 0
        )
    chain = ["--specDecode", "--specDraftTopK", 1, "--specDraftStep", 3, "--specVerifySize", 4]
    done = cli(*infer(engines, tmp_path, asked("one two")), *chain, "--checkLossless")
    assert done.code == 0
    assert "drafting a chain with the MTP head: top-k 1, step 3, verify size 4" in done.err
    (answer,) = responses(tmp_path)
    assert len(answer["output_ids"]) == 8
    assert "lossless" in done.out

    by_default = cli(*infer(engines, tmp_path, asked("one two")), "--specDecode")
    assert "top-k 1, step 3, verify size 4" in by_default.err
    trees = cli(*infer(engines, tmp_path, asked("one two")), "--specDecode", "--specDraftTopK", 4)
    assert (trees.code, "--spec-draft-top-k 4" in trees.err) == (REFUSED, True)
    choices = cli(
        *infer(engines, tmp_path, asked("one two")), "--specDecode", "--eagle-choices", "[[0],[1]]"
    )
    assert (choices.code, "a static tree was asked for" in choices.err) == (REFUSED, True)
    assert [path.name for path in engines.glob("*embedding*")] == ["embedding.safetensors"]


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
    refused(
        [occupied, "already exists"],
        "export",
        checkpoint,
        tmp_path / "onnx",
        "--mtp",
        code=ENVIRONMENT,
    )


def test_plain_export_in_the_same_place_is_not_taken_for_the_base_of_the_head(
    checkpoint: Path, tmp_path: Path, cli: Cli, refused: Refused
) -> None:
    assert cli("export", checkpoint, tmp_path / "onnx").code == 0
    refused(
        ["llm", "already exists"],
        "export",
        checkpoint,
        tmp_path / "onnx",
        "--mtp",
        code=ENVIRONMENT,
    )


# What --mtp cannot be given with, or to


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--eagle-base"], ["--eagle-base and --mtp", "OUT"]),
        (["--aux-layers", "1,2"], ["--aux-layers", "--mtp"]),
        (["--base-model-dir", "elsewhere"], ["--base-model-dir", "--mtp"]),
    ],
)
def test_flags_that_contradict_it(
    checkpoint: Path, tmp_path: Path, refused: Refused, flags: list[str], words: list[object]
) -> None:
    if flags[0] == "--base-model-dir":
        flags = [flags[0], str(checkpoint)]
    refused(words, "export", checkpoint, tmp_path / "onnx", "--mtp", *flags)


def test_base_without_a_head(tmp_path: Path, refused: Refused) -> None:
    for path in (
        toys.make_base(tmp_path / "llama"),
        toys.make_qwen3_5(tmp_path / "qwen", mtp=False),
    ):
        refused([path, "no MTP head", "--mtp"], "export", path, tmp_path / "onnx", "--mtp")


def test_draft(tmp_path: Path, refused: Refused) -> None:
    base = toys.make_base(tmp_path / "base", layers=8)
    for draft in (
        toys.make_draft(tmp_path / "eagle", base, "modelopt"),
        toys.make_dflash(tmp_path / "dflash", base),
    ):
        refused([draft, "draft; --mtp belongs to"], "export", draft, tmp_path / "onnx", "--mtp")


def test_base_for_block_drafts_at_the_same_time(
    checkpoint: Path, tmp_path: Path, refused: Refused
) -> None:
    draft = toys.make_dflash(tmp_path / "dflash", checkpoint, aux_layers=[1, 2])
    flags = ["--dflash-base", "--dflash-draft-dir", draft]
    refused(["--mtp", "--dflash-base"], "export", checkpoint, tmp_path / "onnx", "--mtp", *flags)


def test_head_that_transformers_dropped(checkpoint: Path, tmp_path: Path, refused: Refused) -> None:
    def drop(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    path = with_tensors(checkpoint, tmp_path / "saved", drop)
    refused(
        [path, "transformers leaves mtp.* out", "original"],
        "export",
        path,
        tmp_path / "onnx",
        "--mtp",
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("mtp.fc.weight"), ["lacks mtp.fc.weight"]),
        (
            lambda t: t.update({"mtp.fc.weight": t["mtp.fc.weight"][:, :32].clone()}),
            ["mtp.fc.weight [32, 32]"],
        ),
        (
            lambda t: t.update(
                {"mtp.layers.0.mlp.experts.0.up_proj.weight": t["mtp.fc.weight"].clone()}
            ),
            ["experts"],
        ),
        (
            lambda t: t.update({"mtp.embed_tokens.weight": t["lm_head.weight"].clone()}),
            ["embedding of its own"],
        ),
    ],
    ids=["missing", "misshapen", "experts", "own-embedding"],
)
def test_head_that_is_not_whole_or_of_another_form(
    checkpoint: Path,
    tmp_path: Path,
    refused: Refused,
    change: Callable[[dict[str, Any]], object],
    words: list[object],
) -> None:
    path = with_tensors(checkpoint, tmp_path / "changed", change)
    refused([path, *words], "export", path, tmp_path / "onnx", "--mtp")


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
    refused(
        [told, "DeepSeek and GLM", "enorm, hnorm, eh_proj"],
        "export",
        told,
        tmp_path / "onnx",
        "--mtp",
    )
    tensor = {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)}
    path = with_tensors(told, tmp_path / "whole", lambda tensors: tensors.update(tensor))
    refused([path, *tensor, "enorm, hnorm, eh_proj"], "export", path, tmp_path / "onnx", "--mtp")


# The pair


@pytest.mark.parametrize("first", ["base", "draft"])
def test_head_and_a_base_for_eagle_drafts_are_refused_at_build(
    checkpoint: Path, tmp_path: Path, cli: Cli, refused: Refused, first: str
) -> None:
    assert cli("export", checkpoint, tmp_path / "mtp", "--mtp").code == 0
    assert (
        cli("export", checkpoint, tmp_path / "eagle", "--eagle-base", "--aux-layers", "1,2").code
        == 0
    )
    parts = [tmp_path / "eagle" / "llm", tmp_path / "mtp" / "mtp_draft"]
    one, two = parts if first == "base" else parts[::-1]
    assert cli("build", "--onnx-dir", one, "--engine-dir", tmp_path / "engines", *SIZES).code == 0
    words = ["an MTP head", "an EAGLE-3 draft", "--mtp"]
    refused(words, "build", "--onnx-dir", two, "--engine-dir", tmp_path / "engines", *SIZES)


def test_head_of_other_weights_is_refused_at_build(
    checkpoint: Path, tmp_path: Path, cli: Cli, refused: Refused
) -> None:
    other = with_tensors(
        checkpoint, tmp_path / "other", lambda tensors: tensors["lm_head.weight"].mul_(2)
    )
    assert cli("export", checkpoint, tmp_path / "one", "--mtp").code == 0
    assert cli("export", other, tmp_path / "two", "--mtp").code == 0
    engines = tmp_path / "engines"
    assert (
        cli("build", "--onnx-dir", tmp_path / "one" / "llm", "--engine-dir", engines, *SIZES).code
        == 0
    )
    args = ["build", "--onnx-dir", tmp_path / "two" / "mtp_draft", "--engine-dir", engines, *SIZES]
    refused(["different checkpoints"], *args)


def test_inspect_tells_of_the_head(checkpoint: Path, tmp_path: Path, cli: Cli) -> None:
    assert cli("export", checkpoint, tmp_path / "onnx", "--mtp").code == 0
    for part in ("llm", "mtp_draft"):
        assert cli("inspect", tmp_path / "onnx" / part).code == 0
    assert "the state after the last norm" in cli("inspect", tmp_path / "onnx" / "mtp_draft").out
