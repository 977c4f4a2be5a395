"""The scripts run: the demo on the committed pair, and the training that made it, in toy sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.config import DraftConfig, ModelConfig
from edgespec.export.components import ExportOptions, export

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "demo"

pytestmark = pytest.mark.slow


def script(name: str, *args: str | Path) -> str:
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_demo_saves_base_passes_and_loses_nothing(tmp_path: Path) -> None:
    said = script("demo.py", "--out", tmp_path / "demo")
    assert said.count("golden outputs reproduced") == 2
    assert said.split("lossless")[-1].split()[0] == "yes"
    blocks = [
        response["metrics"]["speculative_decoding"]
        for response in json.loads((tmp_path / "demo" / "output.json").read_text())["responses"]
    ]
    steps = sum(block["num_spec_steps"] for block in blocks)
    accepted = sum(block["num_accepted_draft_tokens"] for block in blocks)
    assert accepted > steps  # on average more than one draft of each step stands


def test_committed_pair_is_small_and_what_it_says() -> None:
    size = sum(path.stat().st_size for path in RECIPE.rglob("*") if path.is_file())
    assert size < 24e6
    base, draft = (detect(open_checkpoint(RECIPE / name)) for name in ("base", "draft"))
    assert isinstance(base, ModelConfig)
    assert isinstance(draft, DraftConfig)
    assert base.architecture == "Qwen3ForCausalLM"
    assert base.decoder.num_layers >= 8
    assert draft.draft_vocab_size < draft.vocab_size == base.vocab_size


def test_training_script_writes_a_pair_that_exports(tmp_path: Path) -> None:
    script("train_demo_model.py", "--out", tmp_path, "--smoke")
    for name, options in (
        ("base", ExportOptions(eagle_base=True)),
        ("draft", ExportOptions(base_model_dir=str(tmp_path / "base"))),
    ):
        assert export(str(tmp_path / name), tmp_path / f"onnx_{name}", options).role == name
