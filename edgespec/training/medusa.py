"""How Medusa heads are trained: head i says the token i + 2 places behind the state that it reads,
and the base stays as it is (Medusa-1, arXiv 2401.10774, section 2.2.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from edgespec.checkpoint.files import Checkpoint
from edgespec.config import DraftConfig, ModelConfig
from edgespec.config.values import Shapes
from edgespec.graphs.medusa import expected_tensors, named_tensors
from edgespec.methods.medusa import MedusaConfig
from edgespec.modules.medusa import Medusa
from edgespec.training.losses import token_losses
from edgespec.training.recipe import TrainRecipe
from edgespec.training.row import BaseFacts, Batch, Task, TrainRow

Tensor = torch.Tensor
HEADS, HEAD_DECAY = 0.2, 0.8  # weights of all heads, and of a head by the one before, as published


def new_config(facts: BaseFacts, recipe: TrainRecipe) -> dict[str, Any]:
    """New heads' config.json in the layout of FasterDecoding."""
    return {
        "medusa_num_heads": recipe.section("num_heads"),
        "medusa_num_layers": recipe.section("num_layers"),
        "hidden_size": facts.config.decoder.hidden_size,
        "vocab_size": facts.config.vocab_size,
        "torch_dtype": facts.config.dtype,
    }


def new_shapes(config: Mapping[str, Any]) -> Shapes:
    """Name on disk -> shape of new heads' tensors."""
    hidden, blocks = config["hidden_size"], config["medusa_num_layers"]
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(config["medusa_num_heads"]):
        for block in range(blocks):
            shapes[f"{head}.{block}.linear.weight"] = (hidden, hidden)
            shapes[f"{head}.{block}.linear.bias"] = (hidden,)
        shapes[f"{head}.{blocks}.weight"] = (config["vocab_size"], hidden)
    return shapes


def new_names(config: DraftConfig) -> dict[str, str]:
    """Own name -> name on disk of new heads' tensors."""
    assert isinstance(config, MedusaConfig)
    return {own: name for own, name, _ in expected_tensors(config)}


def names(draft: Checkpoint, config: DraftConfig) -> tuple[Checkpoint, dict[str, str]]:
    """The same of heads that are there."""
    assert isinstance(config, MedusaConfig)
    return draft, named_tensors(draft, config)


def begin(draft: Medusa, base: Any, checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Each head says at first what the base's lm_head says."""
    for name, weight in draft.named_parameters():
        if name.endswith("lm_head.weight"):
            weight.copy_(base.lm_head.weight)


def loss(draft: Medusa, task: Task, batch: Batch) -> Tensor:
    """The sum over heads, each weighing less than the one before, of the mean loss of what is
    learned."""
    ids, predicts, lengths = batch["ids"], batch["predicts"], batch["lengths"]
    states, final = task.states(ids)  # the same, unless a dump has logits in its place
    places, total = torch.arange(ids.shape[1], device=ids.device), final.new_zeros(()).float()
    known = predicts & (places < lengths[:, None] - 1)  # the text does not say what follows its end
    heads = range(draft.draft_config.num_heads)
    counts = torch.stack([known[:, index + 1 :].sum() for index in heads])
    counts = task.ranks.mean(counts.float()).clamp_min(1e-6)
    for index in heads:
        ahead = index + 1
        learned = known[:, ahead:]
        theirs, tokens = final[:, ahead:][learned], ids[:, ahead:].roll(-1, 1)[learned]
        logits = draft(states[:, :-ahead][learned], index).float()
        base_logits = task.logits(theirs) if task.recipe.loss != "ce" else logits
        each = token_losses(task.recipe.loss, logits, base_logits, tokens)
        total = total + HEADS * HEAD_DECAY**index * each.sum() / counts[index]
    return total


def drafts(draft: Medusa, task: Task, final: Tensor, ids: Tensor, first: int) -> Tensor:
    """The best token of each head behind each token, by the state of the one before."""
    states = final[0, first - 1 : ids.shape[1] - 2]
    heads = range(draft.draft_config.num_heads)
    return torch.stack([draft(states, index).argmax(-1) for index in heads], dim=-1)


ROW = TrainRow(
    config=new_config,
    shapes=new_shapes,
    names=names,
    new_names=new_names,
    module=Medusa,  # type: ignore[arg-type]
    begin=begin,
    loss=loss,
    drafts=drafts,
    weights="medusa_lm_head.safetensors",
)
