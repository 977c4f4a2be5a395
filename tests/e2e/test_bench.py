"""`bench` on a toy pair: its modes and report, what is refused, and what an interruption leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from edgespec.benchmark.report import read_report
from edgespec.contract import Limits
from edgespec.runtime.costs.cost_profile import read_profiles
from edgespec.runtime.measuring.cost_description import explained
from edgespec.runtime.requests.memory import peak_bytes
from tests.e2e.workshop import ENGINE_CALL, INTERRUPTED, Cli, cli, happening
from tests.lossless.engines import make_engines
from tests.lossless.pairs import make_mtp_pair

__all__ = ["cli"]  # a fixture

LIMITS = Limits(
    max_input_len=96,
    max_kv_cache_capacity=128,
    max_verify_tree_size=16,
    max_draft_tree_size=16,
)
SMALL = ("--input-tokens", 16, "--output-tokens", 12, "--warmup", 0)
QUICK = (*SMALL, "--repeats", 1)
CHAIN = ("--spec-draft-step", 2, "--spec-policy", "fixed")
FULL = Path("/dev/full")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engines(tmp_path_factory.mktemp("bench"), limits=LIMITS) / "four"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "report.json"


def measured(cli: Cli, engines: Path, out: Path, *flags: object) -> dict[str, Any]:
    shown = cli("bench", engines, *flags, "--json", out)
    assert shown.code == 0, shown.err
    return read(out)


def read(path: Path) -> dict[str, Any]:
    """A report as it stands, which is read and would be written again as it is."""
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert json.loads(json.dumps(read_report(path).to_dict())) == value
    return value


def of_mode(report: dict[str, Any], mode: str) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if row["mode"] == mode]


def test_all_modes_in_one_run(cli: Cli, engines: Path, out: Path) -> None:
    report = measured(cli, engines, out, *SMALL, *CHAIN, "--rows", "1,4", "--repeats", 3)
    assert report["complete"] is True
    prefill, with_draft = of_mode(report, "prefill")
    assert prefill["plan"] is None
    assert with_draft["speed_over_plain"]["median"] > 0
    assert [row["rows"] for row in of_mode(report, "verify")] == [1, 4]
    assert of_mode(report, "verify")[1]["cost_over_one_row"]["confidence"] > 0.95
    (plain,), (drafted,) = of_mode(report, "decode"), of_mode(report, "speculative")
    assert (plain["plan"], plain["figures"]["tokens_per_s"]["median"] > 0) == (None, True)
    # two batches of random prompts, three repeats
    assert len(drafted["speed_over_plain"]["samples"]) == 6
    assert drafted["speed_over_plain"]["low"] > 0
    assert (drafted["answers"], drafted["answers_equal_to_plain"]) == (6, 6)
    assert drafted["plan"] == {"kind": "chain", "top_k": 1, "steps": 2, "verify_size": 3}
    assert report["engine"]["method"] == "eagle3"
    assert {*report["engine"]["engines"]} == {"base", "draft"}
    # the kernel counts pages in batches of each processor
    assert report["peak_memory_bytes"] <= peak_bytes() + 2**20


def test_comma_lists_are_crossed(cli: Cli, engines: Path, out: Path) -> None:
    lists = ("--batch-size", "1,2", "--spec-draft-step", "1,2", "--synthetic-acceptance", "0,0.5:1")
    policy = ("--spec-policy", "fixed")
    report = measured(cli, engines, out, "--mode", "speculative", *QUICK, *lists, *policy)
    rows = [
        (row["batch_size"], row["plan"]["steps"], row["synthetic_acceptance"])
        for row in of_mode(report, "speculative")
    ]
    dials = ([0.0], [0.5, 1.0])
    assert rows == [(b, s, d) for b in (1, 2) for s in (1, 2) for d in dials]
    assert [row["batch_size"] for row in of_mode(report, "decode")] == [1, 2]


@pytest.mark.parametrize("sizes", [("1", "3", "4"), ("3", "2", "8")])
def test_dialled_acceptance_is_met(
    cli: Cli, engines: Path, out: Path, sizes: tuple[str, str, str]
) -> None:
    """At 0 and 1 exactly, in a batch, where each sequence has a lane; answers stay plain."""
    names = ("--spec-draft-top-k", "--spec-draft-step", "--spec-verify-size")
    flags = [part for pair in zip(names, sizes, strict=True) for part in pair]
    lists = ("--batch-size", 2, "--synthetic-acceptance", "0,1", "--spec-policy", "fixed")
    report = measured(cli, engines, out, "--mode", "speculative", *QUICK, *flags, *lists)
    never, always = of_mode(report, "speculative")
    assert never["speculation"]["acceptance_length"] == 1
    assert never["speculation"]["per_position_acceptance"] == [0] * int(sizes[1])
    assert always["speculation"]["conditional_acceptance"] == [1] * int(sizes[1])
    # 11 tokens behind the first one, levels + 1 a step
    steps = -(-11 // (int(sizes[1]) + 1))
    assert always["speculation"]["steps"] == always["answers"] * steps
    for row in (never, always):
        assert row["answers_equal_to_plain"] == row["answers"] == 4


def test_draws_are_the_same_for_all_plans_and_runs(cli: Cli, engines: Path, out: Path) -> None:
    """How much of the first position is accepted does not depend on how deep was drafted: each
    position that was drafted first has its own draw."""
    flags = ("--mode", "speculative", *QUICK, "--synthetic-acceptance", 0.5, "--num-prompts", 6)
    found = []
    for seed in (1, 1, 2):
        report = measured(cli, engines, out, *flags, *CHAIN, "--seed", seed)
        (row,) = of_mode(report, "speculative")
        found.append(row["speculation"])
    assert found[0] == found[1]
    assert found[0] != found[2]


PROMPTS: list[dict[str, object]] = [
    {"question_id": 1, "category": "coding", "turns": ["one two", "three"]},
    {"question_id": 2, "category": "writing", "turns": ["four five six"]},
]


def test_prompts_of_a_file_are_asked_turn_by_turn(
    cli: Cli, engines: Path, out: Path, tmp_path: Path
) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    flags = ("--mode", "speculative", "--output-tokens", 8, "--warmup", 0, "--repeats", 1)
    report = measured(cli, engines, out, *flags, *CHAIN, "--dataset-path", path)
    (row,) = of_mode(report, "speculative")
    assert (row["input_tokens"], row["answers"], row["answers_equal_to_plain"]) == (None, 3, 3)
    assert row["prompt_tokens"] > 5
    prompts = report["settings"]["prompts"]
    assert (prompts["source"], prompts["file"]) == ("file", "set.jsonl")
    assert "one two" not in out.read_text()
    chosen = measured(cli, engines, out, *flags, *CHAIN, "--prompts", path, "--category", "writing")
    assert of_mode(chosen, "speculative")[0]["answers"] == 1
    assert chosen["settings"]["prompts"]["sha256"] != prompts["sha256"]


def test_requests_of_infer_are_taken(cli: Cli, engines: Path, out: Path, tmp_path: Path) -> None:
    path = tmp_path / "input.json"
    request = {"messages": [{"role": "user", "content": "one"}]}
    path.write_text(json.dumps({"temperature": 0.8, "requests": [request]}))
    flags = ("--mode", "speculative", "--output-tokens", 8, "--warmup", 0, "--repeats", 2)
    report = measured(cli, engines, out, *flags, *CHAIN, "--input-file", path, "--ignore-eos")
    (row,) = of_mode(report, "speculative")
    assert (row["answers"], row["answers_equal_to_plain"]) == (2, 2)
    asked = json.loads(path.read_text())
    asked["requests"][0]["speculative"] = {"decoding_type": "NGram"}
    path.write_text(json.dumps(asked))
    shown = cli("bench", engines, "--input-file", path)
    assert (shown.code, "speculative block of its own" in shown.err) == (3, True), shown.err


def test_recurrent_base_with_its_mtp_head(cli: Cli, out: Path, tmp_path: Path) -> None:
    """Its lanes keep a state, which passes that are thrown away must not change."""
    mine = make_mtp_pair(tmp_path, 2) / "engines-2"
    flags = ("--mode", "verify,speculative", *QUICK, *CHAIN, "--rows", "1,3", "--batch-size", 2)
    report = measured(cli, mine, out, *flags, "--synthetic-acceptance", "0,1")
    assert [row["rows"] for row in of_mode(report, "verify")] == [1, 3]
    never, always = of_mode(report, "speculative")
    assert never["speculation"]["acceptance_length"] == 1
    assert always["speculation"]["conditional_acceptance"] == [1, 1]
    for row in (never, always):
        assert row["answers_equal_to_plain"] == row["answers"] == 4


def test_drafter_of_the_users_own(cli: Cli, engines: Path, out: Path) -> None:
    own = ("--drafter", "tests.e2e.repeating_drafter:Repeating", "--synthetic-acceptance", "1")
    report = measured(cli, engines, out, "--mode", "speculative", *QUICK, *own)
    assert report["engine"]["method"] is None
    (row,) = of_mode(report, "speculative")
    assert row["speculation"]["acceptance_length"] > 1
    assert row["answers_equal_to_plain"] == row["answers"] == 2


def test_config_says_what_drafts(cli: Cli, engines: Path, out: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "speculative_config: {decoding_type: NGram, max_draft_len: 2}\n"
        "batch_size: 1,2\nrepeats: 1\nwarmup: 0\ninput_tokens: 16\noutput_tokens: 8\n"
    )
    report = measured(cli, engines, out, "--config", config, "--mode", "speculative")
    assert report["engine"]["method"] == "ngram"
    rows = of_mode(report, "speculative")
    assert [row["batch_size"] for row in rows] == [1, 2]
    assert {row["plan"]["steps"] for row in rows} == {2}
    one = measured(cli, engines, out, "--config", config, "--mode", "speculative", "batch_size=1")
    assert [row["batch_size"] for row in of_mode(one, "speculative")] == [1]


def test_pictures_are_drawn_beside_the_run_and_later(
    cli: Cli, engines: Path, out: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    first, later = tmp_path / "all.png", tmp_path / "later"
    flags = ("--mode", "verify,speculative", *QUICK, *CHAIN, "--rows", "1,2")
    measured(cli, engines, out, *flags, "--picture", first)
    assert first.read_bytes().startswith(b"\x89PNG")
    shown = cli("bench", "draw", out, "--pictures", later)
    assert shown.code == 0, shown.err
    names = {path.name for path in later.iterdir()}
    assert names == {f"{n}.{kind}" for n in ("cost_curve", "acceptance") for kind in ("png", "svg")}


def test_report_on_stdout_stands_alone(cli: Cli, engines: Path) -> None:
    shown = cli("bench", engines, "--mode", "decode", *QUICK, "--json", "-")
    assert shown.code == 0, shown.err
    assert json.loads(shown.out)["rows"][0]["mode"] == "decode"
    assert "plain" in shown.err


# ---- what steps cost


def test_costs_are_measured_and_explained_and_predict(
    cli: Cli, engines: Path, tmp_path: Path
) -> None:
    """The engines are copied: costs are kept beside them."""
    mine, out = Path(shutil.copytree(engines, tmp_path / "mine")), tmp_path / "report.json"
    shown = cli("bench", mine, "--explain")
    assert (shown.code, "--measure-costs" in shown.err) == (3, True), shown.err
    shown = cli("bench", mine, "--spec-policy", "adaptive")
    assert (shown.code, "--measure-costs" in shown.err) == (3, True), shown.err
    shown = cli("bench", mine, "--measure-costs")
    assert shown.code == 0, shown.err
    assert shown.out.startswith("costs, behind ")
    assert (mine / "cost_profile.json").is_file()
    shown = cli("bench", mine, "--explain")
    assert shown.code == 0, shown.err
    (profile,) = [p for p in read_profiles(mine) if p.method == "eagle3"]
    assert shown.out.splitlines() == [*explained(profile)]
    assert "A plain step takes " in shown.out  # behind a line on a busy machine, if it was one
    flags = (*QUICK, "--spec-draft-step", 2, "--spec-policy", "fixed,adaptive", "--explain")
    shown = cli("bench", mine, "--mode", "speculative", *flags, "--json", out)
    assert shown.code == 0, shown.err
    rows = of_mode(read(out), "speculative")
    assert [row["spec_policy"] for row in rows] == ["fixed", "adaptive"]
    for row in rows:
        assert row["predicted_speed_over_plain"] > 0
        assert row["answers_equal_to_plain"] == row["answers"]
    assert "up to chain 1/2/3 16+12 b1: " in shown.out
    assert ", predicted " in shown.out


# ---- two reports


def test_run_is_compared_with_itself_and_unlike_ones_are_refused(
    cli: Cli, engines: Path, out: Path, tmp_path: Path
) -> None:
    measured(cli, engines, out, "--mode", "speculative", *SMALL, *CHAIN, "--repeats", 2)
    shown = cli("bench", "compare", out, out)
    assert shown.code == 0, shown.err
    assert "plain 16+12 b1 (control)" in shown.out
    assert "noise" in shown.out
    told = json.loads(cli("bench", "compare", out, out, "--json").out)
    assert {row["result"] for row in told["rows"]} == {"noise"}
    assert [row["control"] for row in told["rows"]] == [True, False, False]
    other = tmp_path / "other.json"
    measured(cli, engines, other, "--mode", "speculative", *QUICK, *CHAIN, "--seed", 9)
    shown = cli("bench", "compare", out, other)
    assert shown.code == 3
    assert "unlike: prompts.seed: 0 and 9; sampling.seed: 0 and 9" in shown.err
    assert "--allow prompts --allow sampling" in shown.err
    shown = cli("bench", "compare", out, other, "--allow", "prompts,sampling")
    assert shown.code == 0, shown.err
    assert "allowed: prompts.seed: 0 and 9" in shown.out
    assert "too few samples" in shown.out


# ---- what is refused


@pytest.mark.parametrize(
    ("flags", "code", "wanted"),
    [
        (("--mode", "fast"), 2, "'fast' is none of prefill, decode, verify, speculative"),
        (("--mode", ""), 2, "--mode"),
        (("--input-tokens", "8,x"), 2, "'x' is not a whole number from 1 on"),
        (("--output-tokens", "1"), 2, "from 2 on"),
        (("--batch-size", "0"), 2, "from 1 on"),
        (("--synthetic-acceptance", "1.5"), 2, "is not an acceptance"),
        (("--spec-policy", "wild"), 2, "none of fixed, adaptive"),
        (("--category", "coding"), 2, "chooses among --prompts"),
        (("--prompts", "a", "--input-file", "b"), 2, "exclude each other"),
        (("--mode", "decode", "--spec-draft-step", 2), 2, "without the mode speculative"),
        (("--mode", "decode", "--picture", "a.png"), 2, "the modes verify and speculative"),
        (("--accept-rate", 5), 2, "--synthetic-acceptance"),
        (("--inputs-tokens", 5), 2, "--input-tokens"),
        (("--picture", "a.jpg"), 2, "neither .png nor .svg"),
        (("--prompts", "none.jsonl"), 3, "none.jsonl cannot be read"),
        (("--batch-size", 5), 3, "was built for 4"),
        (("--input-tokens", 97), 3, "--max-input-len 97"),
        (("--input-tokens", 90, "--output-tokens", 40), 3, "--max-kv-cache-capacity"),
        (("--mode", "verify", "--rows", "4,17"), 3, "--max-verify-tree-size 17"),
        (("--mode", "verify", "--input-tokens", 120, "--rows", 16), 3, "holds 128 tokens"),
        (("--spec-draft-step", 40, "--spec-policy", "fixed"), 3, "--spec-draft-step"),
        (("--json", "none/report.json"), 4, "no directory none"),
    ],
)
def test_what_cannot_be_is_answered_before_anything_runs(
    cli: Cli,
    engines: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[object, ...],
    code: int,
    wanted: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = cli("bench", engines, *flags)
    assert shown.code == code, shown.err
    assert wanted in shown.err
    assert shown.out == ""
    assert not list(tmp_path.iterdir())


def test_plans_that_cannot_be_are_left_out_of_a_cross_product(
    cli: Cli, engines: Path, out: Path
) -> None:
    sizes = ("--spec-draft-step", "1,2", "--spec-verify-size", "2,3", "--spec-policy", "fixed")
    report = measured(cli, engines, out, "--mode", "speculative", *QUICK, *sizes)
    plans = [row["plan"] for row in of_mode(report, "speculative")]
    assert [(plan["steps"], plan["verify_size"]) for plan in plans] == [(1, 2), (2, 2), (2, 3)]
    (note,) = report["notes"]
    assert note.startswith("left out: --spec-verify-size 3: with top-k 1 and step 1")


def test_engine_directory_is_asked_for(cli: Cli, tmp_path: Path) -> None:
    assert "ENGINE_DIR" in cli("bench", "--mode", "decode").err
    shown = cli("bench", tmp_path / "none")
    assert shown.code == 3, shown.err
    assert cli("bench").code == 2
    assert "compare" in cli("bench", "--help").out
    shown = cli("bench", "comprae", "a.json", "b.json")
    assert (shown.code, "Did you mean compare?" in shown.err) == (2, True), shown.err


def test_nothing_is_written_into_the_engine_directory(cli: Cli, engines: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    for flag in ("--json", "--picture", "--pictures"):
        shown = cli("bench", engines, flag, engines / "a.png")
        assert (shown.code, "lies in" in shown.err) == (3, True), shown.err
    assert not (engines / "a.png").exists()


def test_engine_dir_may_be_a_flag_or_a_variable(
    cli: Cli, engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = ("--mode", "decode", *QUICK)
    assert cli("bench", "--engine-dir", engines, *quick).code == 0
    monkeypatch.setenv("EDGESPEC_ENGINE_DIR", str(engines))
    assert cli("bench", *quick).code == 0
    assert cli("bench", engines, "--engine-dir", engines, *quick).code == 2


# ---- what goes wrong on the way


def test_interrupted_run_keeps_what_there_is(engines: Path, out: Path) -> None:
    flags = ("--mode", "verify,decode", *SMALL, "--rows", "1,2", "--repeats", 200)
    code = "signal.raise_signal(signal.SIGINT)"
    done = happening(ENGINE_CALL, 2200, code, "bench", engines, *flags, "--json", out)
    assert done.code == INTERRUPTED, done.err
    assert "stopping after this step" in done.err
    assert "not complete" in done.err
    assert "plain" in done.out
    report = read(out)
    assert (report["complete"], report["failed"]) == (False, None)
    assert len(of_mode(report, "verify")) == 2
    (row,) = of_mode(report, "decode")
    assert 0 < row["answers"] < 400


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
def test_report_of_a_full_disk_is_kept_elsewhere(cli: Cli, engines: Path) -> None:
    shown = cli("bench", engines, "--mode", "decode", *QUICK, "--json", FULL)
    assert shown.code == 4
    assert "plain" in shown.out  # the table is there
    *_, line = shown.err.strip().splitlines()
    kept = Path(line.removeprefix("  The report is in ").removesuffix("."))
    assert read(kept)["rows"]


def test_error_on_the_way_keeps_what_there_is(engines: Path, out: Path) -> None:
    code = "from edgespec.errors import EnvironmentProblem; raise EnvironmentProblem('broken', 'x')"
    flags = ("--mode", "decode", *SMALL, "--repeats", 20)
    done = happening(ENGINE_CALL, 100, code, "bench", engines, *flags, "--json", out)
    assert done.code == 4, done.err
    assert "error: broken" in done.err
    report = read(out)
    assert (report["complete"], report["failed"]) == (False, "broken")
    samples = of_mode(report, "decode")[0]["figures"]["tokens_per_s"]["samples"]
    assert len(samples) > 2
