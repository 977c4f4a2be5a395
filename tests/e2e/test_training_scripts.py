"""The scripts that train the demo's models run in toy sizes and write what is published; what they
train on is what an engine computes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

import edgespec
from edgespec.backends.build import build
from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.cli.train import recipe_of
from edgespec.config import ModelConfig
from edgespec.contract import Limits
from edgespec.export.components import ExportOptions, export
from edgespec.pairing.check import check
from edgespec.progress import Silent
from edgespec.prompts import SamplingParams
from edgespec.training import optimizer
from edgespec.training.acceptance import measure
from edgespec.training.job import open_job
from edgespec.training.ranks import ALONE
from edgespec.training.table import TRAINABLE
from edgespec.training.train import prepared, train
from tests import toys
from tests.e2e.workshop import RECIPE, ROOT, script
from tests.unit.training.test_train import unstopped

pytestmark = pytest.mark.deep
BASE, SMALL = RECIPE / "base", Limits(max_input_len=256, max_kv_cache_capacity=512)


def test_training_script_writes_a_base_that_exports(tmp_path: Path) -> None:
    script("train_demo_model.py", "--out", tmp_path, "--smoke")
    options = ExportOptions(base_for="eagle3")
    assert export(str(tmp_path / "base"), tmp_path / "onnx", options).role == "base"


def recipe_of_demo(method: str, chats: Path, out: Path, *keys: str, base: Path = BASE) -> Any:
    """The committed recipe of a method, with other data and fewer prompts to measure with."""
    flags = {"base_model": base, "data": chats, "output_dir": out, "minutes": None}
    few = ("validation.num_prompts=6", "validation.max_new_tokens=48", "training.bf16=false")
    return recipe_of(str(ROOT / f"recipes/training/demo_{method}.yaml"), (*few, *keys), flags)


@pytest.mark.parametrize("method", list(TRAINABLE))
def test_recipes_of_the_demo_train_on_what_the_scripts_write(method: str, tmp_path: Path) -> None:
    base, chats = BASE, tmp_path / "chats.jsonl"
    if method == "mtp":
        base = tmp_path / "base"
        script("train_demo_mtp.py", "--out", base, "--smoke")
    sizes = ("--answers", 12, "--tokens", 16, "--library")
    script("demo_answers.py", "--base", base, "--out", chats, *sizes)
    recipe = recipe_of_demo(method, chats, tmp_path / "draft", "training.max_steps=1", base=base)
    done = train(open_job(recipe, None, Silent(), lambda _: None), unstopped)
    assert done.steps == 1
    whole = method == "mtp"  # a copy of the base, with the head
    report = check(str(done.directory if whole else base), None if whole else str(done.directory))
    wrong = [result.what for result in report.results if result.level not in ("ok", "warning")]
    assert wrong == []


@pytest.mark.parametrize(
    ("method", "draft", "least"), [("eagle3", "draft", 2.0), ("dflash", "dflash_draft", 1.8)]
)
def test_committed_drafts_are_accepted(
    method: str, draft: str, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    model, answers = map(importlib.import_module, ("train_demo_model", "demo_answers"))
    pairs = model.functions_of(model.stdlib_files()[1])[:40]
    (tmp_path / "chats.jsonl").write_text("\n".join(answers.conversation(*p) for p in pairs))
    section = {"eagle3": "eagle", "dflash": "dflash"}[method]
    plain = f"{section}.{section}_architecture_config={{}}"
    recipe = recipe_of_demo(method, tmp_path / "chats.jsonl", tmp_path / "out", plain)
    job = open_job(recipe, str(RECIPE / draft), Silent(), lambda _: None)
    objective, run, _ = prepared(job, ALONE)
    assert measure(job.row, objective.draft, run.task, run.answers).length > least


def test_an_engine_accepts_of_a_trained_head_what_torch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a base whose layers say little, so that a head soon drafts some of its tokens."""
    base = toys.make_qwen3_5(tmp_path / "base", tied=True, mtp=False)
    chats, out = tmp_path / "chats.jsonl", tmp_path / "model"
    weights = load_file(base / "model.safetensors")
    outer = ("o_proj.weight", "down_proj.weight", "out_proj.weight")
    weights = {n: 0.3 * t if n.endswith(outer) else t for n, t in weights.items()}
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    texts = [[f"the cat number {i}", f"sat on mat {7 * i} and then ran away"] for i in range(12)]
    monkeypatch.syspath_prepend(ROOT / "scripts")
    conversation = importlib.import_module("demo_answers").conversation
    chats.write_text("\n".join(conversation(*pair) for pair in texts))
    few = ("max_steps=60", "learning_rate=0.01", "per_device_train_batch_size=2")
    keys = (*(f"training.{key}" for key in few), f"validation.data_path={chats}")
    job = open_job(
        recipe_of_demo("mtp", chats, out, *keys, base=base), None, Silent(), lambda _: None
    )
    accepted = train(job, unstopped).acceptance
    assert accepted is not None
    assert 1.1 < accepted.length < 3.9
    export(str(out), tmp_path / "onnx", ExportOptions(base_for="mtp"))
    for part in ("llm", "mtp_draft"):
        build(tmp_path / "onnx" / part, tmp_path / "engines", SMALL)
    sampling = SamplingParams(temperature=0, max_generate_length=48)
    with edgespec.load(tmp_path / "engines") as engine:
        found = [
            engine.generate([*question.ids], sampling, engine.plan(1, 3, 4)).metrics
            for question in job.questions
        ]
    assert sum(m.decode_tokens for m in found) == accepted.num_tokens
    assert sum(m.steps for m in found) == accepted.num_steps


