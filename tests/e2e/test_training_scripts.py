"""The scripts that train the demo's models run in toy sizes and write what is published; what they
train on is what an engine computes."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3ForCausalLM

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.cli.train import recipe_of
from edgespec.config import ModelConfig
from edgespec.export.components import ExportOptions, export
from edgespec.methods.base import HeadSizes
from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.methods.dspark import DSparkConfig, Heads, head_words
from edgespec.methods.dspark_heads import DSparkHeads
from edgespec.pairing.check import check
from edgespec.progress import Silent
from edgespec.training import optimizer
from edgespec.training.acceptance import measure
from edgespec.training.job import open_job
from edgespec.training.train import prepared, train
from tests.e2e.workshop import RECIPE, ROOT, script
from tests.unit.training.test_train import unstopped

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A hybrid that its training script wrote in toy sizes, and what it measured."""
    out = tmp_path_factory.mktemp("smoke") / "hybrid"
    sizes = ("--smoke", "--prompts", "2", "--tokens", "12")
    return out, json.loads(script("train_demo_mtp.py", "--out", out, *sizes))


def test_training_script_writes_a_base_that_exports(tmp_path: Path) -> None:
    script("train_demo_model.py", "--out", tmp_path, "--smoke")
    options = ExportOptions(base_for="eagle3")
    assert export(str(tmp_path / "base"), tmp_path / "onnx", options).role == "base"


def recipe_of_demo(method: str, chats: Path, out: Path, *keys: str) -> Any:
    """The committed recipe of a method, with other data and fewer prompts to measure with."""
    flags = {"base_model": RECIPE / "base", "data": chats, "output_dir": out, "minutes": None}
    few = ("validation.num_prompts=6", "validation.max_new_tokens=48", "training.bf16=false")
    return recipe_of(str(ROOT / f"recipes/training/demo_{method}.yaml"), (*few, *keys), flags)


