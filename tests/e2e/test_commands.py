"""From two checkpoints to answers, as a user types it: the guide's commands in processes of their
own, then the API."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.errors import LimitError
from edgespec.runtime.loop.generation import Chunk, Response
from tests import toys
from tests.e2e.workshop import Outcome, process

REQUESTS = {
    "batch_size": 1,
    "temperature": 0.0,
    "max_generate_length": 20,
    "requests": [
        {"messages": [{"role": "user", "content": "What is 12 + 30?"}]},
        {
            "messages": [{"role": "user", "content": "Tell of the boat."}],
            "temperature": 1.0,
            "seed": 5,
        },
        {
            "messages": [{"role": "user", "content": "And now plainly."}],
            "disable_spec_decode": True,
        },
    ],
}


@dataclass
class Workplace:
    """The guide's $W, with $M = toy in it."""

    path: Path

    def edgespec(self, line: str, *, code: int = 0) -> Outcome:
        """Run one command line of the guide here; fails with what it said unless it exits with
        `code`."""
        with contextlib.chdir(self.path):
            done = process(*line.split(), HF_HUB_OFFLINE="1")
        assert done.code == code, (line, done)
        return done

    def output(self, name: str = "output.json") -> list[dict[str, Any]]:
        document = json.loads((self.path / name).read_text(encoding="utf-8"))
        assert list(document) == ["input_file", "responses"]
        responses: list[dict[str, Any]] = document["responses"]
        return responses


