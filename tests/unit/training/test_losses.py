"""Losses and gradients are ModelOpt's on the same weights and batch; LK, D-PACE and a smaller
vocabulary are by definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoTokenizer

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.config import ModelConfig
from edgespec.methods import METHODS
from edgespec.methods.block_draft import own_name
from edgespec.modules.base_model import load_base
from edgespec.modules.unrolled import Unrolled
from edgespec.training.job import aux_layers_of
from edgespec.training.losses import dpace_weights, token_losses
from edgespec.training.recipe import read_recipe
from edgespec.training.row import BaseFacts, Task, row_of
from edgespec.training.table import TRAINABLE
from tests.modelopt_training import ANCHORS, BLOCK, DRAFTS, MASK


def task_of(
    method: str, base_dir: Path, keys: dict[str, Any], layers: dict[str, Any] | None = None
) -> Task:
    """A task of a new draft with such keys in the method's section."""
    name, checkpoint = TRAINABLE[method].section, open_checkpoint(base_dir)
    section = keys if layers is None else {**keys, f"{name}_architecture_config": layers}
    recipe = read_recipe({name: section, "training": {"bf16": False}}, "test", method)
    model, row = detect(checkpoint), row_of(method)
    assert isinstance(model, ModelConfig)
    facts = BaseFacts(checkpoint, model, checkpoint.config, AutoTokenizer.from_pretrained(base_dir))
    raw, form = row.config(facts, recipe), METHODS[method].format
    assert form is not None
    config = form.parse(raw, row.shapes(raw), "test")
    base = load_base(base_dir, "cpu", torch.float32).requires_grad_(False)
    table = base.get_input_embeddings().weight
    return Task(recipe, config, base, table, aux_layers_of(config, model))


METHOD_OF = {"dpace": "dflash", "decay": "dflash"}
SIZES = {"eagle3": {"rms_norm_eps": 1e-6}, "dflash": {"rms_norm_eps": 1e-6, "num_hidden_layers": 2}}


def own_part(key: str) -> str:
    """`weight.` or `grad.` and our own name of a tensor of a draft of blocks."""
    part, dot, name = key.partition(".")
    return f"{part}.{own_name(name)}" if dot else key


@pytest.mark.parametrize("name", list(DRAFTS))
def test_loss_and_gradients_are_those_of_modelopt(name: str, modelopt_drafts: Path) -> None:
    theirs = load_file(modelopt_drafts / f"{name}.safetensors")
    method, keys = METHOD_OF.get(name, name.partition("-")[0]), dict(DRAFTS[name])
    of_blocks, sizes = TRAINABLE[method].section == "dflash", SIZES.get(method)
    if of_blocks:
        keys |= {"dflash_block_size": BLOCK, "dflash_mask_token_id": MASK}
        sizes = SIZES["dflash"] | keys.pop("dflash_architecture_config", {})
        theirs = {own_part(key): tensor for key, tensor in theirs.items()}
    task = task_of(method, modelopt_drafts / "base", keys, sizes)
    outputs = theirs.get("outputs", torch.zeros(0))
    assert [layer - 1 for layer in task.aux_layers] == outputs.tolist()
    row = row_of(method)
    draft = row.module(task.config)
    draft.lm_head = task.base.lm_head
    names = row.new_names(task.config) if row.new_names else {n: n for n in draft.state_dict()}
    weights = {key: theirs[f"weight.{n}"] for key, n in names.items() if f"weight.{n}" in theirs}
    missing, unexpected = draft.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    ids, mask = theirs["ids"], theirs["mask"] > 0
    batch = {"ids": ids, "lengths": torch.full((len(ids),), ids.shape[1])}
    if method == "eagle3":  # whose mask is of the token before the one that is predicted
        batch["predicts"] = mask
    else:
        batch["predicts"] = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
    if of_blocks:
        anchors = torch.tensor(ANCHORS)
        batch |= {"anchors": anchors, "kept": torch.ones_like(anchors) > 0}
    loss = row.loss(draft, task, batch)
    torch.testing.assert_close(loss.detach(), theirs["loss"][0], rtol=1e-5, atol=0)
    loss.backward()
    grads = {k: p.grad for k, p in draft.named_parameters() if p.grad is not None}
    assert {f"grad.{names[k]}" for k in grads} == {k for k in theirs if k.startswith("grad.")}
    if method == "eagle3":
        del grads["layers.0.input_layernorm.weight"]  # see modelopt_training
    for key, grad in grads.items():
        wanted = theirs[f"grad.{names[key]}"]
        torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_lk_is_minus_the_log_of_what_is_accepted() -> None:
    theirs, ours = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.1, 0.6, 0.3]])
    found = token_losses("lk", ours.log(), theirs.log(), torch.tensor([0]))
    assert float(found) == pytest.approx(-torch.tensor(0.1 + 0.3 + 0.2).log().item(), rel=1e-5)
    assert float(token_losses("lk", ours.log(), ours.log(), torch.tensor([0]))) == pytest.approx(0)


