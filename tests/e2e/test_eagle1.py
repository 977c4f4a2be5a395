"""An EAGLE-1 draft as SafeAILab publishes it, from its pickled checkpoint to answers, with the
flags of TensorRT-LLM's EAGLE example; and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests import shared, toys
from tests.e2e.workshop import Cli, asked, check_rejection, cli, infer, responses, said

__all__ = ["cli"]  # a fixture

USAGE, REFUSED = 2, 3
SIZES = {"layers": 8, "hidden": 32, "heads": 2, "kv_heads": 2}
LIMITS = ("--maxInputLen", 48, "--maxKVCacheCapacity", 96)
CHOICES = "[[0], [0, 0], [1], [1, 0], [2], [0, 0, 0], [1, 0, 2]]"  # 7 nodes, 3 levels


def make_pair(path: Path) -> None:
    base = toys.make_base(path / "base", "llama", **SIZES)
    toys.make_eagle1(path / "draft", base, pickle=True, dtype="float16")
    toys.make_eagle1(path / "modelopt", base, "modelopt", seed=2)
    toys.make_draft(path / "eagle3", base, "eagle")
    other = toys.make_base(path / "other", "llama", **SIZES | {"hidden": 64})
    toys.make_eagle1(path / "foreign", other)


@pytest.fixture(scope="module")
def pair() -> Path:
    return shared.made_once("an EAGLE-1 pair", make_pair)


@pytest.fixture(scope="module")
def engines(pair: Path) -> Path:
    """Made by the commands that a user types."""
    from edgespec.cli.main import run

    def make(path: Path) -> None:
        base, draft = str(pair / "base"), str(pair / "draft")
        lines = [
            ["export", base, str(path / "base"), "--eagle1-base"],
            ["export", draft, str(path / "draft"), "--base-model-dir", base, "--allow-pickle"],
        ]
        for part, flag in (("base", "--specBase"), ("draft", "--specDraft")):
            lines.append(["build", "--onnxDir", str(path / part / "llm"), flag])
            lines[-1] += ["--engineDir", str(path / "engines"), *map(str, LIMITS)]
        for line in lines:
            assert run(line) == 0

    return shared.made_once("engines of an EAGLE-1 pair", make) / "engines"


def drafting(engines: Path, tmp_path: Path, *flags: object) -> list[object]:
    return [*infer(engines, tmp_path, asked("one two")), "--spec-decode", *flags]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ((), "drafting a chain: top-k 1, step 3, verify size 4"),
        (("--max-draft-len", 2), "drafting a chain: top-k 1, step 2, verify size 3"),
        (
            ("--eagle_choices", CHOICES),
            "drafting a tree: top-k 3, a static tree of 3 levels, verify size 8",
        ),
        (
            ("--eagle-choices", "mc_sim_7b_63", "--num_eagle_layers", 4, "--max_draft_len", 63),
            "drafting a tree: top-k 10, a static tree of 4 levels, verify size 64",
        ),
        (
            ("--max_non_leaves_per_layer", 10),
            "drafting a tree: top-k 10, a static tree of 4 levels, verify size 64",
        ),
        (
            ("--eagle_use_dynamic_tree", "--eagle_dynamic_tree_max_top_k", 3),
            "drafting a tree: top-k 3, step 4, verify size 31",  # 3 + 3 * 9, and the root
        ),
        (
            (
                *("--eagle-use-dynamic-tree", "--eagle-dynamic-tree-max-top-k", 3),
                *("--num-eagle-layers", 3, "--max-draft-len", 20),
            ),
            "drafting a tree: top-k 3, step 3, verify size 21",
        ),
    ],
)
def test_trees_are_those_of_the_flags_and_lose_nothing(
    engines: Path, tmp_path: Path, cli: Cli, flags: tuple[object, ...], line: str
) -> None:
    done = cli(*drafting(engines, tmp_path, *flags, "--check-lossless"))
    assert done.code == 0, done.err
    assert line in done.err
    assert "lossless" in done.out
    (answer,) = responses(tmp_path)
    assert len(answer["output_ids"]) == 8


def test_rejection_draws_drafts_and_keeps_the_distribution(
    engines: Path, tmp_path: Path, cli: Cli
) -> None:
    check_rejection(cli, engines, tmp_path)
    done = cli(
        *drafting(engines, tmp_path, "--eagle-choices", CHOICES, "--acceptance", "rejection")
    )
    assert done.code == REFUSED
    assert "is for chains, and the static tree of 7 nodes branches" in done.err


def test_base_without_its_draft_is_drafted_for_from_the_text(
    pair: Path, engines: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory with only the base's engine: nothing drafts by itself, and `suffix` does if it is
    named."""
    alone = tmp_path / "engines"
    onnx = engines.parent / "base" / "llm"
    assert cli("build", "--onnx-dir", onnx, "--engine-dir", alone, "--spec-base", *LIMITS).code == 0
    line = infer(alone, tmp_path, asked("one two one two one two"))
    assert cli(*line).code == 0
    plain = responses(tmp_path)
    done = cli(*line, "--drafter", "suffix", "--check-lossless")
    assert done.code == 0, done.err
    assert "drafting a tree of earlier text" in done.err
    assert said(responses(tmp_path)) == said(plain)
    for words, code in (((), 0), (("--drafter", "suffix"), 0), (("--spec-decode",), REFUSED)):
        turns = io.TextIOWrapper(io.BytesIO(b"one two one two\n"))
        monkeypatch.setattr("sys.stdin", turns)
        short = ("--temperature", 0, "--max-generate-length", 8)
        done = cli("chat", "--engine-dir", alone, *short, *words)
        assert done.code == code, done.err
        assert ("drafting a tree of earlier text" in done.err) == ("suffix" in words)
        assert ("decoding plainly" in done.err) == (not words)
    refused = cli(*line, "--spec-decode")
    assert (refused.code, "no draft engine" in refused.err) == (REFUSED, True), refused.err


