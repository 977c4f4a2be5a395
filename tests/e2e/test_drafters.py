"""`--drafter`, and what drafts where there is no draft engine, by the commands of a user."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import edgespec
from edgespec.contract import Limits
from edgespec.errors import BundleError, EngineClosed
from edgespec.runtime.drafters.ngram import NgramOptions
from edgespec.runtime.engine_request import EngineRequest, plan_of
from edgespec.runtime.plans.plan import Sizes
from tests import made, toys
from tests.e2e.workshop import Cli, asked, cli

__all__ = ["cli"]
LIMITS = Limits(max_input_len=96, max_kv_cache_capacity=160, max_verify_tree_size=12)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain engine with room for drafts."""
    return made.built(LIMITS, plain_onnx(tmp_path_factory))


@pytest.fixture(scope="module")
def without_room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain engine that verifies no drafts."""
    limits = Limits(max_input_len=96, max_kv_cache_capacity=160, max_verify_tree_size=1)
    return made.built(limits, plain_onnx(tmp_path_factory))


def plain_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = toys.make_base(tmp_path_factory.mktemp("plain") / "base", "llama", layers=2)
    return made.exported(base) / "llm"


class Hidden:
    """Asks for what a plain engine does not give."""

    needs_hidden_states = True

    def propose(self, context: edgespec.DraftContext) -> None: ...


def test_drafter_that_reads_hidden_states_is_named_where_there_are_none(engines: Path) -> None:
    with pytest.raises(BundleError) as refused:
        edgespec.load(engines, drafter=Hidden())
    assert refused.value.what.startswith("the drafter Hidden has needs_hidden_states, and ")
    assert "Or let the drafter do without hidden states." in refused.value.remedy


@pytest.fixture
def input_file(tmp_path: Path) -> Path:
    """Requests that repeat themselves."""
    requests = [asked("one two one two one two " * 2 + "x" * i) for i in range(3)]
    content = {"temperature": 0, "max_generate_length": 40, "requests": requests}
    path = tmp_path / "input.json"
    path.write_text(json.dumps(content | {"logit_bias": {"0": -100, "2": -100}}))
    return path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--spec-decode"], "drafting a tree of earlier text, as far as it pays: top-k 4, step 11"),
        (["--drafter", "Suffix_Decoding"], "drafting a tree of earlier text"),
        (["--drafter", "suffix", "--spec-draft-top-k", "1"], "drafting a chain of earlier text"),
        (["--drafter", "ngram"], "drafting a chain of n-gram matches: top-k 1, step 3"),
        (["--drafter", "ngram", "--spec-draft-step", "6"], "n-gram matches: top-k 1, step 6"),
        (["--drafter", "suffix", "--spec-verify-size", "5"], "verify size 5\n"),
        (["--drafter", "ngram", "--max-draft-len", "6"], "n-gram matches: top-k 1, step 6"),
        (["--drafter", "suffix", "--max_draft_len", "5"], "as it pays: top-k 4, step 5"),
        (["--spec-decode", "--maxDraftLen", "5"], "as it pays: top-k 4, step 5"),
        (["--drafter", "ngram", "--drafter-option", "max_draft_len=5"], "top-k 1, step 5"),
        (["--max-matching-ngram-size", "4", "--spec-decode"], "as it pays: top-k 4, step 11"),
    ],
)
def test_infer_drafts_and_loses_nothing(
    cli: Cli, engines: Path, input_file: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    out = tmp_path / "out.json"
    common = ["--engine-dir", engines, "--input-file", input_file, "--output-file", out]
    done = cli("infer", *common, *words, "--check-lossless", "--json")
    assert done.code == 0, done.err
    assert said in done.err
    assert done.err.count("has no draft engine: drafting by suffix decoding, which needs none") == (
        "--spec-decode" in words
    )
    assert json.loads(done.out)["lossless"].startswith("yes")
    responses = json.loads(out.read_text())["responses"]
    blocks = [response["metrics"]["speculative_decoding"] for response in responses]
    assert sum(block["num_accepted_draft_tokens"] for block in blocks) > 0


def test_options_of_flags_are_those_of_the_drafter(engines: Path) -> None:
    keys = {"max_matching_ngram_size": 1, "is_keep_all": False}
    asked = EngineRequest(drafter="ngram", options=keys, sizes=Sizes(steps=6))
    by_name = asked.settled(engines).speculative_config
    wanted = NgramOptions(max_draft_len=6, max_matching_ngram_size=1, is_keep_all=False)
    assert by_name is not None
    assert (by_name.drafts_by, by_name.options) == ("ngram", wanted)
    file = edgespec.NGramDecodingConfig(max_draft_len=2, is_use_oldest=False)
    asked = EngineRequest(speculative_config=file, options=keys | {"max_draft_len": 6})
    both = asked.settled(engines).speculative_config
    assert both is not None
    assert both.options == replace(wanted, is_use_oldest=False)


def test_request_that_is_not_the_command_line_s_opens_the_same(engines: Path) -> None:
    asked = EngineRequest(spec_decode=True, sizes=Sizes(1, 2, 3))
    with asked.open(engines) as opened:
        assert opened.engine.method == "suffix"
        assert plan_of(opened.engine, asked.sizes) == opened.engine.plan(1, 2, 3)
        assert "drafting by suffix decoding" in "".join(opened.notes)
    with pytest.raises(EngineClosed):
        opened.engine.plan()


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_warm_up_teaches_the_drafts_nothing(
    cli: Cli, engines: Path, input_file: Path, tmp_path: Path, drafter: str
) -> None:
    """Its answers are those of the measured run: drafts of them would make figures that no user
    gets."""
    found = []
    for warmup in ("0", "2"):
        out = tmp_path / f"out-{warmup}.json"
        words = ["--drafter", drafter, "--warmup", warmup, "--output-file", out]
        done = cli("infer", "--engine-dir", engines, "--input-file", input_file, *words)
        assert done.code == 0, done.err
        responses = json.loads(out.read_text())["responses"]
        found.append([r["metrics"]["speculative_decoding"] for r in responses])
    cold, warm = ([block["num_accepted_draft_tokens"] for block in run] for run in found)
    assert cold == warm


def test_chat_says_in_two_turns_what_it_says_plainly(engines: Path, cli: Cli) -> None:
    words = ["chat", "--engine-dir", engines, "--temperature", "0", "--max-generate-length", "16"]
    turns = "one two one two one two\none two\n"
    plain = cli(*words, "--no-spec-decode", stdin=turns)
    drafted = cli(*words, "--show-speculation", stdin=turns)
    assert (plain.code, drafted.code) == (0, 0), plain.err + drafted.err
    assert drafted.out == plain.out
    assert "drafting by suffix decoding, which needs none" in drafted.err
    assert drafted.err.count("acceptance length") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--drafter", "suffixes"], "there is no drafting method 'suffixes'. Known: suffix, ngram"),
        (["--drafter", "eagle3"], "EAGLE-3 drafts with an engine of its own"),
        (["--spec-draft-step", "2"], "mean nothing without --spec-decode"),
        (["--max-draft-len", "2"], "mean nothing without --spec-decode"),
        (["--max-matching-ngram-size", "2"], "mean nothing without --spec-decode"),
        (
            ["--drafter", "ngram", "--max-draft-len", "4", "--spec-draft-step", "3"],
            "give one or the other",
        ),
        (
            ["--drafter", "suffix", "--drafter-option", "is_keep_all=false"],
            "is_keep_all is not a key of decoding_type Suffix",
        ),
        (
            ["--drafter", "ngram", "--max-matching-ngram-size", "65"],
            "--max-matching-ngram-size is 65",
        ),
        (["--drafter", "ngram", "--drafter-option", "is_keep_all"], "is not KEY=VALUE"),
    ],
)
def test_other_drafters_are_usage_errors(
    cli: Cli, engines: Path, words: list[str], said: str
) -> None:
    done = cli("infer", "--engine-dir", engines, "--prompt", "Hi", *words)
    assert (done.code, said in done.err) == (2, True), done.err


def test_n_grams_draft_no_trees(cli: Cli, engines: Path) -> None:
    words = ["--drafter", "ngram", "--spec-draft-top-k", "2"]
    done = cli("infer", "--engine-dir", engines, "--prompt", "Hi", *words)
    assert (done.code, "n-grams draft chains, and no trees" in done.err) == (3, True), done.err


def test_tree_of_a_drafter_that_makes_none_names_the_flag_of_chains(
    cli: Cli, engines: Path
) -> None:
    words = ["--drafter", "ngram", "--eagle-choices", "[[0], [1]]"]
    done = cli("infer", "--engine-dir", engines, "--prompt", "Hi", *words)
    assert done.code == 3
    assert "a static tree was asked for, and this drafter makes none" in done.err
    assert "--spec-draft-step" in done.err


def test_run_drafts_with_finished_engines_where_they_have_room(
    cli: Cli, engines: Path, without_room: Path
) -> None:
    """Asked for drafts, an engine without room says how to build it; else it decodes plainly."""
    words = ["--prompt", "one two one two one", "--temperature", "0", "--max-generate-length", "8"]
    drafted, plain = cli("run", engines, *words), cli("run", without_room, *words)
    assert (drafted.code, plain.code) == (0, 0), drafted.err + plain.err
    assert drafted.out == plain.out
    assert ("suffix decoding" in drafted.err, "suffix decoding" in plain.err) == (True, False)
    refused = cli("run", without_room, *words, "--spec-decode")
    assert "built to verify no drafts" in refused.err
    assert "--max-verify-tree-size" in refused.err
    contradicting = cli("run", engines, *words, "--no-spec-decode", "--drafter", "suffix")
    assert (contradicting.code, "--drafter means nothing" in contradicting.err) == (2, True)
