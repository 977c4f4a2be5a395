"""Costs on the command line: measured by `build` and `run`, shown by `inspect` and `infer`,
estimated by `check`."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.backends import divergence
from edgespec.cli import environment
from edgespec.runtime.costs.cost_model import CostModel
from edgespec.runtime.costs.cost_profile import FILE, read_profiles
from tests.e2e.workshop import Cli, asked, cli, infer
from tests.lossless.pairs import shared_pair

__all__ = ["cli"]

CAPACITY = ["--max-input-len", 48, "--max-kv-cache-capacity", 128]


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users have it: tests build without."""
    monkeypatch.delenv(environment.MEASURE_COSTS)


@pytest.fixture(scope="module")
def pair() -> Path:
    return Path(shared_pair("llama", "eagle"))


@pytest.fixture(scope="module")
def measured(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines of the pair with a profile."""
    from edgespec.runtime.measuring.cost_measure import measure_costs

    engines = tmp_path_factory.mktemp("measured") / "engines"
    shutil.copytree(pair / "engines", engines)
    measure_costs(engines)
    return engines


def build(cli: Cli, pair: Path, engines: Path, part: str, *more: object) -> str:
    onnx = pair / f"onnx_{part}" / "llm"
    done = cli("build", "--onnx-dir", onnx, "--engine-dir", engines, *CAPACITY, *more)
    assert done.code == 0, done.err
    return done.out


def methods(engines: Path) -> list[str | None]:
    return [profile.method for profile in read_profiles(engines)]


@pytest.mark.usefixtures("measuring")
def test_build_measures_the_base_and_then_the_pair(cli: Cli, pair: Path, tmp_path: Path) -> None:
    engines = tmp_path / "engines"
    said = build(cli, pair, engines, "base")
    assert re.search(r"^  costs, behind 64 tokens: a plain step [0-9.]+ ms, 4 rows ", said, re.M)
    assert methods(engines) == [None]
    told = json.loads(build(cli, pair, engines, "draft", "--json"))
    assert told["costs"].startswith("costs, behind 64 tokens: ")
    assert methods(engines) == ["eagle3"]
    # A draft of other sizes is another engine
    build(cli, pair, engines, "draft", "--no-measure-costs", "--max-draft-tree-size", 30)
    assert not (engines / FILE).exists()


@pytest.mark.usefixtures("measuring")
def test_a_draft_without_its_base_is_built_all_the_same(
    cli: Cli, pair: Path, tmp_path: Path
) -> None:
    said = build(cli, pair, tmp_path / "engines", "draft")
    assert "costs not measured: " in said
    assert "has no base engine" in said


@pytest.mark.usefixtures("measuring")
def test_run_measures_what_it_makes(
    cli: Cli, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.CACHE, str(tmp_path / "cache"))
    line = ["run", pair / "base", "--prompt", "one", "--no-chat-template", *CAPACITY]
    limits = ["--max-generate-length", 4, "--max-verify-tree-size", 8, "--weights", "int8"]
    done = cli(*line, *limits)
    assert done.code == 0, done.err
    assert "int8 changes 1 word in " in done.err
    assert "costs, behind 64 tokens" in done.err
    assert [*(tmp_path / "cache").rglob(FILE)]


@pytest.mark.usefixtures("measuring")
def test_build_measures_what_quantized_weights_change(
    cli: Cli, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "MAX_INCREASE", -1.0)  # the toy's tokens are all as unlikely
    onnx, engines = pair / "onnx_base" / "llm", tmp_path / "engines"
    done = cli("build", "--onnx-dir", onnx, "--engine-dir", engines, *CAPACITY, "--weights", "int4")
    line = re.search(r"^  (int4 changes 1 word in .* nats a token) \([0-9]+ tok", done.out, re.M)
    assert line is not None, done.out + done.err
    assert re.search(r"^warning: int4 raises .*: --size 6 is closer", done.err, re.M)
    assert line[1] in cli("inspect", engines).out
    told = json.loads(cli("inspect", engines, "--json").out)
    kept = told["engines"]["base"]["divergence"]
    assert f"{kept['perplexity']:.4g} instead of" in line[1]
    sizes = ["--input-tokens", 8, "--output-tokens", 4, "--repeats", 1]
    assert line[1] in cli("bench", engines, "--mode", "decode", *sizes).out


def test_builds_of_tests_measure_nothing(cli: Cli, pair: Path, tmp_path: Path) -> None:
    said = build(cli, pair, tmp_path / "engines", "base")
    assert "costs" not in said
    assert not (tmp_path / "engines" / FILE).exists()


# ---- what is shown


def test_inspect_shows_what_was_measured(cli: Cli, measured: Path) -> None:
    done = cli("inspect", measured)
    assert done.code == 0, done.err
    assert (
        "costs       base with EAGLE-3, measured here; rows and drafts in plain steps" in done.out
    )
    assert re.search(
        r"tokens +batch +plain step +4 rows +8 rows +16 rows +1 draft +4 drafts +8 drafts +pays"
        r" from +at 70 %\n +32 +1 +[0-9.]+ ms +[0-9.]+ ",
        done.out,
    )
    assert FILE not in done.out  # it is no stray file
    (told,) = json.loads(cli("inspect", measured, "--json").out)["costs"]
    assert (told["role"], told["method"]) == ("base", "eagle3")
    (outlook,) = told["outlook"]
    assert (outlook["context"], outlook["batch"]) == (32, 1)
    assert len(outlook["break_even_acceptance"]) == 8
    assert [best["acceptance"] for best in outlook["best_chain"]] == [0.3, 0.5, 0.7, 0.9]


def edited(measured: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    engines = Path(shutil.copytree(measured, tmp_path / "engines"))
    raw = json.loads((engines / FILE).read_text())
    edit(raw)
    (engines / FILE).write_text(json.dumps(raw))
    return engines


def test_inspect_says_why_costs_are_not_used(cli: Cli, measured: Path, tmp_path: Path) -> None:
    engines = edited(
        measured, tmp_path, lambda raw: raw["profiles"][0]["device"].update(cpu="Another CPU")
    )
    done = cli("inspect", engines)
    assert done.code == 0
    assert "costs: the costs were measured on another device (cpu Another CPU, here " in done.out
    (engines / FILE).write_text("{")
    done = cli("inspect", engines)
    assert done.code == 0
    assert "is no cost profile" in done.out


def speedup_of(done: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.out)["speedup"]
    return found


def test_infer_says_what_the_stored_costs_say_of_the_run(
    cli: Cli, measured: Path, tmp_path: Path
) -> None:
    line = [*infer(measured, tmp_path, asked("one two"), max_generate_length=40), "--spec-decode"]
    chain = ["--spec-draft-step", 3, "--spec-verify-size", 4, "--spec-draft-top-k", 1]
    done = cli(*line, *chain)
    assert done.code == 0, done.err
    assert re.search(
        r"by the stored costs [0-9.]+x plain decoding at this acceptance \(a step [0-9.]+ ms, a"
        r" plain one [0-9.]+ ms\); measured: [0-9.]+x",
        done.out + done.err,
    )
    found = speedup_of(cli(*line, *chain, "--json"))
    (profile,) = read_profiles(measured)
    plain = CostModel(profile).at(32).plain  # of one context: the same behind all
    assert found["predicted_plain_step_s"] == pytest.approx(plain)
    assert found["predicted_step_s"] >= plain


def test_infer_measures_once_more_what_a_busy_machine_measured(
    cli: Cli, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = edited(
        measured, tmp_path, lambda raw: raw["profiles"][0].update(waited=9.0, attempts=1)
    )
    os.utime(engines / FILE, (0, 0))
    line = infer(engines, tmp_path, asked("one two"), max_generate_length=40)
    drafted = [*line, "--spec-decode"]
    said = "waited 9.00 s of each second for a core"
    assert said in cli("inspect", engines).out
    assert said in cli(*drafted).err  # but not measured: tests are told not to
    monkeypatch.delenv(environment.MEASURE_COSTS)
    for quiet in (line, [*drafted, "--spec-policy", "fixed"]):
        assert "measuring" not in cli(*quiet).err
    again = cli(*drafted).err
    assert f"{said}: measuring once more" in again
    assert "costs, behind 32 tokens: a plain step" in again
    assert said not in cli(*drafted).err


def test_infer_is_silent_without_a_profile(cli: Cli, pair: Path, tmp_path: Path) -> None:
    line = infer(pair / "engines", tmp_path, asked("one two"), max_generate_length=40)
    done = cli(*line, "--spec-decode", "--json")
    assert "predicted_over_plain" not in speedup_of(done)


# ---- before anything is built


def test_check_estimates_what_a_pair_may_reach(cli: Cli, pair: Path) -> None:
    done = cli("check", pair / "base", pair / "draft")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    start = next(i for i, line in enumerate(lines) if "estimated, nothing was run" in line)
    assert lines[start].split()[0] == "speed"
    assert lines[start + 1].split()[:4] == ["weights", "tokens", "plain", "step"]
    assert [line.split()[0] for line in lines[start + 2 : -1]] == [
        name for name in ("int4", "int8", "fp32") for _ in range(2)
    ]
    assert lines[-1] == "EAGLE-3: fits"
    told = json.loads(cli("check", pair / "base", pair / "draft", "--json").out)
    assert len(told["speed"]["estimates"]) == 6
    assert told["speed"]["assumed"]["bytes_per_s"] > 0


def test_check_estimates_nothing_of_what_does_not_fit(cli: Cli, pair: Path) -> None:
    told = json.loads(cli("check", pair / "base", "--json").out)
    assert told["refused"]
    assert told["speed"] is None