def test_choices_stand_in_a_file_too(engines: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "tree.yaml").write_text("- [0]\n- [0, 0]\n- [1]\n")
    done = cli(*drafting(engines, tmp_path, "--eagle-choices", tmp_path / "tree.yaml"))
    assert done.code == 0, done.err
    assert "top-k 2, a static tree of 2 levels, verify size 4" in done.err


DYNAMIC = ("--eagle-use-dynamic-tree", "--eagle-dynamic-tree-max-top-k", 3)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (
            ("--eagle-choices", CHOICES, *DYNAMIC),
            USAGE,
            ["--eagle-choices and --eagle-use-dynamic-tree exclude each other"],
        ),
        (("--eagle-use-dynamic-tree",), USAGE, ["--eagle-dynamic-tree-max-top-k"]),
        (DYNAMIC[1:], USAGE, ["--eagle-use-dynamic-tree"]),
        (("--eagle-choices", "[[1, 0]]"), USAGE, ["[1, 0] has no parent"]),
        (("--eagle-choices", "nosuch.json"), USAGE, ["nosuch.json", "No such file"]),
        (("--eagle-choices", "nosuch"), USAGE, ["nosuch", "mc_sim_7b_63"]),
        (
            ("--eagle-choices", CHOICES, "--num-eagle-layers", 4),
            REFUSED,
            ["3 levels deep", "--num-eagle-layers 3"],
        ),
        (
            ("--eagle-choices", CHOICES, "--max-non-leaves-per-layer", 1),
            REFUSED,
            ["2 nodes with children at depth 1", "--max-non-leaves-per-layer to 2"],
        ),
        (("--eagle-choices", CHOICES, "--max-draft-len", 6), REFUSED, ["7 nodes"]),
        (
            ("--eagle-choices", str([[i] for i in range(64)])),
            REFUSED,
            ["65 nodes, the root included", "--max-verify-tree-size 65"],
        ),
        (
            (*DYNAMIC, "--num-eagle-layers", 21),
            REFUSED,
            ["max-top-k 3 times --num-eagle-layers 21", "--max-draft-tree-size 63"],
        ),
    ],
)
def test_trees_that_cannot_be_are_refused(
    engines: Path, tmp_path: Path, cli: Cli, flags: tuple[object, ...], code: int, words: list[str]
) -> None:
    done = cli(*drafting(engines, tmp_path, *flags))
    assert done.code == code, done.err
    for word in words:
        assert word in done.err
    assert not (tmp_path / "output.json").exists()


