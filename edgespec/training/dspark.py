"""How a DSpark draft is trained (arXiv 2607.05147): by the text, by the distance from the base's
distribution, and its confidences by what the two have in common. Near slots weigh more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from edgespec.checkpoint.files import Checkpoint
from edgespec.config import DraftConfig
from edgespec.config.fields import Fields
from edgespec.config.values import Shapes
from edgespec.errors import RequestError
from edgespec.graphs.block_draft import named_tensors
from edgespec.methods.base import HeadSizes
from edgespec.methods.dspark import DEEPSPEC, DSparkConfig, read_heads
from edgespec.modules.dspark import DSpark
from edgespec.training import blocks
from edgespec.training.recipe import TrainRecipe
from edgespec.training.row import BaseFacts, Batch, Task, TrainRow

Tensor = torch.Tensor
HEAD_KEYS = ("markov_rank", "markov_head_type", "use_confidence_head")
USUAL_RANK = 256  # of published drafts


def new_config(facts: BaseFacts, recipe: TrainRecipe) -> dict[str, Any]:
    """A new draft's config.json in the layout of its authors, all keys side by side."""
    given = blocks.block_architecture(recipe, HEAD_KEYS)
    config, section = blocks.block_config(facts, recipe, given)
    rank = given.get("markov_rank", USUAL_RANK)
    confidence = Fields(given, recipe.source).flag("use_confidence_head", True)
    check_confidence(recipe, confidence)
    config |= {
        "architectures": ["Qwen3DSparkModel"],
        **section,
        "markov_rank": rank,
        "markov_head_type": given.get("markov_head_type", "vanilla"),
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": rank != 0,
        "is_causal": recipe.section("draft_attention") == "causal",
    }
    if (window := recipe.section("swa_window_size")) is not None:
        config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
        config["sliding_window"] = window
    read_heads(Fields(config, recipe.source), DEEPSPEC)
    return config


def check_confidence(recipe: TrainRecipe, there: bool) -> None:
    """Raises RequestError where there is a confidence head that nothing trains, or a weight for one
    that is not there."""
    key = recipe.own_key("confidence_head_alpha")
    if there and recipe[key] == 0:
        raise RequestError(
            f"{recipe.source}: {key} is 0: the confidence head would learn nothing",
            "Give it a weight, or write use_confidence_head: false.",
        )
    if not there and recipe.values.get(key):
        raise RequestError(
            f"{recipe.source}: {key} is {recipe[key]}, and use_confidence_head is false",
            f"Write use_confidence_head: true, or remove {key}.",
        )


def new_shapes(config: Mapping[str, Any]) -> Shapes:
    """Name -> shape of a new draft's tensors."""
    heads, vocab = read_heads(Fields(config, "config.json"), DEEPSPEC), config["vocab_size"]
    sizes = HeadSizes(vocab, vocab, config["hidden_size"])
    return {**blocks.block_shapes(config, len(config["target_layer_ids"])), **heads.shapes(sizes)}


def names(draft: Checkpoint, config: DraftConfig) -> tuple[Checkpoint, dict[str, str]]:
    """The draft under our own names, and those of layers and heads."""
    assert isinstance(config, DSparkConfig)
    named, own = named_tensors(draft, config)
    return named, own | {name: name for name in config.head_shapes}


def module(config: DraftConfig) -> DSpark:
    """The draft; an lm_head of its own is a copy of the base's, which stays as it is."""
    assert isinstance(config, DSparkConfig)
    draft = DSpark(config)
    draft.lm_head.requires_grad_(False)
    return draft


def loss(draft: DSpark, task: Task, batch: Batch) -> Tensor:
    """The weighted mean over all slots that stand for what is learned, of three terms; the
    confidences learn how probably a token that is drawn from the draft is accepted."""
    recipe, slots = task.recipe, blocks.slots_of(draft, task, batch)
    counted, embeds = slots.counted, None
    logits = draft.lm_head(slots.states[counted])  # [N, V]
    if draft.markov_head is not None:
        embeds = draft.markov_head.markov_w1(slots.before)
        read = draft.markov_head.read(embeds, slots.states)[counted]
        logits, embeds = logits + draft.markov_head.markov_w2(read), embeds[counted]
    logits, theirs = logits.float(), task.logits(slots.final)
    distance = (logits.softmax(-1) - theirs.softmax(-1)).abs().sum(-1)
    each = recipe.section("ce_loss_alpha") * F.cross_entropy(
        logits, slots.tokens, reduction="none"
    ) + (recipe.section("l1_loss_alpha") * distance)
    if draft.confidence_head is not None:
        confidence = draft.confidence_head(slots.states[counted], embeds).float()
        accepted = (1 - distance.detach() / 2).clamp(0, 1)
        surprise = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
        each = each + recipe.section("confidence_head_alpha") * surprise
    return blocks.weighted_mean(task, each, blocks.near_weights(recipe, counted))


def drafts(draft: DSpark, task: Task, aux: Tensor, ids: Tensor, first: int) -> Tensor:
    """A whole block behind each token, however confident: what is cut of it depends on the device
    that runs it."""
    behind = blocks.blocks_behind(draft, task, aux, ids, first)
    return torch.cat([draft.walk(states, tokens) for tokens, states in behind])


ROW = TrainRow(
    config=new_config,
    shapes=new_shapes,
    names=names,
    module=module,
    loss=loss,
    drafts=drafts,
    sample=blocks.sample,
    check=blocks.check,
)
