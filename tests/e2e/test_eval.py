"""`eval summarize`: the engine's summaries beside those of transformers, and what is refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.signals import Stopper
from edgespec.evaluation import summarize
from edgespec.runtime.engine import Engine
from tests import made, shared
from tests.e2e.workshop import Cli, cli
from tests.lossless.pairs import shared_pair
from tests.toys.vision import write_vlm

__all__ = ["cli"]  # a fixture

TEXTS = ("one two three " * 40, "four five", "six seven eight nine " * 9)
LENGTHS = ("--output-len", 6, "--max-input-len", 20)


@pytest.fixture(scope="module")
def pair() -> Path:
    return shared_pair("llama", "eagle")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    lines = [json.dumps({"article": text, "highlights": f"{text[:9]} tok1"}) for text in TEXTS]
    path = tmp_path / "articles.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_answers_equal_those_of_transformers_with_drafts_and_without(
    cli: Cli, pair: Path, dataset: Path, tmp_path: Path
) -> None:
    command = ("eval", "summarize", "--engine-dir", pair / "engines", "--dataset", dataset)
    same = ("--hf-model-dir", pair / "base", "--tokenizer-dir", pair / "base", "--test-hf")
    found: list[dict[str, Any]] = []
    for name, more in (("plain", ()), ("drafted", ("--spec-decode", "--check-lossless"))):
        output = tmp_path / f"{name}.json"
        shown = cli(*command, *LENGTHS, *same, *more, "--output-file", output, "--json")
        assert shown.code == 0, shown.err
        kept = json.loads(output.read_text())
        assert {**json.loads(shown.out), "answers": kept["answers"]} == kept
        assert kept["transformers"]["identical"] == kept["transformers"]["compared"] == len(TEXTS)
        found.append(kept)
    plain, drafted = found
    assert drafted["lossless_check"] == {"compared": 3, "differing": 0, "not_explained": 0}
    assert drafted["speculative"]["base_passes_after_prefill"] > 0
    for one, other in zip(plain["answers"], drafted["answers"], strict=True):
        assert one["output_ids"] == other["output_ids"] == one["transformers_output_ids"]
        assert one["prompt_tokens"] <= 20
    rouge = ("rouge1", "rouge2", "rougeL", "rougeLsum")
    assert all(plain["plain"][kind] == plain["transformers"][kind] for kind in rouge)


def test_a_model_that_sees_images_is_compared_with_transformers_too(
    cli: Cli, dataset: Path, tmp_path: Path
) -> None:
    base = shared.made_once("vlm to evaluate", lambda path: write_vlm(path, "qwen2_5_vl"))
    engines = tmp_path / "engines"
    sizes = ("--max-input-len", 32, "--max-kv-cache-capacity", 64)
    built = cli("build", "--onnx-dir", made.exported(base) / "llm", "--engine-dir", engines, *sizes)
    assert built.code == 0, built.err
    command = ("eval", "summarize", "--engine-dir", engines, "--dataset", dataset, *LENGTHS)
    shown = cli(*command, "--hf-model-dir", base, "--tokenizer-dir", base, "--test-hf", "--json")
    assert shown.code == 0, shown.err
    found = json.loads(shown.out)["transformers"]
    assert found["identical"] == found["compared"] == len(TEXTS)


def test_plain_answers_are_scored_beside_those_of_a_lossy_rule(
    cli: Cli, pair: Path, dataset: Path, tmp_path: Path
) -> None:
    command = ("eval", "summarize", "--engine-dir", pair / "engines", "--dataset", dataset)
    config = tmp_path / "typical.yaml"
    config.write_text("speculative_config: {decoding_type: AUTO, posterior_threshold: 1.0e-9}")
    found = []
    for rule in (("--spec-decode", "--eagle_posterior_threshold", 1e-9), ("--config", config)):
        shown = cli(
            *command,
            *LENGTHS,
            *rule,
            "--temperature",
            1,
            "--seed",
            7,
            "--compare-quality",
            "--json",
        )
        assert shown.code == 0, shown.err
        assert "LOSSY" in shown.err
        found.append(json.loads(shown.out))
    one, other = found
    assert one["acceptance"] == "typical"
    assert one["temperature"] == 1
    assert one["quality_comparison"]["compared"] == len(TEXTS)
    assert one["quality_comparison"]["identical"] < len(TEXTS)
    assert one["quality_comparison"] == other["quality_comparison"]
    assert one["speculative"]["rouge1"] == other["speculative"]["rouge1"]
    assert one["plain"]["completion_tokens"] > 0


def test_typical_acceptance_is_said_to_mean_nothing_at_temperature_zero(
    cli: Cli, pair: Path, dataset: Path
) -> None:
    command = ("eval", "summarize", "--engine-dir", pair / "engines", "--dataset", dataset)
    shown = cli(*command, *LENGTHS, "--spec-decode", "--eagle-posterior-threshold", 0.09)
    assert shown.code == 0, shown.err
    assert "at temperature 0 is greedy" in shown.err


def test_long_article_is_cut_and_the_question_stays(pair: Path, dataset: Path) -> None:
    from edgespec.evaluation.articles import read_articles

    with Engine(pair / "engines", spec_decode=False) as engine:
        ending = engine.encode(summarize.ENDING)[-2:]
        for prompt in summarize.prompts_of(engine, read_articles(dataset), 20, chat=False):
            assert len(prompt.token_ids) <= 20
            assert prompt.token_ids[-2:] == ending
            text = engine.decode(prompt.token_ids)
            assert text.split()[:2] == prompt.article.text.split()[:2]


@pytest.mark.parametrize(
    ("flags", "code", "wanted"),
    [
        (("--rouge1-threshold", 99), 1, "below --rouge1-threshold 99"),
        (("--check-lossless",), 2, "nothing without --spec-decode"),
        (("--compare-quality",), 2, "nothing without --spec-decode"),
        (("--eagle_posterior_threshold", 0.09), 2, "nothing without --spec-decode"),
        (
            ("--spec-decode", "--acceptance", "typical", "--check-lossless"),
            3,
            "Give --compare-quality",
        ),
        (("--temperature", 0.5, "--hf-model-dir", "."), 2, "answers greedily"),
        (("--batch-size", 64), 3, "--max-batch-size 64"),
        (("--output-len", 100000), 3, "--max-kv-cache-capacity"),
        (("--max-ite", 20), 2, "--num-articles"),
        (("--top-k", 5), 2, "all tokens are drawn from"),
    ],
)
def test_what_cannot_be_is_answered(
    cli: Cli, pair: Path, dataset: Path, flags: tuple[object, ...], code: int, wanted: str
) -> None:
    command = ("eval", "summarize", "--engine-dir", pair / "engines", "--dataset", dataset)
    shown = cli(*command, *LENGTHS, *flags)
    assert shown.code == code, shown.err
    assert wanted in shown.err


def test_other_tokenizer_is_refused(cli: Cli, pair: Path, tmp_path: Path) -> None:
    command = ("infer", "--engine-dir", pair / "engines", "--input_text", "one")
    shown = cli(*command, "--tokenizer-dir", tmp_path, "--max_output_len", 3)
    assert (shown.code, "has no tokenizer.json" in shown.err) == (2, True)
    (tmp_path / "tokenizer.json").write_text("{}")
    shown = cli(*command, "--tokenizer-dir", tmp_path, "--max_output_len", 3)
    assert (shown.code, "is not the one" in shown.err) == (2, True)
    own = cli(*command, "--tokenizer-dir", pair / "base", "--max_output_len", 3)
    prompt = ("--prompt", "one", "--no-chat-template", "--max-generate-length", 3)
    again = cli("infer", "--engine-dir", pair / "engines", *prompt, "--seed", 1)
    assert (own.code, again.code) == (0, 0), own.err


def test_what_is_done_is_kept_when_it_is_stopped(
    cli: Cli, pair: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_queue, enter, stoppers = Engine.run_queue, Stopper.__enter__, list[Stopper]()

    def stopped(self: Engine, *args: Any) -> Any:
        for number, item in enumerate(run_queue(self, *args)):
            yield item
            if number == 8:
                signal.raise_signal(signal.SIGINT)
                while not stoppers[-1]():  # a thread takes notice of the signal
                    os.sched_yield()

    def entered(self: Stopper) -> Stopper:
        stoppers.append(self)
        return enter(self)

    monkeypatch.setattr(Engine, "run_queue", stopped)
    monkeypatch.setattr(Stopper, "__enter__", entered)
    output = tmp_path / "out.json"
    command = ("eval", "summarize", "--engine-dir", pair / "engines", "--dataset", dataset)
    shown = cli(*command, *LENGTHS, "--output-file", output)
    assert shown.code == 130
    answers = json.loads(output.read_text())["answers"]
    assert "output_text" in answers[0]
    assert not all("output_text" in answer for answer in answers)
