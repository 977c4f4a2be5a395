"""Accept rules and drafters of one's own as their users have them: flags, output, errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.errors import LimitError, OptionError
from edgespec.runtime.drafters.trtllm import Drafter
from edgespec.runtime.requests.quality import log_likelihood
from tests import shared
from tests.e2e.workshop import Cli, asked, cli
from tests.e2e.workshop import infer as infer_of
from tests.lossless.pairs import make_pair

__all__ = ["cli"]  # a fixture

GREEDY = edgespec.SamplingParams(temperature=0, max_generate_length=12)
SAMPLED = edgespec.SamplingParams(temperature=1.0, seed=3, max_generate_length=12)
PROMPT = [5, 6, 7]
SHORT = ("--max-generate-length", 12)


@pytest.fixture(scope="module")
def engine_dir() -> Path:
    make = ("llama", "eagle", None)
    return shared.made_once(("pair", make), lambda path: make_pair(path, *make)) / "engines"


@pytest.fixture(scope="module")
def engine(engine_dir: Path) -> Any:
    with edgespec.load(engine_dir) as opened:
        opened.stop_ids = frozenset()
        yield opened


@pytest.fixture
def infer(cli: Cli, engine_dir: Path, tmp_path: Path) -> Any:
    """Runs `infer --spec-decode` on two prompts; the outcome and what was written."""

    def run(*flags: object) -> tuple[Any, dict[str, Any]]:
        out = tmp_path / "out.json"
        out.unlink(missing_ok=True)
        prompts = ("--prompt", "one", "--prompt", "two", "--output-file", out)
        shown = cli("infer", "--engine-dir", engine_dir, "--spec-decode", *prompts, *SHORT, *flags)
        return shown, json.loads(out.read_text()) if out.exists() else {}

    return run


# What is written and shown


def test_lossy_rule_is_named_in_every_output(infer: Any) -> None:
    shown, written = infer("--eagle-posterior-threshold", 0.5, "--temperature", 1, "--seed", 1)
    assert shown.code == 0, shown.err
    assert "typical: LOSSY" in shown.out
    assert "typical acceptance, LOSSY" in shown.err
    for response in written["responses"]:
        assert response["metrics"]["acceptance"] == {
            "rule": "typical",
            "lossless": "no",
            "options": {
                "posterior_threshold": 0.5,
                "posterior_alpha": None,
                "posterior_fast": True,
            },
        }
    shown, _ = infer("--acceptance", "typical", "--json", "--seed", 1)
    (row,) = json.loads(shown.out)["acceptance"]
    assert (row["rule"], row["lossless"], row["requests"]) == ("typical", "no", 2)
    assert "is greedy at every temperature" in shown.err


def test_rule_that_requests_ask_for_is_announced_once(
    cli: Cli, engine_dir: Path, tmp_path: Path
) -> None:
    one, lossy = asked("one"), {"speculative": {"posterior_threshold": 0.5}}
    line = infer_of(engine_dir, tmp_path, one, one | lossy, one | lossy)
    shown = cli(*line, "--spec-decode")
    assert shown.code == 0, shown.err
    said = "acceptance: typical acceptance, LOSSY, as 2 of 3 requests asked for"
    assert shown.err.count(said) == shown.err.count("LOSSY") == 1
    assert "asked for" not in cli(*line, "--spec-decode", "--acceptance", "typical").err


def test_exact_rule_is_in_the_output_and_not_in_the_table(infer: Any) -> None:
    shown, written = infer("--temperature", 1, "--seed", 1)
    assert "LOSSY" not in shown.out + shown.err
    assert "lossless in" not in shown.out
    assert "exact:" not in shown.out
    acceptance = [response["metrics"]["acceptance"] for response in written["responses"]]
    assert acceptance == [{"rule": "exact", "lossless": "tokens"}] * 2


def test_quality_is_compared_with_the_exact_answers(infer: Any) -> None:
    flags = ("--acceptance", "rejection", "--temperature", 1, "--seed", 1, "--compare-quality")
    shown, written = infer(*flags, "--json")
    assert shown.code == 0, shown.err
    quality = json.loads(shown.out)["quality"]
    assert quality["compared"] == 2
    assert "lossless" not in json.loads(shown.out)
    each = [response["quality"] for response in written["responses"]]
    agreeing, compared = (
        sum(q[key] for q in each) for key in ("agreeing_tokens", "compared_tokens")
    )
    assert quality["agreement"] == agreeing / compared
    assert quality["identical"] == sum(q["first_difference"] is None for q in each)
    shown, _ = infer(*flags)
    assert "tokens as in exact answers" in shown.out
    assert "log-likelihood a token" in shown.out
    shown, written = infer("--compare-quality", "--temperature", 1, "--seed", 1)
    assert all(response["quality"]["agreement"] == 1 for response in written["responses"])
    assert "identical answers" in shown.out


def test_check_of_losslessness_refuses_what_is_not_token_for_token(infer: Any) -> None:
    shown, written = infer("--acceptance", "typical", "--check-lossless")
    assert (shown.code, written) == (3, {})
    assert "--compare-quality" in shown.err
    shown, _ = infer("--acceptance", "rejection", "--check-lossless", "--temperature", 0.5)
    assert shown.code == 3
    assert "request 0 samples at temperature 0.5" in shown.err
    shown, written = infer("--acceptance", "rejection", "--check-lossless", "--temperature", 0)
    assert shown.code == 0, shown.err
    assert [response["lossless"]["equal"] for response in written["responses"]] == [True, True]
    acceptance = written["responses"][0]["metrics"]["acceptance"]
    assert acceptance == {"rule": "rejection", "lossless": "tokens"}


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--acceptance", "lucky"), 2, "'rejection', 'typical', 'relaxed'"),
        (("--acceptance", "exact", "--relaxed-topk", 3), 2, "option of --acceptance relaxed"),
        (("--relaxed-topk", 3, "--posterior-alpha", 0.3), 2, "is an option of --acceptance"),
        (("--eagle-posterior-threshold", 2), 2, "posterior_threshold of typical acceptance is 2.0"),
        (("--acceptance", "relaxed"), 2, "no tokens that begin and end them"),
        (("--begin-thinking-phase-token", 3), 2, "both tokens of the thoughts"),
        (
            ("--begin-thinking-phase-token", "<a>", "--end-thinking-phase-token", 4),
            2,
            "no token '<a>'",
        ),
        (
            ("--acceptance", "typical", "--end-thinking-phase-token", 4),
            2,
            "is an option of --acceptance relaxed",
        ),
        (("--check-lossless", "--compare-quality"), 2, "exclude each other"),
        (("--acceptance", "rejection", "--spec-draft-top-k", 2), 3, "is for chains"),
        (("--acceptance", "rejection", "--exact"), 3, "exact"),
        (("--drafter-time-budget-ms", 3), 2, "--drafter MODULE:CLASS"),
    ],
)
def test_flags_that_cannot_be_are_refused_before_anything_is_answered(
    infer: Any, flags: tuple[object, ...], code: int, said: str
) -> None:
    shown, written = infer(*flags)
    assert (shown.code, written) == (code, {})
    assert said in shown.err


@pytest.mark.parametrize("flag", ["--compare-quality", "--acceptance=typical"])
def test_without_drafts_an_accept_rule_means_nothing(cli: Cli, engine_dir: Path, flag: str) -> None:
    shown = cli("infer", "--engine-dir", engine_dir, "--prompt", "one", flag)
    assert shown.code == 2
    assert "nothing without --spec-decode" in shown.err


def test_chat_says_that_a_rule_is_lossy(cli: Cli, engine_dir: Path) -> None:
    flags = ("--acceptance", "typical", "--show-speculation", *SHORT)
    shown = cli("chat", "--engine-dir", engine_dir, *flags, stdin="one\n")
    assert shown.code == 0, shown.err
    assert "typical acceptance: LOSSY" in shown.err
    refused = cli("chat", "--engine-dir", engine_dir, "--no-spec-decode", *flags)
    assert refused.code == 2


def test_chat_changes_the_rule_between_two_answers(cli: Cli, engine_dir: Path) -> None:
    turns = ["one", "/set acceptance typical posterior_threshold=0.5", "/reset", "two"]
    lines = "\n".join([*turns, "/set acceptance relaxed"])
    flags = ("--temperature", 1, "--seed", 1, *SHORT)
    shown = cli("chat", "--engine-dir", engine_dir, *flags, stdin=lines)
    assert shown.code == 5  # this model has no tokens of thoughts
    assert shown.err.count("[typical acceptance: LOSSY]") == 1
    assert "Name them with begin_thinking_phase_token" in shown.err
    assert len(shown.out.splitlines()) >= 2


def test_chat_says_that_a_rule_is_for_chains(cli: Cli, engine_dir: Path) -> None:
    lines = "/set acceptance rejection\n/set acceptance exact\n/set temperature 0.5\n"
    shown = cli("chat", "--engine-dir", engine_dir, "--drafter", "suffix", stdin=lines)
    assert shown.code == 0, shown.err
    assert shown.err.count("[drafting a chain of earlier text") == 1
    assert shown.err.count("[drafting a tree of earlier text") == 1


def test_tokens_of_thoughts_are_named_by_flags_where_the_template_has_none(infer: Any) -> None:
    flags = ("--begin-thinking-phase-token", "200", "--end_thinking_phase_token", 201)
    shown, written = infer(*flags, "--temperature", 0)
    assert shown.code == 0, shown.err
    for response in written["responses"]:
        found = response["metrics"]["acceptance"]
        assert (found["rule"], found["lossless"]) == ("relaxed", "no")
        assert found["options"]["begin_thinking_phase_token"] == 200
        assert found["options"]["end_thinking_phase_token"] == 201


# The Python API


def test_rules_of_requests_in_one_batch(engine: edgespec.Engine) -> None:
    rules = ["exact", "rejection", edgespec.TypicalAcceptance(0.3), None]
    found = engine.generate_batch([PROMPT] * 4, SAMPLED, acceptance=rules)
    assert [answer.metrics.acceptance for answer in found] == [
        "exact",
        "rejection",
        "typical",
        "exact",
    ]
    assert [answer.metrics.lossless for answer in found] == [
        "tokens",
        "distribution",
        "no",
        "tokens",
    ]
    plain = engine.plainly(PROMPT, SAMPLED)
    assert found[0].token_ids == found[3].token_ids == plain.token_ids
    for answer, rule in zip(found, rules, strict=True):
        assert engine.generate(PROMPT, SAMPLED, acceptance=rule).token_ids == answer.token_ids
    assert plain.metrics.acceptance == "exact"
    assert engine.generate(PROMPT, SAMPLED, edgespec.PLAIN, acceptance="typical").token_ids == (
        plain.token_ids
    )


def test_engine_s_rule_is_that_of_requests_that_name_none(engine_dir: Path) -> None:
    with edgespec.load(engine_dir, acceptance="rejection") as opened:
        assert any("lossless in distribution" in note for note in opened.notes)
        assert opened.plan().top_k == 1
        assert opened.generate(PROMPT, SAMPLED).metrics.acceptance == "rejection"
        assert opened.generate(PROMPT, SAMPLED, acceptance="exact").metrics.acceptance == "exact"
        with pytest.raises(LimitError, match="is for chains"):
            opened.plan(2, 2, 5)


def test_rejection_drafts_chains_where_trees_are_the_default(engine_dir: Path) -> None:
    with edgespec.load(engine_dir, drafter="suffix") as opened:
        assert opened.plan().top_k > 1
        found = opened.generate(PROMPT, SAMPLED, acceptance="rejection")
        assert found.metrics.acceptance == "rejection"
        suffix = edgespec.SuffixDecodingConfig(max_draft_len=4)  # type: ignore[attr-defined]
        opened.generate(PROMPT, SAMPLED, suffix, acceptance="rejection")
        with pytest.raises(LimitError, match="is for chains, and top_k 2 drafts trees"):
            opened.generate(PROMPT, SAMPLED, opened.plan(2, 2, 5), acceptance="rejection")


def test_rejection_draws_drafts_of_a_real_draft_engine(engine: edgespec.Engine) -> None:
    found = engine.generate(PROMPT, SAMPLED, acceptance="rejection")
    assert sum(found.metrics.per_step_drafted) > 0
    assert found.token_ids == engine.generate(PROMPT, SAMPLED, acceptance="rejection").token_ids
    greedy = engine.generate(PROMPT, GREEDY, acceptance="rejection")
    assert greedy.token_ids == engine.plainly(PROMPT, GREEDY).token_ids


def test_relaxed_rule_accepts_near_drafts_within_thoughts_alone(engine: edgespec.Engine) -> None:
    begin, end = 200, 201
    anything = edgespec.RelaxedAcceptance(256, 1e6, begin, end)
    outside = engine.generate(PROMPT, GREEDY, acceptance=anything)
    assert outside.token_ids == engine.plainly(PROMPT, GREEDY).token_ids
    thinking = engine.generate([5, begin, 7], GREEDY, acceptance=anything)
    assert thinking.metrics.acceptance_rate == 1
    assert thinking.token_ids != engine.plainly([5, begin, 7], GREEDY).token_ids
    done = engine.generate([begin, end, 7], GREEDY, acceptance=anything)
    assert done.token_ids == engine.plainly([begin, end, 7], GREEDY).token_ids


def test_log_likelihood_is_that_of_the_steps_themselves(engine: edgespec.Engine) -> None:
    sampling = edgespec.SamplingParams(
        temperature=1.0, seed=1, max_generate_length=40, num_logprobs=1
    )
    found = engine.plainly(PROMPT, sampling)
    chosen = [
        dict(step)[token] for step, token in zip(found.logprobs, found.token_ids, strict=True)
    ]
    computed = log_likelihood(engine, PROMPT, found.token_ids)
    assert computed == pytest.approx(np.mean(chosen), abs=1e-4)
    assert log_likelihood(engine, PROMPT, []) is None


# A drafter of one's own

MODULE = """
class Last:
    def propose(self, context):
        return [context.tokens[-1]] * context.max_draft_len