def test_growing_a_base_changes_no_output_before_it_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    growth = importlib.import_module("grow_demo_base")
    base = Qwen3ForCausalLM.from_pretrained(RECIPE / "base", dtype=torch.float32).eval()
    ids, before = torch.arange(3, 40)[None], len(base.model.layers)
    with torch.no_grad():
        expected = base(ids).logits
        growth.grow(base, before + 3)
        assert len(base.model.layers) == before + 3
        torch.testing.assert_close(base(ids, use_cache=False).logits, expected)
        cached = base.generate(ids, max_new_tokens=4, do_sample=False, output_logits=True)
    twins = [layer for layer in base.model.layers if not layer.mlp.down_proj.weight.any()]
    assert len(twins) == 3
    assert not any(layer.self_attn.o_proj.weight.any() for layer in twins)
    assert cached[0, len(ids[0])] == expected[0, -1].argmax()  # each layer has its own cache


def test_growing_script_trains_a_base_that_exports(tmp_path: Path) -> None:
    words = ("--base", RECIPE / "base", "--out", tmp_path / "base", "--smoke")
    said = json.loads(script("grow_demo_base.py", *words))
    assert said["steps"] == 3
    assert said["loss_before"].keys() == said["loss_after"].keys() >= {"functions", "prose"}
    assert said["loss_before"] != said["loss_after"]
    layers = open_checkpoint(tmp_path / "base").config["num_hidden_layers"]
    assert layers == 18
    options = ExportOptions(base_for="eagle3")
    assert export(str(tmp_path / "base"), tmp_path / "onnx", options).role == "base"


def test_texts_of_held_out_modules_are_prompts_of_five_kinds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    text, model, growth = map(
        importlib.import_module, ("demo_text", "train_demo_model", "grow_demo_base")
    )
    training, held = model.stdlib_files()
    for kind in ("functions", "prose", "random", "repetitive", "chat"):
        asked = text.messages(kind, held, 8)
        assert len({*asked}) == 8
        assert asked == text.messages(kind, held, 8)
        assert not {*asked} & {*text.messages(kind, training)} or kind == "functions"
    table = text.constants(["alpha"], np.random.default_rng(0))
    first, *_, last = "\n".join(table).splitlines()[1:]
    number = int(first.split(" = ")[1])
    rows = len("\n".join(table).splitlines()) - 1
    assert first == f"ALPHA_{number} = {number}"
    assert last == f"ALPHA_{number + rows - 1} = {number + rows - 1}"
    tests = {path.stem for path in growth.test_files(held)}
    assert not tests & {f"test_{path.stem}" for path in held}


