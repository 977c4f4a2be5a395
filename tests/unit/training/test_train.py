"""Trainings of a toy base: what they leave, how they go on, and what they refuse."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.errors import BuildError, EdgeSpecError
from edgespec.methods.block_draft import BlockDraftConfig, own_name
from edgespec.methods.dspark import DSparkConfig
from edgespec.methods.eagle1 import Eagle1Config
from edgespec.methods.eagle3 import Eagle3Config
from edgespec.methods.medusa import MedusaConfig
from edgespec.pairing.check import check
from edgespec.pipeline.recipe import overridden
from edgespec.progress import Silent
from edgespec.training import train as trains
from edgespec.training import trainer
from edgespec.training.acceptance import Answer, accepted_in, measure
from edgespec.training.job import Job, open_job
from edgespec.training.recipe import read_recipe
from edgespec.training.row import TrainRow
from edgespec.training.table import TRAINABLE
from edgespec.training.train import Trained, measured_steps, train
from tests import toys

KEYS = (
    "training.max_steps=6", "training.per_device_train_batch_size=2", "training.save_steps=2",
    "validation.max_new_tokens=8", "validation.num_prompts=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def hybrid(base: Path) -> Path:
    return toys.make_qwen3_5(base.parent / "hybrid")


def job_of(
    base: Path, chats: Path, out: Path, method: str, *keys: str,
    init: Path | None = None, occupied: bool = False,
) -> Job:  # fmt: skip
    places = (
        f"model.model_name_or_path={base}", f"data.data_path={chats}",
        f"training.output_dir={out}",
    )  # fmt: skip
    kind = {"metadata": {"recipe_type": TRAINABLE[method].recipe_type}}
    recipe = read_recipe(overridden(kind, (*KEYS, *places, *keys)), "test", method)
    first = str(init) if init else None
    return open_job(recipe, first, Silent(), lambda _: None, occupied=occupied)


@contextmanager
def unstopped() -> Iterator[Callable[[], bool]]:
    yield lambda: False


def run(*args: Any, **more: Any) -> Trained:
    return train(job_of(*args, **more), unstopped)


SMALL = (
    "eagle.eagle_architecture_config={draft_vocab_size: 100, num_hidden_layers: 2, fc_norm: true,"
    " norm_output: true}"
)
ARCH = "eagle.eagle_architecture_config="
MASK = "dflash.dflash_mask_token_id=0"
BLOCK_ARCH = "dflash.dflash_architecture_config="
BLOCK_WEIGHT = "dflash.dflash_confidence_head_alpha"
BLOCK = ("dflash.dflash_block_size=4", "training.answer_only_loss=false", MASK)
USUAL = dict.fromkeys(("dspark", "jetspec", "dflash"), BLOCK)  # keys of a method's toys


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("eagle3", (SMALL, "training.loss=lk")),
        ("eagle3", ("training.optim=adamw_torch", "eagle.eagle_self_logit_distillation=false")),
        (
            "dflash",
            (*BLOCK, "dflash.dflash_swa_window_size=6", "dflash.dflash_draft_attention=causal"),
        ),
        ("jetspec", (*BLOCK, "dflash.dflash_swa_window_size=6")),
        (
            "dspark",
            (
                *BLOCK,
                f"{BLOCK_ARCH}{{markov_rank: 8, markov_head_type: rnn, num_hidden_layers: 2}}",
                "dflash.dflash_swa_window_size=6",
                "dflash.dflash_draft_attention=causal",
            ),
        ),
        ("eagle1", (f"{ARCH}{{use_last_layernorm: true, bias: false}}",)),
    ],
)
def test_a_draft_belongs_to_its_base_and_is_what_was_measured(
    base: Path, chats: Path, tmp_path: Path, method: str, keys: tuple[str, ...]
) -> None:
    done = run(base, chats, tmp_path / "draft", method, *keys)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
    report = json.loads((done.directory / "training.json").read_text())
    assert done.acceptance is not None
    assert report["acceptance"]["length"] == round(done.acceptance.length, 4)
    assert (done.steps, report["steps"]) == (6, 6)
    assert [r.what for r in check(str(base), str(done.directory)).results if r.level != "ok"] == []
    config, raw = detect(open_checkpoint(done.directory)), open_checkpoint(base).config
    assert config.decoder.rope.theta == open_checkpoint(base).config["rope_theta"]
    assert config.decoder.rope.kind == "default"
    assert config.decoder.intermediate_size == raw["intermediate_size"]
    assert open_checkpoint(done.directory).config["eos_token_id"] == [2, 0]
    if isinstance(config, Eagle3Config):
        own = SMALL in keys
        assert (config.fc_norm, config.norm_output) == (own, own)
        assert (config.decoder.num_layers, config.draft_vocab_size) == (
            (2, 100) if own else (1, 256)
        )
    elif isinstance(config, Eagle1Config):
        assert (config.last_norm, config.fc_bias, config.norm_output) == (True, False, False)
    else:
        assert isinstance(config, BlockDraftConfig)
        assert config.method == method
        assert (config.windows[0], config.causal[0], config.block_size) == (6, True, 4)
    if isinstance(config, DSparkConfig):
        assert (config.heads.markov_kind, config.heads.markov_rank) == ("rnn", 8)
        assert (config.layout, config.num_drafts, config.heads.confidence) == ("deepspec", 4, True)


def test_heads_are_published_as_their_authors_do(base: Path, chats: Path, tmp_path: Path) -> None:
    keys = ("medusa.medusa_num_heads=2", "medusa.medusa_num_layers=2", "training.loss=lk")
    done = run(base, chats, tmp_path / "draft", "medusa", *keys)
    assert {path.name for path in done.directory.iterdir()} == {
        "config.json", "medusa_lm_head.safetensors", "training.json"
    }  # fmt: skip
    config = detect(open_checkpoint(done.directory))
    assert isinstance(config, MedusaConfig)
    assert (config.layout, config.num_heads, config.num_blocks) == ("medusa", 2, 2)
    assert (config.declared_heads, config.own_head, config.vocab_size) == (2, True, 256)
    assert [r.what for r in check(str(base), str(done.directory)).results if r.level != "ok"] == []


@pytest.mark.parametrize("make", [toys.make_gemma3, toys.make_qwen3_5])
@pytest.mark.parametrize("method", [name for name in TRAINABLE if name != "mtp"])
def test_bases_of_other_forms_get_drafts(
    make: Callable[..., Path], method: str, chats: Path, tmp_path: Path
) -> None:
    base = make(tmp_path / "base", layers=8)
    keys = (*USUAL.get(method, ()), "training.max_steps=1")
    done = run(base, chats, tmp_path / "draft", method, *keys)
    levels = [r.what for r in check(str(base), str(done.directory)).results if r.level == "refused"]
    assert levels == []


def test_modelopt_s_loss_trains_a_draft_of_this_base(modelopt_made: Path) -> None:
    place = modelopt_made / "engine"
    ours, theirs = (
        [
            point["loss"]
            for point in json.loads((place / name / "training.json").read_text())["curve"]
        ]
        for name in ("edgespec", "modelopt")
    )
    assert theirs[0] == pytest.approx(ours[0], rel=1e-4)
    assert theirs[1] < theirs[0]
    norm = load_file(place / "modelopt" / "model.safetensors")["layers.0.input_layernorm.weight"]
    assert torch.equal(norm, torch.ones_like(norm))


@pytest.mark.parametrize("name", ["modelopt", "python"])
def test_what_modelopt_trained_is_exported_as_a_draft_of_this_base(
    name: str, modelopt_made: Path
) -> None:
    place = modelopt_made / "engine"
    found = check(str(place / "base"), str(place / name)).results
    assert [r.what for r in found if r.level != "ok"] == []
    draft, base = (open_checkpoint(place / of) for of in (name, "base"))
    config, model = detect(draft), detect(base)
    assert config.decoder.rope == model.decoder.rope
    assert config.decoder.num_layers == (1 if name == "modelopt" else 2)
    assert draft.config["eos_token_id"] == [*model.eos_token_ids]
    assert draft.config["bos_token_id"] == model.bos_token_id
    if name == "python":
        fc = load_file(place / "fc.safetensors")["fc"]
        assert torch.equal(load_file(place / name / "model.safetensors")["fc.weight"], fc)


@pytest.mark.parametrize("method", ["eagle3", "dflash", "medusa", "mtp"])
def test_a_killed_run_goes_on_to_the_same_bits(
    base: Path, hybrid: Path, chats: Path, tmp_path: Path, method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    base = hybrid if method == "mtp" else base
    keys = USUAL.get(method, ())
    whole = run(base, chats, tmp_path / "whole", method, *keys)
    real, calls = trainer.Objective.forward, [0]

    def killed(self: Any, **batch: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:  # behind the checkpoint of step 3
            raise KeyboardInterrupt
        return real(self, **batch)

    monkeypatch.setattr(trainer.Objective, "forward", killed)
    with pytest.raises(KeyboardInterrupt):
        run(base, chats, tmp_path / "draft", method, *keys)
    work = tmp_path / ".draft.train"
    (work / "checkpoint-9").mkdir()  # not whole: it has no state.json
    (kept,) = work.glob("checkpoint-*/*.safetensors")
    assert not any(name.startswith("model.") for name in load_file(kept))
    with pytest.raises(EdgeSpecError, match=r"another training.seed: 0, not 1"):
        run(base, chats, tmp_path / "draft", method, *keys, "training.seed=1")
    again = run(base, chats, tmp_path / "draft", method, *keys)
    assert calls[0] == 7  # steps 1 to 3, the one that was killed, and 4 to 6
    assert again.acceptance == whole.acceptance
    a, b = (load_file(d.directory / kept.name) for d in (whole, again))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not work.exists()


def test_a_checkpoint_counts_once_all_of_it_is_on_the_disk(
    base: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, torn, kept = set[int](), list[Path](), list[str]()
    real_sync, real_write = os.fsync, trainer.json_files.write_json

    def sync(fd: int) -> None:
        real_sync(fd)
        synced.add(os.fstat(fd).st_ino)

    def write(path: Path, value: Any) -> None:
        if path.name == trainer.STATE:
            kept.append(path.parent.name)
            best = path.parents[1] / f"best-{value['best_step']}"
            files = [p for d in (path.parent, best) for p in (d, *d.iterdir())]
            torn.extend(p for p in files if p.stat().st_ino not in synced)
        real_write(path, value)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(trainer.json_files, "write_json", write)
    run(base, chats, tmp_path / "draft", "eagle3", "training.max_steps=2")
    assert (kept, torn) == (["checkpoint-1", "checkpoint-2"], [])


def test_a_signal_saves_and_leaves(base: Path, chats: Path, tmp_path: Path) -> None:
    asked = [0]

    @contextmanager
    def stopping() -> Iterator[Callable[[], bool]]:
        def stop() -> bool:
            asked[0] += 1
            return asked[0] == 3

        yield stop

    stopped = train(job_of(base, chats, tmp_path / "draft", "eagle3"), stopping)
    assert (stopped.acceptance, stopped.steps) == (None, 3)
    assert (stopped.directory / "checkpoint-3" / "state.json").exists()
    assert run(base, chats, tmp_path / "draft", "eagle3").steps == 6


def test_gradients_that_are_no_numbers_stop_at_the_last_good_checkpoint(
    base: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = trainer.Objective.forward, [0]

    def broken(self: Any, **batch: Any) -> Any:
        calls[0] += 1
        loss = real(self, **batch)["loss"]
        return {"loss": loss * float("nan") if calls[0] == 5 else loss}

    monkeypatch.setattr(trainer.Objective, "forward", broken)
    with pytest.raises(BuildError, match=r"step 5 is not a number") as caught:
        run(base, chats, tmp_path / "draft", "eagle3")
    monkeypatch.undo()
    kept = tmp_path / ".draft.train" / "checkpoint-4"
    assert str(kept) in caught.value.remedy
    moved = shutil.move(kept, tmp_path / "good")
    assert run(base, chats, tmp_path / "other", "eagle3", init=Path(moved)).steps == 6


def test_the_draft_with_the_most_acceptance_is_kept(
    base: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lengths, kept = measure, iter([1.5, 3.0, 2.0]), list[Any]()

    def scored(row: TrainRow, draft: Any, *rest: Any) -> Any:
        kept.append(draft.norm.weight.detach().clone())
        found = real(row, draft, *rest)
        return type(found)(int(1000 * next(lengths)), 1000, ())

    monkeypatch.setattr(trainer, "measure", scored)
    done = run(
        base, chats, tmp_path / "draft", "eagle3", "training.save_steps=3", "training.max_steps=3"
    )
    assert json.loads((done.directory / "training.json").read_text())["best_step"] == 2
    assert torch.equal(load_file(done.directory / "model.safetensors")["norm.weight"], kept[1])


@pytest.mark.parametrize(
    ("method", "make", "layout"),
    [
        *(
            ("eagle3", toys.make_draft, n)
            for n in ("eagle", "specforge", "modelopt", "speculators")
        ),
        *(("eagle1", toys.make_eagle1, layout) for layout in ("eagle", "modelopt")),
        *(("medusa", toys.make_medusa, layout) for layout in ("safetensors", "shared-head")),
        *(("dspark", toys.make_dspark, n) for n in ("deepspec", "specforge", "modelopt")),
    ],
)
def test_a_draft_of_any_layout_is_trained_further(
    base: Path, chats: Path, tmp_path: Path, method: str, make: Callable[..., Path], layout: str
) -> None:
    old = make(tmp_path / "old", base, layout)
    keys = ["training.max_steps=1", "training.learning_rate=0.0"]
    keys += [f"{ARCH}{{use_aux_hidden_state: false}}"] * (method == "eagle1")
    if method == "dspark":
        keys += ["training.answer_only_loss=false", f"{BLOCK_ARCH}{{projector_type: dspark}}"]
    done = run(base, chats, tmp_path / "draft", method, *keys, init=old)
    (file,) = old.glob("*.safetensors")
    before, after = (load_file(p / file.name) for p in (old, done.directory))
    if method == "dspark":
        before = {own_name(name): tensor for name, tensor in before.items()}
    assert {n: t.shape for n, t in before.items() if n != "t2d"} == {
        n: t.shape for n, t in after.items() if n != "t2d"
    }
    for name, tensor in before.items():
        torch.testing.assert_close(after[name].to(tensor.dtype), tensor, rtol=1e-2, atol=1e-2)
    assert detect(open_checkpoint(done.directory)).layout == detect(open_checkpoint(old)).layout


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(
    ("sizes", "key", "linked"),
    [
        ({}, "false", set()),
        ({"shards": 2, "experts": 4}, "true", {"model-00001-of-00002.safetensors"}),
        ({"mtp": False}, "false", {"model-00001-of-00002.safetensors"}),
    ],
)
def test_a_head_is_written_into_a_copy_of_its_base(
    sizes: dict[str, Any], key: str, linked: set[str], chats: Path, tmp_path: Path
) -> None:
    base = toys.make_qwen3_5(tmp_path / "base", **sizes)
    before, keys = bytes_of(base), ("training.max_steps=2", f"mtp.mtp_new_head={key}")
    done = run(base, chats, tmp_path / "out", "mtp", *keys)
    assert bytes_of(base) == before
    assert linked == {path.name for path in done.directory.iterdir() if path.stat().st_nlink > 1}
    old, new = open_checkpoint(base), open_checkpoint(done.directory)
    assert {
        n for n in new.tensors if n not in old.tensors or (old.read(n) != new.read(n)).any()
    } == {n for n in new.tensors if n.startswith("mtp.")}
    assert new.config["mtp_num_hidden_layers"] == 1
    assert [r.what for r in check(str(done.directory), None).results if r.level != "ok"] == []
    assert new.tensors.keys() >= old.tensors.keys()
    still = ("training.max_steps=1", "training.learning_rate=0.0")
    again = run(base, chats, tmp_path / "on", "mtp", *still, init=done.directory)
    for name in new.tensors:
        assert (open_checkpoint(again.directory).read(name) == new.read(name)).all()


@pytest.mark.parametrize("method", list(TRAINABLE))
def test_a_base_in_halves_is_trained_on(
    method: str, base: Path, hybrid: Path, chats: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As on a GPU, where it keeps the type of its checkpoint."""
    base = hybrid if method == "mtp" else base
    real = trains.load_base
    halves = lambda path, device, _, **more: real(path, device, torch.bfloat16, **more)  # noqa: E731
    monkeypatch.setattr(trains, "load_base", halves)
    keys = (*USUAL.get(method, ()), "training.max_steps=1")
    assert run(base, chats, tmp_path / "draft", method, *keys).acceptance is not None


