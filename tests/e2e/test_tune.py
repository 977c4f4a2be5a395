"""`edgespec tune` on a toy pair: its winner is taken and dropped, a stopped run goes on, and what
is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

import edgespec
from edgespec.cli.main import run
from edgespec.contract import Limits
from edgespec.export.components import ExportOptions
from edgespec.runtime.costs import cost_profile
from edgespec.runtime.measuring import cost_measure
from edgespec.runtime.opening.tuned_plan import FILE, read_tuned
from tests import made
from tests.e2e.workshop import INTERRUPTED, Cli, cli, happening
from tests.lossless.engines import make_engines

__all__ = ["cli"]  # a fixture

LIMITS = Limits(
    max_input_len=96,
    max_kv_cache_capacity=128,
    max_verify_tree_size=16,
    max_draft_tree_size=16,
)
REPEATS = 6
QUICK = ("--num-prompts", 4, "--output-tokens", 10, "--repeats", REPEATS, "--measure", 2)
BRIEF = ("--num-prompts", 2, "--measure", 1)
JOURNAL = "tune_journal.jsonl"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engines(tmp_path_factory.mktemp("tune"), limits=LIMITS) / "four"


@pytest.fixture(scope="module", autouse=True)
def idle() -> Iterator[None]:
    """As on a machine that is all ours: costs are in no doubt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_profile, "WAITED", float("inf"))
        patch.setattr(cost_profile, "FALLS", 0.0)
        patch.setattr(cost_measure, "DIFFERS", float("inf"))
        yield


@pytest.fixture
def engines(pair: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair, tmp_path / "engines"))


@pytest.fixture
def drafts(pair: Path) -> Path:
    """The export of the pair's draft."""
    options = ExportOptions(base_model_dir=str(pair.parent / "base"))
    return made.exported(pair.parent / "draft", options) / "llm"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    turns = [[f"one two one two {i}", "again"][: 1 + i % 2] for i in range(6)]
    path.write_text("\n".join(json.dumps({"turns": own}) for own in turns))
    return path


def tune(cli: Cli, engines: Path, prompts: Path, *flags: object) -> dict[str, Any]:
    shown = cli("tune", engines, "--prompts", prompts, *QUICK, "--json", *flags)
    assert shown.code == 0, shown.err
    found: dict[str, Any] = json.loads(shown.out)
    return found


def test_a_search_from_acceptance_to_the_winner(searched: Path) -> None:
    found = json.loads((searched / "report.json").read_text())
    assert {*found["acceptance"]} == {"0"}
    assert found["candidates"] > 20
    kinds = {row["words"].split()[0] for row in found["ranked"]}
    assert {"chain", "tree", "up"} <= kinds
    assert len(found["measured"]) == 2
    for row in found["measured"]:
        assert len(row["over_plain"]["samples"]) == REPEATS
        assert row["predicted"] > 0
    assert b"<svg" in (searched / "frontier.svg").read_bytes()
    assert not (searched / "engines" / JOURNAL).exists()
    kept = read_tuned(searched / "engines")
    assert kept is not None
    assert (kept.method is None) == (found["winner"] is None)


def winning(engines: Path, **changes: object) -> None:
    """What a search leaves that a chain of 2 won: by chance toys have another winner."""
    raw = json.loads((engines / FILE).read_text())
    plan = {"top_k": 1, "steps": 2, "verify_size": 3, "adaptive": False}
    raw |= {"method": "eagle3", "plan": plan, "options": {}, "words": "chain of 2"}
    raw |= {"prior": [0.5, 0.5], "over_plain": 1.5} | changes
    (engines / FILE).write_text(json.dumps(raw))