def test_training_ends_when_its_time_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learning rate goes down to the end, however few steps there were."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    model = importlib.import_module("train_demo_model")
    clock = iter(range(0, 10**6, 2))  # seconds, each time it is asked
    monkeypatch.setattr(model.time, "monotonic", lambda: next(clock))
    weight, rates = torch.nn.Linear(2, 2), list[float]()
    real = optimizer.rate

    def rate(*args: Any) -> float:
        rates.append(real(*args))
        return rates[-1]

    monkeypatch.setattr(optimizer, "rate", rate)
    steps = model.fit("toy", weight, 1000, 1e-3, lambda _: weight(torch.ones(2)).sum(), 1.0)
    assert steps == 9
    assert rates[-2] < 0.35 < max(rates)
    assert rates[-4:] == sorted(rates[-4:], reverse=True)
    assert model.fit("toy", weight, 5, 1e-3, lambda _: weight(torch.ones(2)).sum()) == 5


DFLASH_LAYER = {"input_layernorm", "post_attention_layernorm"}
DFLASH_LAYER |= {
    f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
}
DFLASH_LAYER |= {f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}


def check_dflash_draft(path: Path, base: Path) -> None:
    """The layout that z-lab publishes, and a mask token that no text has."""
    checkpoint = open_checkpoint(path)
    raw, inner = checkpoint.config, checkpoint.config["dflash_config"]
    names = {"fc", "hidden_norm", "norm"}
    names |= {
        f"layers.{i}.{name}" for i in range(raw["num_hidden_layers"]) for name in DFLASH_LAYER
    }
    assert set(checkpoint.tensors) == {f"{name}.weight" for name in names}
    assert raw["architectures"] == ["DFlashDraftModel"]
    assert raw["num_target_layers"] == open_checkpoint(base).config["num_hidden_layers"]
    width = len(inner["target_layer_ids"]) * raw["hidden_size"]
    assert checkpoint.tensors["fc.weight"].shape == (raw["hidden_size"], width)
    assert max(inner["target_layer_ids"]) < raw["num_target_layers"] - 1
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    assert tokenizer.decode([inner["mask_token_id"]]) == "\ufffd"  # a byte that is never UTF-8
    assert inner["mask_token_id"] not in tokenizer("ÿ\N{GRINNING FACE}\x7f").input_ids


def test_committed_dflash_draft_is_what_it_says() -> None:
    check_dflash_draft(RECIPE / "dflash_draft", RECIPE / "base")
    assert open_checkpoint(RECIPE / "dflash_draft").config["block_size"] == 8


def test_draft_model_training_script_writes_a_model_with_the_base_s_tokenizer(
    tmp_path: Path,
) -> None:
    sizes = ("--smoke", "--prompts", "2", "--tokens", "8")
    said = json.loads(script("train_demo_draft_model.py", "--out", tmp_path / "draft", *sizes))
    assert said["acceptance_length"] == pytest.approx(said["tokens"] / said["steps"], abs=1e-3)
    base, draft = (detect(open_checkpoint(p)) for p in (RECIPE / "base", tmp_path / "draft"))
    assert isinstance(base, ModelConfig)
    assert isinstance(draft, ModelConfig)
    assert (draft.vocab_size, draft.eos_token_ids) == (base.vocab_size, base.eos_token_ids)
    report = check(str(RECIPE / "base"), str(tmp_path / "draft"))
    assert [result.level for result in report.results if result.level != "ok"] == []


def test_draft_model_learns_what_its_base_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import train_demo_draft_model as script_
    from train_demo_model import ChatBatches

    torch.manual_seed(0)
    base, size = script_.load(RECIPE / "base"), script_.SMOKE
    rows = [list(range(3 + i, 40 + i)) for i in range(4)]
    _, losses = script_.train_draft(base, ChatBatches(rows, size, 1), size)
    assert len(losses) == size.steps
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