BUILD = (
    "build --engineDir toy/engines --maxBatchSize 1 --maxInputLen 1024 --maxKVCacheCapacity 4096"
)
INFER = "infer --engineDir toy/engines --inputFile input.json"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Everything up to and with `infer --specDecode`, in the order and the spelling of the
    guide."""
    place = Workplace(tmp_path_factory.mktemp("work"))
    base = toys.make_base(place.path / "Toy-Base", "qwen3", layers=8, vocab=320)
    toys.make_draft(place.path / "Toy_EAGLE3", base, "eagle")
    place.edgespec("export Toy-Base toy/onnx/base_export --eagle-base")
    place.edgespec("export Toy_EAGLE3 toy/onnx/draft_export")
    for name in ("base", "draft"):  # cp -a $M/onnx/base_export/llm/. $M/onnx/base/
        shutil.copytree(place.path / f"toy/onnx/{name}_export/llm", place.path / f"toy/onnx/{name}")
    place.edgespec(f"{BUILD} --onnxDir toy/onnx/base --maxVerifyTreeSize 60 --specBase")
    place.edgespec(f"{BUILD} --onnxDir toy/onnx/draft --maxDraftTreeSize 60 --specDraft")
    (place.path / "input.json").write_text(json.dumps(REQUESTS))
    place.edgespec(f"{INFER} --outputFile output.json --specDecode")
    return place


@pytest.fixture(scope="module")
def checked(done: Workplace) -> dict[str, Any]:
    """The summary of a run with trees and --checkLossless; its output is checked.json."""
    sizes = "--specDraftTopK 4 --specDraftStep 3 --specVerifySize 16"
    said = done.edgespec(
        f"{INFER} --outputFile checked.json --specDecode --checkLossless {sizes} --json"
    )
    assert "top-k 4, step 3, verify size 16" in said.err
    summary: dict[str, Any] = json.loads(said.out)
    return summary


@pytest.fixture(scope="module")
def plain(done: Workplace) -> list[dict[str, Any]]:
    done.edgespec(f"{INFER} --outputFile plain.json")
    return done.output("plain.json")


def assert_counts_reconcile(response: dict[str, Any]) -> None:
    metrics = response["metrics"]
    block = metrics["speculative_decoding"]
    accepted, drafted, steps = (
        block["per_step_accepted"],
        block["per_step_drafted"],
        block["num_spec_steps"],
    )
    assert len(accepted) == len(drafted) == steps == metrics["base_passes_after_prefill"]
    assert all(0 <= a <= d for a, d in zip(accepted, drafted, strict=True))
    assert block["num_accepted_draft_tokens"] == sum(accepted)
    assert block["num_draft_tokens"] == sum(drafted)
    assert sum(block["acceptance_histogram"]) == steps
    assert sum(a * count for a, count in enumerate(block["acceptance_histogram"])) == sum(accepted)
    assert block["mean_acceptance_length"] == pytest.approx(1 + sum(accepted) / steps)
    assert block["draft_acceptance_rate"] == pytest.approx(sum(accepted) / sum(drafted))
    whole = 1 + sum(accepted) + steps
    cut = (
        response["finish_reason"] == "end-of-sequence"
    )  # a stop token inside the last run takes its bonus away
    assert metrics["completion_tokens"] in ((whole, whole - 1) if cut else (whole,))


@pytest.mark.parametrize("name", ["output.json", "checked.json"])
def test_counts_of_each_speculative_response_reconcile(
    done: Workplace, checked: dict[str, Any], name: str
) -> None:
    for response in done.output(name)[:2]:
        assert_counts_reconcile(response)


def test_responses_carry_text_ids_prompt_and_reason(done: Workplace) -> None:
    responses = done.output()
    assert [response["request_idx"] for response in responses] == [0, 1, 2]
    for response, request in zip(responses, REQUESTS["requests"], strict=True):
        assert response["messages"] == request["messages"]
        question = request["messages"][0]["content"]
        wanted = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        assert response["formatted_complete_request"] == wanted
        assert response["finish_reason"] in ("end-of-sequence", "max-length")
        assert len(response["output_ids"]) == response["metrics"]["completion_tokens"]
        assert (len(response["output_ids"]) == 20) or response["finish_reason"] == "end-of-sequence"
        assert all(0 <= token < 320 for token in response["output_ids"])
    assert [response["seed"] for response in responses] == [None, 5, None]


def test_times_are_ordered_and_stages_lie_within_the_request(done: Workplace) -> None:
    for response in done.output():
        metrics = response["metrics"]
        assert 0 < metrics["time_to_first_token_s"] <= metrics["request_latency_s"]
        stages = metrics["stages_s"]
        spent = [stages[name] for name in ("prefill", "draft", "verify", "commit")]
        assert all(seconds >= 0 for seconds in spent)
        assert sum(spent) <= metrics["request_latency_s"]
        assert metrics["engine_s"] + metrics["host_s"] == pytest.approx(sum(spent))
        assert min(metrics["engine_s"], metrics["host_s"]) >= 0


def test_speculative_answers_equal_those_of_a_plain_run(
    done: Workplace, checked: dict[str, Any], plain: list[dict[str, Any]]
) -> None:
    wanted = [(r["output_ids"], r["output_text"], r["finish_reason"]) for r in plain]
    for name in ("output.json", "checked.json"):
        assert [
            (r["output_ids"], r["output_text"], r["finish_reason"]) for r in done.output(name)
        ] == wanted
    assert all("speculative_decoding" not in r["metrics"] for r in plain)


def test_request_that_disables_drafts_is_decoded_plainly(
    done: Workplace, checked: dict[str, Any]
) -> None:
    for name in ("output.json", "checked.json"):
        metrics = done.output(name)[2]["metrics"]
        assert "speculative_decoding" not in metrics
        assert metrics["base_passes_after_prefill"] == metrics["completion_tokens"] - 1


def test_check_lossless_reports_each_request_and_the_whole(
    done: Workplace, checked: dict[str, Any]
) -> None:
    assert [response.get("lossless") for response in done.output("checked.json")] == [
        {"equal": True}
    ] * 2 + [None]
    assert checked["lossless"] == "yes"
    assert (checked["requests"], checked["failed"]) == (3, 0)


def test_summary_is_the_sum_of_the_responses(done: Workplace, checked: dict[str, Any]) -> None:
    responses = done.output("checked.json")[:2]  # the third disables drafts
    found = checked["speculative"]
    assert checked["without_drafts"] == 1
    assert found["completion_tokens"] == sum(r["metrics"]["completion_tokens"] for r in responses)
    assert found["base_passes_after_prefill"] == sum(
        r["metrics"]["base_passes_after_prefill"] for r in responses
    )
    blocks = [r["metrics"]["speculative_decoding"] for r in responses]
    assert found["acceptance_rate"] == pytest.approx(
        sum(b["num_accepted_draft_tokens"] for b in blocks)
        / sum(b["num_draft_tokens"] for b in blocks)
    )
    assert checked["plain"]["completion_tokens"] == sum(
        r["metrics"]["completion_tokens"] for r in responses
    )


def test_plan_within_the_engine_is_needed(done: Workplace) -> None:
    said = done.edgespec(
        f"{INFER} --outputFile x.json --specDecode --specDraftTopK 10 --specVerifySize 61", code=3
    )
    assert "--spec-verify-size 61 exceeds the 60" in said.err
    assert not (done.path / "x.json").exists()


def test_request_that_does_not_fit_fails_alone(done: Workplace) -> None:
    long = {"messages": [{"role": "user", "content": "Too long. " * 400}]}
    wanted = {**REQUESTS, "requests": [long, REQUESTS["requests"][0]]}
    (done.path / "long.json").write_text(json.dumps(wanted))
    files = "--engineDir toy/engines --inputFile long.json --outputFile long_out.json"
    said = done.edgespec(f"infer {files} --specDecode", code=5)
    failed, answered = done.output("long_out.json")
    assert failed["finish_reason"] == "error"
    assert "built for 1024" in failed["error"]
    assert "built for 1024" in said.err
    assert answered["output_ids"] == done.output()[0]["output_ids"]


# The Python API


def test_api_takes_text_messages_or_ids_and_answers_like_the_command(done: Workplace) -> None:
    sampling = edgespec.SamplingParams(temperature=0, max_generate_length=20)
    question = edgespec.Message("user", "What is 12 + 30?")
    with edgespec.load(done.path / "toy/engines") as engine:
        assert engine.spec_decode
        by_messages = engine.generate([question], sampling)
        by_ids = engine.generate(by_messages.prompt_ids, sampling)
        by_text = engine.generate(done.output()[0]["formatted_complete_request"], sampling)
    wanted = done.output()[0]
    for response in (by_messages, by_ids, by_text):
        assert (response.token_ids, response.text) == (wanted["output_ids"], wanted["output_text"])
        assert response.finish_reason == wanted["finish_reason"]
        assert response.metrics.steps > 0


def test_stream_gives_the_answer_in_pieces_and_the_response_last(done: Workplace) -> None:
    sampling = edgespec.SamplingParams(temperature=0.9, seed=3, max_generate_length=16)
    with edgespec.load(done.path / "toy/engines") as engine:
        ids = engine.encode("The boat left")
        stream = engine.stream(ids, sampling, edgespec.DraftPlan(4, 3, 16))
        chunks, response = [*stream], stream.result()
    assert isinstance(response, Response)
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    assert [token for chunk in chunks for token in chunk.token_ids] == response.token_ids
    assert "".join(chunk.text for chunk in chunks) == response.text
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [
        response.finish_reason
    ]
    assert [chunk.accepted for chunk in chunks[1:]] == response.metrics.per_step_accepted


def test_engine_opened_without_drafts_decodes_plainly_and_refuses_a_plan(done: Workplace) -> None:
    sampling = edgespec.SamplingParams(temperature=0, max_generate_length=20)
    with edgespec.load(done.path / "toy/engines", spec_decode=False) as engine:
        response = engine.generate([edgespec.Message("user", "What is 12 + 30?")], sampling)
        assert response.token_ids == done.output()[0]["output_ids"]
        assert sum(response.metrics.per_step_drafted) == 0
        with pytest.raises(LimitError, match="without its draft"):
            engine.generate("The boat", sampling, edgespec.DraftPlan(1, 3, 4))


@pytest.mark.parametrize("plan", [(10, 7, 60), (10, 6, 61), (2, 2, 8), (0, 3, 4), (1, 3, 0)])
def test_api_refuses_a_plan_that_the_engines_were_not_built_for(
    done: Workplace, plan: tuple[int, int, int]
) -> None:
    with edgespec.load(done.path / "toy/engines") as engine, pytest.raises(LimitError):
        engine.generate("The boat", plan=edgespec.DraftPlan(*plan))