def test_a_dry_run_leaves_nothing(base: Path, chats: Path, tmp_path: Path) -> None:
    job = job_of(base, chats, tmp_path / "draft", "eagle3")
    sizes = measured_steps(job)
    assert (sizes.steps, sizes.num_conversations) == (6, 7)
    assert sizes.draft_weights == sum(t.numel() for t in toy_weights(job))
    assert sizes.seconds == pytest.approx(6 * sizes.seconds_per_step)
    assert [*tmp_path.iterdir()] == []


def toy_weights(job: Job) -> list[torch.Tensor]:
    return [*job.row.module(job.config).state_dict().values()]


def test_steps_are_counted_as_an_engine_does() -> None:
    answer = Answer((7, 7, 1, 2, 3, 4, 5), prompt_len=2)
    drafts = [[2, 3, 9], [9, 9, 9], [9, 9, 9], [5, 6, 6]]  # behind 1, 2, 3 and 4
    assert accepted_in(answer, drafts) == [2, 1]  # 1 | 2 3 4 | 5
    assert accepted_in(answer, [[9]] * 4) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("method", "keys", "said"),
    [
        ("eagle3", ("training.output_dir=",), "does not say training.output_dir"),
        ("eagle3", ("data.data_path=none.jsonl",), "none.jsonl cannot be read"),
        ("eagle3", ("model.model_name_or_path={draft}",), "is an EAGLE-3 draft, not a base model"),
        ("eagle3", (f"{ARCH}{{layers: 2}}",), "nearest is .*num_hidden_layers"),
        ("eagle3", (f"{ARCH}{{draft_vocab_size: 300}}",), "has 256 tokens"),
        (
            "eagle3",
            (f"{ARCH}{{eagle_aux_hidden_state_layer_ids: [1, 3, 9]}}",),
            r"not all in 1\.\.7",
        ),
        ("eagle3", (f"{ARCH}{{use_mtp_layernorm: true}}",), "use_mtp_layernorm"),
        (
            "eagle3",
            ("data.draft_vocab_cache={d2t}", f"{ARCH}{{draft_vocab_size: 3}}"),
            "names a token twice",
        ),
        ("eagle1", (f"{ARCH}{{use_aux_hidden_state: true}}",), "use_aux_hidden_state is True"),
        ("medusa", ("data.draft_vocab_cache={d2t}",), "heads have the vocabulary of their base"),
        ("dflash", ("dflash.dflash_mask_token_id=1",), "mask token 1 is in 7 conversations"),
        ("dflash", (MASK, "dflash.dflash_architecture_config={target_layer_ids: [1, 9]}"), "1..7"),
        ("dspark", (MASK, f"{BLOCK_ARCH}{{markov_rank: x}}"), "'markov_rank' is 'x', not a whole"),
        ("dspark", (MASK, f"{BLOCK_WEIGHT}=0"), "head would learn nothing"),
        (
            "dspark",
            (MASK, f"{BLOCK_ARCH}{{use_confidence_head: false}}", f"{BLOCK_WEIGHT}=0.5"),
            "0.5, and use_confidence_head is false",
        ),
        ("jetspec", (MASK, f"{BLOCK_ARCH}{{projector_type: dspark}}"), "the method is jetspec"),
        ("dflash", (MASK, "validation.max_new_tokens=2040"), "prompts .* are longer than 8"),
        ("mtp", (), "bases of this family have no MTP head"),
        ("mtp", ("data.draft_vocab_cache=d2t.pt",), "the head has the lm_head of its base"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_base_is_loaded(
    base: Path, chats: Path, tmp_path: Path, method: str, keys: tuple[str, ...], said: str
) -> None:
    draft, d2t = tmp_path / "draft", tmp_path / "d2t.pt"
    toys.make_draft(draft, base, "modelopt")
    torch.save(torch.tensor([5, 4, 7]), d2t)
    given = [key.replace("{draft}", str(draft)).replace("{d2t}", str(d2t)) for key in keys]
    with pytest.raises(EdgeSpecError, match=said):
        job_of(base, chats, tmp_path / "out", method, *given)


def test_a_draft_of_another_method_or_base_is_refused(
    base: Path, chats: Path, tmp_path: Path
) -> None:
    eagle = toys.make_draft(tmp_path / "eagle", base, "modelopt")
    with pytest.raises(EdgeSpecError, match=r"`init`: .* is an EAGLE-3 draft, not a DFlash draft"):
        job_of(base, chats, tmp_path / "out", "dflash", init=eagle)
    tensors = load_file(eagle / "model.safetensors")
    raw = json.loads((eagle / "config.json").read_text())
    tensors["lm_head.weight"] = torch.zeros(300, 64)
    tensors.pop("d2t", None)
    save_file(tensors, eagle / "model.safetensors")
    (eagle / "config.json").write_text(
        json.dumps(raw | {"vocab_size": 300, "draft_vocab_size": 300})
    )
    with pytest.raises(EdgeSpecError, match="300"):
        job_of(base, chats, tmp_path / "out", "eagle3", init=eagle)