class Raises:
    def propose(self, context):
        raise ValueError("on purpose")

class NeedsAnArgument:
    def __init__(self, path):
        pass

class Nothing:
    pass

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, named for this test alone."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def test_drafter_of_the_working_directory_drafts(infer: Any, module: str) -> None:
    plain, wanted = infer("--temperature", 0)
    shown, written = infer("--temperature", 0, "--drafter", f"{module}:Last", "--check-lossless")
    assert shown.code == 0, shown.err
    ids = [[r["output_ids"] for r in found["responses"]] for found in (wanted, written)]
    assert ids[0] == ids[1]
    drafted = written["responses"][0]["metrics"]["speculative_decoding"]["num_draft_tokens"]
    assert drafted > 0
    assert plain.code == 0


def test_drafter_that_raises_is_counted_and_named_once(infer: Any, module: str) -> None:
    _, wanted = infer("--temperature", 0)
    shown, written = infer("--temperature", 0, "--drafter", f"{module}:Raises")
    assert shown.code == 0
    assert shown.err.count("ValueError: on purpose") == 1
    assert "lost drafts" in shown.out
    for response, other in zip(written["responses"], wanted["responses"], strict=True):
        assert response["output_ids"] == other["output_ids"]
        assert response["metrics"]["lost_drafts"]["paused"] > 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("there_is_no_such:Class", "there is no module there_is_no_such"),
        ("{}:Missing", "has no Missing"),
        ("{}:", "is not written as package.module:Class"),
        ("{}:NeedsAnArgument", "could not be made: TypeError"),
        ("{}:Nothing", "is no drafter"),
        ("{}:number", "a int is no drafter"),
    ],
)
def test_name_that_is_no_drafter_is_refused(infer: Any, module: str, name: str, said: str) -> None:
    shown, written = infer("--drafter", name.format(module))
    assert (shown.code, written) == (2, {})
    assert said in shown.err


