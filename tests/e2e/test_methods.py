"""Every drafting method that has an engine, from checkpoints to answers by the commands of a user:
what it drafts, what `inspect` names, and what is refused. The rows are those of methods.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from edgespec.artifacts import file_names
from tests.e2e.methods import CHOICES, LIMITS, METHODS, built, checkpoints, exported
from tests.e2e.workshop import (
    Cli,
    asked,
    check_rejection,
    check_tuning,
    cli,
    infer,
    responses,
    said,
)

__all__ = ["cli"]  # a fixture

USAGE, REFUSED = 2, 3
BLOCKS = ["dflash", "jetspec", "dspark"]
every_method = pytest.mark.parametrize("name", METHODS)
every_block = pytest.mark.parametrize("name", BLOCKS)


# From checkpoints to answers


@pytest.mark.parametrize(
    ("name", "flags"), [(name, flags) for name in METHODS for flags in METHODS[name].plans]
)
def test_drafts_are_those_of_the_flags_and_lose_nothing(
    tmp_path: Path, cli: Cli, name: str, flags: str
) -> None:
    requests = [asked("one two"), asked("three", temperature=1.0, seed=4)]
    line = infer(built(name), tmp_path, *requests, max_generate_length=12)
    done = cli(*line, "--spec-decode", *flags.split(), "--check-lossless")
    assert done.code == 0, done.err
    assert "drafting " in done.err
    assert METHODS[name].plans[flags] in done.err
    assert ["lossless", "yes"] in [line.split() for line in done.out.splitlines()]
    assert [len(answer["output_ids"]) for answer in responses(tmp_path)] == [12, 12]
    drafted = responses(tmp_path)[0]["metrics"]["speculative_decoding"]
    assert drafted["num_spec_steps"] > 0


@every_method
def test_chat_of_two_turns_says_what_plain_decoding_says(cli: Cli, name: str) -> None:
    words = ["chat", "--engine-dir", built(name), "--max-generate-length", 8, "--temperature", 0]
    outputs = []
    for flags in (["--no-spec-decode"], ["--spec-decode", "--show-speculation"]):
        done = cli(*words, *flags, stdin="one two\nthree\n")
        assert done.code == 0, done.err
        outputs.append(done.out)
    assert outputs[0] == outputs[1]
    assert "acceptance length" in done.err


@pytest.mark.parametrize("name", ["eagle1", "medusa", "draft_model", "jetspec", "dspark"])
def test_rejection_draws_drafts_and_keeps_the_distribution(
    tmp_path: Path, cli: Cli, name: str
) -> None:
    check_rejection(cli, built(name), tmp_path)


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("medusa", (), {"up to chain of 5", "up to tree "}),
        ("dspark", ("--temperature", 0.7), {"confidence_threshold"}),
    ],
)
def test_it_is_tuned(
    tmp_path: Path, cli: Cli, name: str, flags: tuple[object, ...], words: set[str]
) -> None:
    report = check_tuning(cli, built(name), tmp_path, *flags)
    tried = "\n".join(row["words"] for row in report["ranked"])
    assert all(word in tried for word in words), tried
    assert {*report["acceptance"]} == ({"0", "0.7"} if flags else {"0"})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"base --draft modelopt --eagle-choices {CHOICES}", "a static tree of 3 levels"),
        (f"base --draft shared-head --medusa-choices {CHOICES}", "a static tree of 3 levels"),
        (f"merged --medusa-choices {CHOICES}", "a static tree of 3 levels"),
        ("base --draft dspark", "a chain: top-k 1, blocks of 7"),
        pytest.param(
            "base --draft jetspec", "a chain: top-k 1, blocks of 7", marks=pytest.mark.deep
        ),
    ],
)
def test_run_makes_the_engines_and_answers(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(checkpoints())
    words = (*LIMITS, "--prompt", "a", "--temperature", 0, "--max-generate-length", 6)
    done = cli("run", *line.split(), *words)
    assert done.code == 0, done.err
    assert said in done.err
    plain = cli("run", line.split()[0], *words, "--no-spec-decode")
    assert (plain.code, plain.out) == (0, done.out), plain.err


@pytest.mark.parametrize("name", [pytest.param("jetspec", marks=pytest.mark.deep), "dspark"])
def test_quantized_draft_goes_the_same_way(tmp_path: Path, cli: Cli, name: str) -> None:
    shop = checkpoints()
    pair = ["--base-model-dir", shop / "base", "--draft-model-dir", shop / name]
    line = ["quantize", "draft", *pair, "--output-dir", tmp_path / "q", "--quantization", "mxfp8"]
    done = cli(*line, "--num-samples", 1, "--calib-seq-len", 32)
    assert done.code == 0, done.err
    assert cli("export", tmp_path / "q", tmp_path, "--base-model-dir", shop / "base").code == 0
    engines = Path(shutil.copytree(built(name), tmp_path / "engines"))
    onnx = tmp_path / METHODS[name].component
    assert cli("build", "--onnx-dir", onnx, "--engine-dir", engines, *LIMITS).code == 0
    done = cli(*infer(engines, tmp_path), "--spec-decode", "--check-lossless")
    assert done.code == 0, done.err


def test_base_without_its_draft_is_drafted_for_from_the_text_if_asked(
    tmp_path: Path, cli: Cli
) -> None:
    engines, onnx = tmp_path / "engines", exported("eagle1") / "llm"
    line = ("--onnx-dir", onnx, "--engine-dir", engines, "--spec-base", *LIMITS)
    assert cli("build", *line).code == 0
    asking = infer(engines, tmp_path, asked("one two one two one two"))
    assert cli(*asking).code == 0
    plain = responses(tmp_path)
    done = cli(*asking, "--drafter", "suffix", "--check-lossless")
    assert done.code == 0, done.err
    assert "drafting a tree of earlier text" in done.err
    assert said(responses(tmp_path)) == said(plain)
    refused = cli(*asking, "--spec-decode")
    assert (refused.code, "no draft engine" in refused.err) == (REFUSED, True), refused.err


# What is told


@every_method
def test_inspect_says_what_each_stage_is(cli: Cli, name: str) -> None:
    method, onnx = METHODS[name], exported(name)
    for path, words in (
        (checkpoints() / name, method.seen),
        (onnx / method.component, method.shown),
        (onnx / "llm", method.shown if name in BLOCKS else ""),
        (built(name), "the draft was exported for this base"),
    ):
        done = cli("inspect", path)
        assert done.code == 0, done.err
        assert words in done.out


def test_inspect_names_the_method_of_a_draft_by_its_tensors(cli: Cli) -> None:
    assert "EAGLE-1 draft (modelopt layout)" in cli("inspect", checkpoints() / "modelopt").out


def test_embedding_stands_beside_the_engines_where_the_draft_has_its_own() -> None:
    found = {name for name in METHODS if (built(name) / "draft_embedding.safetensors").exists()}
    assert found == {"draft_model", "dspark", "eagle1"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("eagle1 --allow-pickle", "the draft's own; export leaves it out where it equals"),
        (
            "medusa --allow-pickle",
            "5 heads of 1 residual block by the file; its config.json says",
        ),
        ("modelopt --probe", "the draft's first token is the base's next one at"),
        ("jetspec --probe", "7 tokens, of which one pass drafts 6"),
        ("dspark --probe", "7 tokens, of which one pass drafts 7"),
    ],
)
def test_check_takes_the_pair(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    monkeypatch.chdir(checkpoints())
    done = cli("check", "base", *line.split())
    assert words in done.out, done.out + done.err


@every_block
def test_block_draft_is_recognised_by_itself(tmp_path: Path, cli: Cli, name: str) -> None:
    shop, component = checkpoints(), METHODS[name].component
    done = cli("export", shop / name, tmp_path, "--base-model-dir", shop / "base")
    assert done.code == 0, done.err
    title = METHODS[name].title.removeprefix("a ")
    assert f"{title}, {'deepspec' if name == 'dspark' else ''}" in done.out
    config = Path(component) / "config.json"
    assert (tmp_path / config).read_text() == (exported(name) / config).read_text()


@every_block
def test_configs_have_the_mirrored_tools_keys(name: str) -> None:
    onnx = exported(name)
    parts = ("llm", METHODS[name].component)
    base, draft = (json.loads((onnx / part / "config.json").read_text()) for part in parts)
    assert (base["spec_decode_type"], draft["spec_decode_type"]) == (name, name)
    size = 8 if name == "dflash" else 7
    section = f"{name}_config"
    shared = {"target_layer_ids": [1, 5], "block_size": size, "mask_token_id": 255}
    own = {
        "dspark": {"markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True},
        "jetspec": {"causal_head": True},
    }
    assert base[section].items() >= shared.items()
    assert draft[section].items() >= (shared | own.get(name, {})).items()
    heads = built(name) / file_names.HEADS
    if name == "dspark":
        assert heads.read_bytes() == (onnx / parts[1] / file_names.HEADS).read_bytes()
    else:
        assert not heads.exists()


# What is refused


@pytest.mark.parametrize(
    ("name", "flags", "code", "words"),
    [
        ("eagle1", "--eagle-choices nosuch", USAGE, ["nosuch", "mc_sim_7b_63"]),
        ("eagle1", "--eagle-use-dynamic-tree", USAGE, ["--eagle-dynamic-tree-max-top-k"]),
        (
            "eagle1",
            f"--eagle-choices {CHOICES} --num-eagle-layers 4",
            REFUSED,
            ["3 levels deep", "--num-eagle-layers 3"],
        ),
        (
            "eagle1",
            "--eagle-use-dynamic-tree --eagle-dynamic-tree-max-top-k 3 --num-eagle-layers 21",
            REFUSED,
            ["max-top-k 3 times --num-eagle-layers 21", "--max-draft-tree-size 63"],
        ),
        (
            "eagle1",
            f"--eagle-choices {CHOICES} --acceptance rejection",
            REFUSED,
            ["is for chains, and the static tree of 7 nodes branches"],
        ),
        (
            "medusa",
            f"--medusa-choices {CHOICES} --num-eagle-layers 3",
            USAGE,
            ["--num-eagle-layers", "leave one of the two out"],
        ),
        (
            "medusa",
            f"--medusa-choices {CHOICES} --num-medusa-heads 2",
            USAGE,
            ["3 levels deep", "--num-medusa-heads 3"],
        ),
        ("medusa", "--spec-draft-step 6", REFUSED, ["5 Medusa heads", "Set it to 5"]),
        ("mtp", "--specDraftTopK 4", REFUSED, ["--spec-draft-top-k 4"]),
        ("mtp", "--eagle-choices [[0],[1]]", REFUSED, ["a static tree was asked for"]),
        ("dflash", "--spec-draft-top-k 9", REFUSED, ["top-k 9", "8 children"]),
        ("dflash", "--spec-draft-step 2", REFUSED, ["--spec-draft-step 2", "one step"]),
        ("dflash", "--spec-verify-size 9", REFUSED, ["blocks of 8", "8 nodes"]),
        (
            "dflash",
            "--spec-draft-top-k 4 --spec-verify-size 33",
            REFUSED,
            ["33", "--max-verify-tree-size 33"],
        ),
    ],
)
def test_plans_that_cannot_be_are_refused(
    tmp_path: Path, cli: Cli, name: str, flags: str, code: int, words: list[str]
) -> None:
    done = cli(*infer(built(name), tmp_path), "--spec-decode", *flags.split())
    assert done.code == code, done.err
    assert all(word in done.err for word in words), done.err
    assert not (tmp_path / "output.json").exists()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("eagle1 OUT --base-model-dir base", ["--allow-pickle"]),
        ("medusa OUT --base-model-dir base", ["--allow-pickle"]),
        ("modelopt OUT", ["--base-model-dir"]),
        ("shared-head OUT", ["--base-model-dir"]),
        ("dflash OUT", ["no lm_head", "--base-model-dir"]),
        ("wide-eagle1 OUT --base-model-dir base", ["hidden states of width 96"]),
        ("wide-medusa OUT --base-model-dir base", ["hidden states of width 96"]),
        ("base OUT --eagle-base --eagle1-base", ["exclude each other"]),
        ("base OUT --eagle1-base --aux-layers 1,2,3", ["--aux-layers means nothing"]),
        ("mtp OUT --mtp --eagle-base", ["--eagle-base and --mtp"]),
        ("mtp OUT --mtp --aux-layers 1,2", ["--aux-layers", "--mtp"]),
        ("mtp OUT --mtp --base-model-dir mtp", ["--base-model-dir", "--mtp"]),
        ("mtp OUT --mtp --dflash-base --dflash-draft-dir dflash", ["--mtp", "--dflash-base"]),
        ("base OUT --mtp", ["base", "no MTP head", "--mtp"]),
        ("modelopt OUT --mtp", ["draft; --mtp belongs to"]),
        ("dflash OUT --mtp", ["draft; --mtp belongs to"]),
        ("draft_model OUT --draft-model", ["--draft-model needs --base-model-dir"]),
        ("draft_model OUT --base-model-dir base", ["--draft-model makes MODEL itself the draft"]),
        (
            "draft_model OUT --draft-model --base-model-dir base --aux-layers 1,2",
            ["reads no layers of its base"],
        ),
        (
            "draft_model OUT --draft-model --base-model-dir base --eagle-base",
            ["--eagle-base belongs to a base"],
        ),
        (
            "draft_model OUT --draft-model --dflash-draft-dir dflash --dflash-base",
            ["--dflash-draft-dir names another one"],
        ),
        ("eagle3 OUT --draft-model --base-model-dir base", ["is an EAGLE-3 draft by itself"]),
        ("base OUT --dflash-base", ["--dflash-draft-dir", "which layers"]),
        ("base OUT --dflash-tree-base", ["--dflash-draft-dir", "which layers"]),
        ("base OUT --dflash-draft", ["--dflash-draft-dir", "which layers"]),
        ("base OUT --dflash-draft-dir dflash", ["--dflash-base"]),
        ("base OUT --dflash-base --dflash-draft --dflash-draft-dir dflash", ["one of"]),
        ("base OUT --dflash-base --dflash-draft-dir base", ["is not a DFlash draft"]),
        ("base OUT --dflash-draft --dflash-draft-dir base", ["is not a DFlash draft"]),
        ("base OUT --jetspec-base --jetspec-draft-dir dspark", ["is not a JetSpec draft"]),
        ("base OUT --dspark-base --dspark-draft-dir jetspec", ["is not a DSpark draft"]),
        (
            "base OUT --jetspec-draft-dir jetspec --dspark-base --dspark-draft-dir dspark",
            ["exclude each other"],
        ),
        ("wide OUT --dflash-base --dflash-draft-dir dflash", ["hidden size", "trained for"]),
        ("wide OUT --dflash-draft --dflash-draft-dir dflash", ["hidden size", "trained for"]),
        ("padded OUT --dflash-base --dflash-draft-dir dflash", ["vocabulary", "trained for"]),
        ("shallow OUT --dflash-base --dflash-draft-dir dflash", ["a base of 8 layers"]),
        ("dflash OUT --base-model-dir base --eagle-base", ["DFlash"]),
        ("dflash OUT --base-model-dir base --aux-layers 1,4", ["DFlash"]),
    ],
)
def test_exports_that_cannot_be_are_refused(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, line: str, words: list[str]
) -> None:
    monkeypatch.chdir(checkpoints())
    done = cli("export", *line.replace("OUT", str(tmp_path / "out")).split())
    assert done.code == REFUSED, done.err
    assert len(done.err.splitlines()) == 2  # what happened, and what to do
    assert all(word in done.err for word in words), done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "other", "remedy"),
    [
        ("eagle1", "medusa", "--eagle1-base"),
        ("medusa", "eagle1", "--medusa-base"),
        ("mtp", "eagle1", "--mtp"),
        ("dflash", "jetspec", "--dflash-base --dflash-draft-dir"),
        ("jetspec", "dflash", "--jetspec-base --jetspec-draft-dir"),
        ("dspark", "dflash", "--dspark-base --dspark-draft-dir"),
    ],
)
def test_base_for_another_method_joins_no_draft(
    tmp_path: Path, cli: Cli, name: str, other: str, remedy: str
) -> None:
    engines = shutil.copytree(built(other), tmp_path / "engines")
    onnx = exported(name) / METHODS[name].component
    done = cli("build", "--onnx-dir", onnx, "--engine-dir", engines, *LIMITS)
    assert done.code == REFUSED
    assert METHODS[name].title in done.err
    assert f"the base was exported for {METHODS[other].title}" in done.err
    assert remedy in done.err


@pytest.mark.parametrize("name", ["jetspec", "dspark"])
def test_heads_of_an_engine_that_changed_are_refused(tmp_path: Path, cli: Cli, name: str) -> None:
    engines = Path(shutil.copytree(built(name), tmp_path / "engines"))
    heads = engines / file_names.HEADS
    if name == "jetspec":  # it has none: one that lies there is not its own
        shutil.copy(engines / "draft_config.json", heads)
    else:
        heads.write_bytes(heads.read_bytes()[:-4] + b"\0\0\xc0\x7f")
    done = cli(*infer(engines, tmp_path), "--spec-decode")
    assert done.code == REFUSED
    assert file_names.HEADS in done.err