def test_a_slot_weighs_what_is_reached_from_it_on() -> None:
    said, counted = torch.tensor([0.5, 1.0, 0.2]), torch.tensor([True, False, True])
    first, second = 0.5 + 0.5 * 0.5, 0.5 + 0.5 * 0.2
    found = dpace_weights(said, 0.5, counted)
    assert found.tolist() == pytest.approx([first + first * second, first * second, first * second])


def test_a_smaller_vocabulary_is_trained_where_it_has_what_the_base_says(
    modelopt_drafts: Path,
) -> None:
    """Of tokens that it has not, nothing is learned; of the others the base's shares of its own."""
    task = task_of("eagle3", modelopt_drafts / "base", {"eagle_ttt_steps": 1}, {})
    draft, ids = row_of("eagle3").module(task.config), torch.randint(4, 250, (1, 12))
    batch = {"ids": ids, "predicts": ids > 0, "lengths": torch.tensor([12])}
    with torch.no_grad():
        aux, final = task.states(ids)
        logits = task.logits(final[0])[1:]
        best = logits.argmax(-1)
        kept = best[:6].unique()
        task.draft_ids = kept
        draft.lm_head = nn.Linear(64, len(kept), bias=False)
        said = draft.lm_head(Unrolled(draft, aux[:, :-1]).step(task.table[ids[:, 1:]]))[0]
        rows = torch.isin(best, kept)
        target = logits[rows][:, kept].softmax(-1)
        wanted = -(target * said[rows].log_softmax(-1)).sum(-1).mean()
        torch.testing.assert_close(row_of("eagle3").loss(draft, task, batch), wanted)


def test_states_are_learned_beside_tokens(modelopt_drafts: Path) -> None:
    """Smooth L1 to the base's states, and a tenth of the cross-entropy with what it says."""
    keys, layers = {"eagle_ttt_steps": 1}, {"use_aux_hidden_state": False}
    task = task_of("eagle1", modelopt_drafts / "base", keys, layers)
    draft, ids = row_of("eagle1").module(task.config), torch.randint(4, 250, (1, 12))
    draft.lm_head = task.base.lm_head
    batch = {"ids": ids, "predicts": ids > 0, "lengths": torch.tensor([12])}
    with torch.no_grad():
        final = task.states(ids)[1]
        said = Unrolled(draft, final[:, :-1]).step(task.table[ids[:, 1:]])[0]
        off, theirs = (said - final[0, 1:]).abs(), task.logits(final[0, 1:]).softmax(-1)
        states = torch.where(off < 1, off.square() / 2, off - 0.5).mean()
        tokens = -(theirs * draft.lm_head(said).log_softmax(-1)).sum(-1).mean()
        found = row_of("eagle1").loss(draft, task, batch)
    torch.testing.assert_close(found, states + 0.1 * tokens)