def test_a_pickled_draft_wants_a_flag(pair: Path, tmp_path: Path, cli: Cli) -> None:
    done = cli("export", pair / "draft", tmp_path, "--base-model-dir", pair / "base")
    assert done.code == REFUSED
    assert "--allow-pickle" in done.err


def test_a_draft_without_its_base_is_refused(pair: Path, tmp_path: Path, cli: Cli) -> None:
    done = cli("export", pair / "modelopt", tmp_path)
    assert (done.code, "--base-model-dir" in done.err) == (REFUSED, True)


def test_another_base_is_refused_and_checked(pair: Path, tmp_path: Path, cli: Cli) -> None:
    done = cli("export", pair / "foreign", tmp_path, "--base-model-dir", pair / "base")
    assert done.code == REFUSED
    assert "hidden states of width 64" in done.err
    checked = cli("check", pair / "base", pair / "foreign")
    assert checked.code == REFUSED
    good = cli("check", pair / "base", pair / "modelopt", "--probe", "--json")
    topics = {r["topic"]: r["level"] for r in json.loads(good.out)["results"]}
    assert topics["hidden size"] == topics["head"] == topics["embedding"] == "ok"
    copied = cli("check", pair / "base", pair / "draft", "--allow-pickle").out
    assert "the draft's own; export leaves it out where it equals the base's" in copied


def test_a_base_of_another_kind_of_draft_is_refused(pair: Path, tmp_path: Path, cli: Cli) -> None:
    base, draft = tmp_path / "base", tmp_path / "draft"
    assert cli("export", pair / "base", base, "--eagle1-base").code == 0
    assert cli("export", pair / "eagle3", draft, "--base-model-dir", pair / "base").code == 0
    for part, flag in ((base, "--spec-base"), (draft, "--spec-draft")):
        done = cli(
            *("build", "--onnx-dir", part / "llm", "--engine-dir", tmp_path / "e", flag, *LIMITS)
        )
    assert done.code == REFUSED
    assert "the base was exported for an EAGLE-1 draft" in done.err
    assert "--eagle-base" in done.err
    both = cli("export", pair / "base", tmp_path / "both", "--eagle-base", "--eagle1-base")
    assert (both.code, "exclude each other" in both.err) == (REFUSED, True)
    layers = cli(
        "export", pair / "base", tmp_path / "both", "--eagle1-base", "--aux-layers", "1,2,3"
    )
    assert (layers.code, "--aux-layers means nothing" in layers.err) == (REFUSED, True)


def test_one_command_from_the_pair_to_an_answer(
    pair: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    args = ("run", pair / "base", "--draft", pair / "modelopt", "--prompt", "a", "--temperature", 0)
    limits = ("--max-input-len", 48, "--max-kv-cache-capacity", 64, "--max-generate-length", 6)
    plain = cli("run", pair / "base", "--prompt", "a", "--temperature", 0, *limits)
    done = cli(*args, *limits, "--eagle-choices", CHOICES)
    assert (done.code, done.out) == (0, plain.out), done.err
    assert "a static tree of 3 levels" in done.err


def test_inspect_says_what_it_is(pair: Path, cli: Cli) -> None:
    draft = cli("inspect", pair / "modelopt")
    assert (draft.code, "EAGLE-1" in draft.out) == (0, True)