def test_module_that_raises_is_refused_with_what_it_raised(infer: Any, module: str) -> None:
    Path(f"{module}_bad.py").write_text("import nothing_of_this_name\n")
    shown, _ = infer("--drafter", f"{module}_bad:Class")
    assert shown.code == 2
    assert "nothing_of_this_name" in shown.err


class Keeping:
    """Keeps what it was told."""

    needs_hidden_states = True
    max_draft_len = 2

    def __init__(self) -> None:
        self.contexts: list[edgespec.DraftContext] = []

    def propose(self, context: edgespec.DraftContext) -> edgespec.Proposal:
        self.contexts.append(context)
        return edgespec.Proposal([9, 10], [-1, -1])


def test_object_gets_text_hidden_states_and_its_own_length(
    engine: edgespec.Engine, engine_dir: Path
) -> None:
    own = Keeping()
    with edgespec.load(engine_dir, drafter=own, drafter_options={"time_budget_ms": None}) as opened:
        opened.stop_ids = frozenset()
        assert opened.plan().steps == 2
        found = opened.generate(PROMPT, GREEDY)
        width = opened.config.component.graph.features
    assert found.token_ids == engine.plainly(PROMPT, GREEDY).token_ids
    context = own.contexts[0]
    assert context.hidden_states is not None
    assert context.hidden_states.shape == (3, width)
    assert context.decode(PROMPT) == engine.tokenizer.decode(PROMPT, skip_special_tokens=False)
    assert context.encode("one") == engine.tokenizer.encode("one")
    rows = np.concatenate([c.hidden_states for c in own.contexts])  # type: ignore[misc]
    assert len(rows) == own.contexts[-1].position


class Repeats(Drafter):
    def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
        for request in scheduled_requests.generation_requests:
            request.py_draft_tokens = [request.get_last_tokens(0)] * 3


def test_drafter_of_tensorrt_llm_s_form_drafts_and_a_request_may_have_its_own(
    engine: edgespec.Engine, engine_dir: Path
) -> None:
    plain = engine.plainly(PROMPT, GREEDY).token_ids
    with edgespec.load(engine_dir, drafter=Repeats(max_draft_len=3)) as opened:
        opened.stop_ids = frozenset()
        found = opened.generate(PROMPT, GREEDY)
    assert found.token_ids == plain
    assert sum(found.metrics.per_step_drafted) > 0


def test_class_instead_of_an_object_is_refused(engine_dir: Path) -> None:
    with pytest.raises(OptionError, match="is the class Keeping"):
        edgespec.load(engine_dir, drafter=Keeping)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="`time_budget_ms` is -1"):
        edgespec.load(engine_dir, drafter=Keeping(), drafter_options={"time_budget_ms": -1})