@pytest.fixture(scope="module")
def searched(pair: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engines after a search, with its report and its picture beside them."""
    path = tmp_path_factory.mktemp("searched")
    engines = Path(shutil.copytree(pair, path / "engines"))
    flags = (*QUICK, "--json", "--picture", path / "frontier.svg")
    line = ("tune", engines, "--prompts", prompts, *flags)
    with redirect_stdout((path / "report.json").open("w")) as said, said:
        assert run([str(word) for word in line]) == 0
    return path


@pytest.fixture
def tuned(searched: Path, tmp_path: Path) -> Path:
    engines = Path(shutil.copytree(searched / "engines", tmp_path / "tuned"))
    raw = json.loads((engines / FILE).read_text())
    if "draft" not in raw["engines"]:
        from edgespec.contract import Role
        from edgespec.runtime.opening.tuned_plan import belonging

        raw |= belonging(engines, Role.BASE, with_draft=True)
        (engines / FILE).write_text(json.dumps(raw))
    winning(engines)
    return engines


def infer(cli: Cli, engines: Path, *flags: object) -> str:
    answer = ("--spec-decode", "--prompt", "one two", "--max-generate-length", 6)
    shown = cli("infer", "--engine-dir", engines, *answer, *flags)
    assert shown.code == 0, shown.err
    return shown.err


def test_the_winner_is_taken_where_no_sizes_are_given(cli: Cli, tuned: Path) -> None:
    assert "tuned plan: chain of 2, 1.50 x plain when measured" in infer(cli, tuned)
    given = infer(cli, tuned, "--spec-draft-step", 1)
    assert "tuned plan" not in given
    assert "verify size 2" in given


def test_another_method_wins_over_the_draft_that_is_there(cli: Cli, tuned: Path) -> None:
    plan = {"top_k": 1, "steps": 5, "verify_size": 6, "adaptive": False}
    options = {"max_draft_len": 5}
    winning(tuned, method="ngram", plan=plan, options=options, words="ngram, max_draft_len=5")
    assert "tuned plan: ngram, max_draft_len=5" in infer(cli, tuned)


def test_where_drafts_do_not_pay_that_is_said(cli: Cli, tuned: Path) -> None:
    winning(tuned, method=None, plan=None, words="none")
    assert "drafts did not pay here when they were tuned" in infer(cli, tuned)


def test_chat_takes_the_winner_too(cli: Cli, tuned: Path) -> None:
    flags = ("--max-generate-length", 6, "--show-speculation")
    shown = cli("chat", "--engine-dir", tuned, *flags, stdin="one\n")
    assert shown.code == 0, shown.err
    assert "tuned plan: chain of 2, 1.50 x plain when measured" in shown.err


def test_python_takes_it_unless_it_is_told_not_to(tuned: Path) -> None:
    with edgespec.load(tuned) as engine:
        assert engine.planner.by_sizes().steps == 2
    with edgespec.load(tuned, tuned=False) as engine:
        assert engine.planner.by_sizes().steps != 2


def test_a_rebuild_drops_it(cli: Cli, tuned: Path, pair: Path) -> None:
    manifest = json.loads((tuned / "manifest.json").read_text())
    entry = manifest["engines"]["draft"]["files"]["draft_config.json"]
    entry["sha256"] = "0" * 64  # as another build has it
    (tuned / "manifest.json").write_text(json.dumps(manifest))
    from edgespec.runtime.measuring.cost_measure import after_build

    after_build(tuned, measure=False)
    assert not (tuned / FILE).exists()


def test_a_damaged_plan_is_said_and_not_taken(cli: Cli, tuned: Path) -> None:
    (tuned / FILE).write_text((tuned / FILE).read_text()[:100])
    said = infer(cli, tuned)
    assert "is no tuned plan" in said
    assert "chain of 2" not in said


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": {"top_k": 4, "steps": 9, "verify_size": 1000, "adaptive": False}},
        {"options": {"by_whom": "somebody"}},
    ],
)
def test_a_plan_that_does_not_fit_is_a_note_that_names_the_file(
    cli: Cli, tuned: Path, changes: dict[str, Any]
) -> None:
    winning(tuned, **changes)
    said = infer(cli, tuned)
    assert f"the tuned plan in {tuned / FILE} is not taken: " in said
    assert "drafting adaptively: up to " in said  # as without it


def test_the_winner_as_yaml(cli: Cli, engines: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuned.yaml"
    found = tune(cli, engines, prompts, "--output", out, *BRIEF)
    assert not (engines / FILE).exists()
    if found["winner"] is None:
        assert not out.exists()
        return
    assert "decoding_type" in yaml.safe_load(out.read_text())["speculative_config"]
    infer(cli, engines, "--config", out)


def test_an_interrupted_search_goes_on(engines: Path, prompts: Path, cli: Cli) -> None:
    args = ["tune", engines, "--prompts", prompts, *QUICK]
    code = "signal.raise_signal(signal.SIGINT)"
    first = happening("edgespec.tuning.journal:TuneJournal.put", 9, code, *args)
    assert first.code == INTERRUPTED, first.err
    assert "the same command goes on with it" in first.err
    lines = (engines / JOURNAL).read_text().splitlines()
    assert len(lines) == 1 + 9  # four prompts of six turns, and the first runs
    second = cli(*args)
    assert second.code == 0, second.err
    assert f"going on with {len(lines) - 1} measurements" in second.err
    assert not (engines / JOURNAL).exists()


def test_the_fastest_format_of_the_draft_is_installed(
    cli: Cli, engines: Path, drafts: Path, prompts: Path
) -> None:
    before = manifest_of(engines)["base"]
    formats = ("--draft-onnx", drafts, "--draft-weights", "int8,fp32", "--install", *BRIEF)
    found = tune(cli, engines, prompts, *formats)
    assert {row["weights"] for row in found["formats"]} == {"int8", "fp32"}
    best = max(found["formats"], key=lambda row: row["over_plain"])["weights"]
    after = manifest_of(engines)
    assert after["base"] == before
    assert after["draft"]["weights"]["scheme"] == best
    assert [p.name for p in engines.parent.iterdir() if "tune-" in p.name] == []
    assert f"fastest draft: {best}, " in found["line"]
    infer(cli, engines)


def manifest_of(engines: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((engines / "manifest.json").read_text())["engines"]
    return found


def test_a_full_disk_is_named_and_the_plan_that_was_there_stays(
    cli: Cli, tuned: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (tuned / FILE).read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("edgespec.tuning.journal.os.fsync", full)
    shown = cli("tune", tuned, "--prompts", prompts, *QUICK)
    assert shown.code == 4
    assert "The disk is full" in shown.err
    assert JOURNAL in shown.err
    assert (tuned / FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--draft-onnx", "x"], "--draft-onnx and --draft-weights go together"),
        (["--install"], "--install is for --draft-onnx"),
        (["--repeats", "1"], "not in the range"),
        (["--batch-size", "64"], "batch_size 64"),
        (["--picture", "x.gif"], "neither .png nor .svg"),
        (["--draft-onnx", "x", "--draft-weights", "int3"], "int3"),
    ],
)
def test_wrong_flags_are_named(
    cli: Cli, engines: Path, prompts: Path, flags: list[str], said: str
) -> None:
    shown = cli("tune", engines, "--prompts", prompts, *flags)
    assert shown.code in (2, 3)
    assert said in shown.err


@pytest.mark.parametrize("content", [None, "", '{"turns": ["Hi"]}\n{"turns": ["trunc'])
def test_missing_and_truncated_prompts_are_named(
    cli: Cli, engines: Path, tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "other.jsonl"
    if content is not None:
        path.write_text(content)
    shown = cli("tune", engines, "--prompts", path)
    assert shown.code == 3
    assert "other.jsonl" in shown.err
    assert not (engines / FILE).exists()
