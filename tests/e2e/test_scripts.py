"""The demo runs on the committed pairs, and what measures it; of the trainings that made them see
test_training_scripts.py."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.config import ModelConfig
from edgespec.methods import METHODS
from edgespec.methods.eagle3 import Eagle3Config
from tests import toys
from tests.e2e.workshop import RECIPE, ROOT, script

pytestmark = pytest.mark.slow
BRIEFLY = ("--input-file", str(RECIPE / "input.json"), "--repeats", "1", "--output-tokens", "16")


def brief_recipe(path: Path) -> Path:
    """The committed pair, with answers of a third of their length."""
    path.mkdir()
    for name in ("base", "draft"):
        (path / name).symlink_to(RECIPE / name)
    asked = json.loads((RECIPE / "input.json").read_text())
    (path / "input.json").write_text(json.dumps(asked | {"max_generate_length": 40}))
    return path


@pytest.mark.parametrize(
    ("method", "constants"),
    [
        ("eagle3", {"MEASURED": BRIEFLY, "COMPARED": ("eagle3",)}),
        *(pytest.param(name, {}, marks=pytest.mark.deep) for name in ("dflash", "suffix", "ngram")),
    ],
)
def test_demo_drafts_and_loses_nothing(
    method: str, constants: dict[str, Any], tmp_path: Path
) -> None:
    if constants:
        constants = constants | {"RECIPE": brief_recipe(tmp_path / "recipe")}
    said = script("demo.py", "--method", method, "--out", tmp_path / "demo", constants=constants)
    drafts = METHODS[method].needs_engine
    assert said.count("golden outputs reproduced") == 1  # the base's
    assert " ".join(said.split()).count("matrix products are int8") == drafts  # the draft's
    assert said.split("lossless")[-1].split()[0] == "yes"
    assert (f"--drafter {method}" in said.split("Now talk with it")[-1]) != drafts
    blocks = [
        response["metrics"]["speculative_decoding"]
        for response in json.loads((tmp_path / "demo" / "output.json").read_text())["responses"]
    ]
    steps = sum(block["num_spec_steps"] for block in blocks)
    accepted = sum(block["num_accepted_draft_tokens"] for block in blocks)
    assert accepted > (steps if drafts else 0)  # a draft: more than one of each step stands


def test_demo_says_how_long_the_training_of_a_missing_draft_takes_before_it_begins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    demo = runpy.run_path(str(ROOT / "scripts" / "demo.py"), run_name="demo")
    lines: list[list[str]] = []

    def train(line: list[str], check: bool, cwd: Path) -> Any:
        said = capsys.readouterr().out
        assert lines or "about half an hour" in said
        assert " ".join(line[1:]) in said
        lines.append(line)
        return subprocess.CompletedProcess([], returncode=0)

    monkeypatch.setattr(subprocess, "run", train)
    path = ROOT / "build" / "no-such"
    the_draft = demo["the_eagle1_draft"]
    monkeypatch.setitem(the_draft.__globals__, "EAGLE1", path)
    monkeypatch.setitem(the_draft.__globals__, "CHATS", path.with_name("no-chats"))
    assert the_draft() == path
    answers, recipe = lines
    assert answers[1:] == ["scripts/demo_answers.py", "--out", "build/no-chats"]
    assert recipe[-3:] == [
        "recipes/training/demo_eagle1.yaml", "--output-dir", "build/no-such"
    ]  # fmt: skip


def test_demo_trains_a_draft_again_that_is_for_another_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    demo = runpy.run_path(str(ROOT / "scripts" / "demo.py"), run_name="demo")
    lines: list[list[str]] = []

    def train(line: list[str], check: bool, cwd: Path) -> Any:
        lines.append(line)
        return subprocess.CompletedProcess([], returncode=0)

    monkeypatch.setattr(subprocess, "run", train)
    path, the_draft = tmp_path / "draft", demo["the_eagle1_draft"]
    for name, value in {"EAGLE1": path, "ROOT": tmp_path, "CHATS": tmp_path / "chats"}.items():
        monkeypatch.setitem(the_draft.__globals__, name, value)
    (tmp_path / "chats").touch()
    identity, said = open_checkpoint(RECIPE / "base").identity(), {}
    for name, found in {"of another base": "0" * 64, "of this base": identity}.items():
        path.mkdir()
        (path / "config.json").write_text("{}")
        save_file({"fc.weight": np.zeros((2, 2), np.float32)}, path / "model.safetensors")
        (path / "training.json").write_text(json.dumps({"base": {"identity": found}}))
        assert the_draft() == path
        words = " ".join(capsys.readouterr().out.split())
        said[name] = (len(lines), "was trained for another base" in words)
    assert said == {"of another base": (1, True), "of this base": (1, False)}
    (path / "training.json").unlink()  # by a script that wrote no note
    assert (the_draft(), len(lines), path.exists()) == (path, 2, False)


def test_demo_of_text_needs_no_library_for_images() -> None:
    """Its environment has none: `make demo` installs edgespec alone."""
    scripts = ROOT / "scripts"
    code = (
        "import runpy, sys; sys.modules['PIL'] = None; sys.argv = ['demo.py', '--help'];"
        f" sys.path.insert(0, {str(scripts)!r});"
        f" runpy.run_path({str(scripts / 'demo.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, "--method" in done.stdout) == (0, True), done.stderr


def test_demo_and_measurements_know_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is not committed has a recipe or a script that trains it, and torch is installed
    for it."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    pairs = importlib.import_module("demo_pairs").PAIRS
    demo = runpy.run_path(str(ROOT / "scripts" / "demo.py"), run_name="demo")["METHODS"]
    assert set(pairs) == set(demo) == set(METHODS)
    line = next(x for x in (ROOT / "Makefile").read_text().splitlines() if x.startswith("demo:"))
    (trained,) = re.findall(r"\$\(filter ([a-z0-9_ ]+),\$\(METHOD\)", line)
    build = ROOT / "build"
    needed = {
        name: [
            model.relative_to(build).parts[0]
            for model, _ in pair.exports
            if model.is_relative_to(build)
        ]
        for name, pair in pairs.items()
    }
    with_training = {name for name, models in needed.items() if models}
    assert set(trained.split()) == {*with_training, "vlm"}
    for (model,) in filter(None, needed.values()):
        name = model.replace("-", "_")
        makers = ROOT / f"scripts/train_{name}.py", ROOT / f"recipes/training/{name}.yaml"
        assert any(path.is_file() for path in makers), model


def test_committed_pair_is_small_and_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(path.stat().st_size for path in RECIPE.rglob("*") if path.is_file())
    assert size < 36e6
    drafts = [
        path.stat().st_size
        for name in ("draft", "dflash_draft")
        for path in (RECIPE / name).iterdir()
    ]
    assert sum(drafts) < 9e6
    base, draft = (detect(open_checkpoint(RECIPE / name)) for name in ("base", "draft"))
    assert isinstance(base, ModelConfig)
    assert isinstance(draft, Eagle3Config)
    assert base.architecture == "Qwen3ForCausalLM"
    assert base.decoder.num_layers == 16
    assert draft.draft_vocab_size < draft.vocab_size == base.vocab_size
    monkeypatch.syspath_prepend(ROOT / "scripts")
    is_for = importlib.import_module("demo_base").is_for
    assert all(is_for(RECIPE / name, RECIPE / "base") for name in ("draft", "dflash_draft"))


@pytest.mark.deep
def test_demo_pair_is_measured_on_five_sets_of_prompts() -> None:
    words = ("--sets", "--prompts", "1", "--tokens", "8", "--temperature", "0", "--repeats", "2")
    lines = script("measure_demo.py", "--method", "eagle3", "--policy", "own", *words).splitlines()
    rows = [json.loads(line) for line in lines[-6:-1]]
    kinds = ["functions", "prose", "random", "repetitive", "chat"]
    assert [(row["set"], row["plan"]) for row in rows] == [(kind, "own") for kind in kinds]
    assert all(row["differences"] == 0 < row["speed_over_plain"] for row in rows)


def test_demo_knows_whether_a_whole_hybrid_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import demo

    assert not demo.is_whole(tmp_path / "hybrid")
    toys.make_qwen3_5(tmp_path / "hybrid")
    assert demo.is_whole(tmp_path / "hybrid")
    weights = tmp_path / "hybrid" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert not demo.is_whole(tmp_path / "hybrid")


def test_demo_empties_only_what_a_demo_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import demo

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("the only copy")
    refusal = "contains input of the demo"
    read = [(ROOT, refusal), (demo.HYBRID.parent, refusal)]
    for out, said in [(mine, "no demo made it"), (mine / "thesis.txt", "is a file"), *read]:
        with pytest.raises(SystemExit, match=said):
            demo.make_anew(out)
    assert (mine / "thesis.txt").read_text() == "the only copy"
    for out in (tmp_path / "new", tmp_path / "demo-out"):
        for _ in range(2):
            demo.make_anew(out)
            assert [path.name for path in out.iterdir()] == [".edgespec-demo"]
            (out / "onnx").mkdir()
            (out / "onnx" / "file").touch()
            (out / "mine").symlink_to(mine)
    assert (mine / "thesis.txt").is_file()


def test_cost_of_proposals_is_measured_on_text_that_copies() -> None:
    # Few steps over these sources, which change, would be chance
    size = ("--context", "900", "--steps", "200")
    found = json.loads(script("measure_drafter.py", *size, "--json"))
    assert found["context"] == 900
    assert found["suffix"]["acceptance_length"] >= found["ngram"]["acceptance_length"] > 1
    for name in ("ngram", "suffix"):
        assert 0 < found[name]["step_ms"] < found[name]["prompt_ms"]


@pytest.mark.deep
def test_work_that_copies_is_measured_with_real_drafts(tmp_path: Path) -> None:
    """On the demo base in place of 0.6 B parameters: where nothing repeats no row is drafted."""
    sizes = ("--runs", "1", "--tokens", "96", "--context", "160", "--weights", "fp32")
    works = ("--only", "half", "--only", "new")
    words = ("--work", tmp_path, "--model", RECIPE / "base", *sizes, *works)
    found = json.loads(script("measure_copying.py", *words))
    assert found["new"]["rows_per_pass"] == 1
    assert (found["new"]["copied"], 0.3 < found["half"]["copied"] < 0.7) == (0, True)
    assert found["half"]["acceptance_length"] > 1.2
    assert found["half"]["over_plain"] > 0