@pytest.mark.parametrize("method", ["eagle3", "eagle1", "dflash", "medusa"])
def test_recipes_of_the_demo_train_on_what_the_script_writes(method: str, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    script("demo_answers.py", "--out", chats, "--answers", 12, "--tokens", 16, "--library")
    recipe = recipe_of_demo(method, chats, tmp_path / "draft", "training.max_steps=1")
    done = train(open_job(recipe, None, Silent(), lambda _: None), unstopped)
    assert done.steps == 1
    report = check(str(RECIPE / "base"), str(done.directory))
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
    objective, run, _ = prepared(job)
    assert measure(job.row, objective.draft, run.task, run.answers).length > least


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
MTP = {"mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"}
MTP |= {f"mtp.layers.0.{name}" for name in DFLASH_LAYER}


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


@pytest.mark.parametrize("method", ["jetspec", "dspark"])
def test_training_script_of_a_block_draft_writes_it_as_published(
    method: str, tmp_path: Path
) -> None:
    """It learns a little even in toy sizes, and what it wrote is exported as a draft of its
    method."""
    sizes = ("--smoke", "--prompts", "1", "--tokens", "8")
    said = json.loads(script(f"train_demo_{method}.py", "--out", tmp_path / "draft", *sizes))
    first, last = said["loss"]
    assert last < first
    assert said["answers_that_differ"] == 0
    found = detect(open_checkpoint(tmp_path / "draft"))
    assert isinstance(found, BlockDraftConfig)
    assert (found.method, found.aux_layer_ids, found.num_drafts) == (method, (2, 6), 7)
    assert found.causal == (method == "jetspec",) * 2
    if isinstance(found, DSparkConfig):
        assert (found.layout, found.own_embedding, found.own_head) == ("deepspec", True, True)
        assert head_words(found.heads) == (
            "Markov (vanilla, rank 64) and confidence; the anchor's slot drafts"
        )
    options = ExportOptions(base_model_dir=str(RECIPE / "base"))
    assert export(str(tmp_path / "draft"), tmp_path / "onnx", options).role == "draft"


def draft_class(method: str) -> Any:
    """The draft of a training script, which must be importable."""
    names = {"jetspec": "JetSpec", "dspark": "DSpark"}
    return getattr(importlib.import_module(f"train_demo_{method}"), names[method])


@pytest.mark.parametrize("method", ["jetspec", "dspark"])
def test_block_drafts_learn_what_the_base_says_at_the_token_that_they_draft(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the base's own greedy answers its best token is the wanted one, and the token before a
    wanted one is the one wanted before."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import block_training as script_
    from train_demo_model import own_answers

    kind, seen = draft_class(method), list[Any]()
    base = Qwen3ForCausalLM.from_pretrained(RECIPE / "base", dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(RECIPE / "base")
    texts = ["def area(width, height):\n", "class Stack:\n    def push(self, item):\n"]
    pairs = own_answers(base, [tokenizer(text).input_ids for text in texts], 24)
    assert len(pairs) == 2

    def loss(draft: Any, blocks: Any) -> torch.Tensor:
        seen.append(blocks)
        found: torch.Tensor = kind.loss(draft, blocks)
        return found

    watched = type("Watched", (kind,), {"loss": loss})
    draft = script_.new_draft(watched, base, replace(script_.SMOKE, steps=1, anchors=16))
    script_.train(draft, base, pairs, 190)
    (blocks,) = seen
    assert blocks.logits.shape[:3] == (2, 16, script_.SMOKE.block - kind.first_slot)
    best, inside = blocks.probabilities().argmax(-1), blocks.inside
    assert (best == blocks.wanted)[inside].float().mean() > 0.95  # bfloat16 may exchange two
    assert (blocks.before[..., 1:] == blocks.wanted[..., :-1])[inside[..., 1:]].all()
    assert not inside.all()


def test_dspark_script_drafts_as_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import block_training as script_

    torch.manual_seed(0)
    size = script_.SMOKE
    base = Qwen3ForCausalLM.from_pretrained(RECIPE / "base", dtype=torch.float32)
    draft = draft_class("dspark")(size, base)
    torch.nn.init.normal_(draft.markov_head.markov_w1.weight)
    torch.nn.init.normal_(draft.markov_head.markov_w2.weight)
    arrays = {
        name: tensor.numpy()
        for name, tensor in draft.state_dict().items()
        if name.startswith(("markov_head.", "confidence_head."))
    }
    vocab = base.config.vocab_size
    kinds = Heads(
        markov_rank=64,
        markov_kind="vanilla",
        confidence=True,
        confidence_reads_markov=True,
        first_slot=0,
    )
    assert {name: array.shape for name, array in arrays.items()} == kinds.shapes(
        HeadSizes(vocab, vocab, size.hidden)
    )
    states, logits = torch.randn(7, size.hidden), torch.randn(7, vocab)
    heads = DSparkHeads(kinds, arrays, np.arange(vocab))
    with torch.no_grad():
        chain = draft.chain(states, logits, 17)
    assert chain == heads.walk(17, logits.numpy(), states.numpy()).ids.tolist()
    assert chain != logits.argmax(-1).tolist()


def test_mtp_training_script_writes_a_hybrid_with_its_head(
    hybrid: tuple[Path, dict[str, Any]],
) -> None:
    path, said = hybrid
    assert said["answers_that_differ"] == 0
    assert said["acceptance_length"] == pytest.approx(said["tokens"] / said["steps"], abs=1e-3)
    checkpoint = open_checkpoint(path)
    assert {name for name in checkpoint.tensors if name.startswith("mtp.")} == {
        f"{name}.weight" for name in MTP
    }
    assert checkpoint.config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert checkpoint.config["mtp_num_hidden_layers"] == 1
    assert checkpoint.config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    _, told = Qwen3_5ForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]


def test_mtp_head_is_a_qwen35_layer_and_trains_on_what_it_drafts_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import train_demo_mtp as script_

    torch.manual_seed(0)
    size = script_.SMOKE
    base = script_.make_base(size, vocab=64, eos=2).eval()
    head = script_.make_head(base)
    for name, weight in head.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, std=0.3)
    hidden, embeds = (
        torch.randn(1, 9, size.hidden),
        [torch.randn(1, 9, size.hidden) for _ in range(3)],
    )
    with torch.no_grad():
        outs = head.unroll(hidden, embeds)
        base.model.layers[-1].load_state_dict(head.layers[0].state_dict())
        joined = torch.cat(
            [head.pre_fc_norm_embedding(embeds[0]), head.pre_fc_norm_hidden(hidden)], -1
        )
        turned = base.model.rotary_emb(hidden, torch.arange(9)[None])
        causal = torch.full((9, 9), float("-inf")).triu(1)[None, None]
        theirs = base.model.layers[-1](
            head.fc(joined), position_embeddings=turned, attention_mask=causal
        )
        torch.testing.assert_close(outs[0], head.norm(theirs), atol=1e-5, rtol=1e-5)
        # Chain 4, drafted step by step: its own outputs stand where true hidden states would.
        states, tokens = hidden[:, :5], embeds[0][:, :5]
        for step in range(3):
            last = head.unroll(states, [tokens])[0][:, -1:]
            torch.testing.assert_close(last[:, 0], outs[step][:, 4], atol=1e-5, rtol=1e-5)
            if step < 2:
                states = torch.cat([states, last], 1)
                tokens = torch.cat([tokens, embeds[step + 1][:, 4:5]], 1)


@pytest.mark.parametrize(
    ("right", "stop", "accepted"),
    [(0, 9, [0, 0, 0, 0, 0, 0]), (1, 9, [1, 1, 1]), (3, 9, [3, 2]), (3, 99, [3, 3])],
)
def test_plain_cycle_counts_what_stands(
    right: int, stop: int, accepted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base that counts upwards, and a draft that is right `right` times of three; what follows a
    stop is nothing."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from draft_cycle import decode

    def states(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(ids)[None, :, None], torch.nn.functional.one_hot(
            torch.tensor(ids) + 1, 200
        ).float()

    def drafts(features: torch.Tensor, ids: list[int], pending: int) -> list[int]:
        assert features.flatten().tolist() == ids  # of committed tokens alone
        assert pending == ids[-1] + 1
        return [pending + 1 + k if k < right else 0 for k in range(3)]

    answer, counts = decode(states, drafts, [1, 2], [stop], new=8)
    assert counts == accepted
    assert answer == list(range(3, min(stop, answer[-1]) + 1))
    assert answer[-1] == stop or len(answer) >= 8


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
