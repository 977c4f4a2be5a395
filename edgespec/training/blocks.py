"""How drafts of blocks are trained: many blocks in each text, each behind a random token of its
answers (arXiv 2602.06036). Knows no method: those say what their configurations and losses are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from edgespec.config import DraftConfig
from edgespec.config.fields import Fields
from edgespec.config.values import Shapes
from edgespec.errors import RequestError, UnsupportedModel
from edgespec.methods.block_draft import BlockDraftConfig, default_outputs
from edgespec.modules.block_draft import BlockDraftModule
from edgespec.training.block_keys import PROJECTOR
from edgespec.training.data import Row, Rows
from edgespec.training.keys import shown
from edgespec.training.losses import dpace_weights, token_losses
from edgespec.training.new_draft import architecture, layer_keys, layer_shapes
from edgespec.training.recipe import TrainRecipe
from edgespec.training.row import BaseFacts, Batch, Task

Tensor = torch.Tensor
USUAL_LAYERS = 5
# No UTF-8 text has the byte 0xFF: its token in byte-level BPE, and of SentencePiece's byte fallback
UNUSED_BYTES = ("ÿ", "<0xFF>")
AT_ONCE = 64  # blocks in a pass that measures

# A new draft


def block_architecture(recipe: TrainRecipe, more: Sequence[str] = ()) -> dict[str, Any]:
    """The recipe's keys of the architecture. Raises UnsupportedModel for those of another draft."""
    given = architecture(recipe, ("target_layer_ids", PROJECTOR, *more))
    if (projector := given.pop(PROJECTOR, "none")) not in ("none", recipe.method):
        raise UnsupportedModel(
            f"{recipe.source}: {PROJECTOR} {shown(projector)}: the method is {recipe.method}",
            f"Write {recipe.method}, or remove the key.",
        )
    return given


def block_config(
    facts: BaseFacts, recipe: TrainRecipe, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json of a new draft but its class, and the keys that some layouts have in a section of
    their own, as z-lab's."""
    depth = facts.config.decoder.num_layers
    num_layers = given.get("num_hidden_layers", max(1, min(USUAL_LAYERS, depth - 3)))
    section: dict[str, Any] = {
        "mask_token_id": mask_token(facts, recipe),
        "target_layer_ids": given.get("target_layer_ids")
        or default_outputs(depth, num_layers, Fields(given, recipe.source)),
    }
    config = {
        "model_type": "qwen3",
        "block_size": recipe.section("block_size"),
        "num_target_layers": depth,
        **layer_keys(facts, given, num_layers),
        "layer_types": ["full_attention"] * num_layers,
    }
    return config, section


def sliding_keys(recipe: TrainRecipe) -> dict[str, Any]:
    """The keys of that section for a window over the context."""
    window = recipe.section("swa_window_size")
    return {} if window is None else {"use_swa": True, "swa_window_size": window}


def mask_token(facts: BaseFacts, recipe: TrainRecipe) -> int:
    """The token of slots to be drafted: one that no text has. Raises RequestError where the
    tokenizer has none."""
    if (given := recipe.section("mask_token_id")) is not None:
        return int(given)
    vocabulary = facts.tokenizer.get_vocab()
    found = [facts.tokenizer.mask_token_id, *map(vocabulary.get, UNUSED_BYTES)]
    token = next((token for token in found if token is not None), None)
    if token is None:
        raise RequestError(
            "the base's tokenizer has no mask token and no token of an unused byte.",
            f"Name an id that no text has as {recipe.own_key('mask_token_id')}.",
        )
    return int(token)


def block_shapes(config: Mapping[str, Any], num_outputs: int) -> Shapes:
    """Name -> shape of a new draft's tensors, which reads so many layer outputs."""
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_outputs * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(config, index, hidden)
        for name in ("q_norm", "k_norm"):
            shapes[f"layers.{index}.self_attn.{name}.weight"] = (config["head_dim"],)
    return shapes


def check(config: DraftConfig, rows: Rows) -> None:
    """Raises RequestError where a text has the draft's mask token, and UnsupportedModel for a draft
    with a vocabulary of its own."""
    assert isinstance(config, BlockDraftConfig)
    if config.draft_vocab_size < config.vocab_size:
        raise UnsupportedModel("`init`: the draft has a vocabulary of its own.")
    count = sum(int((row.ids == config.mask_token_id).any()) for row in rows.rows)
    if count:
        raise RequestError(
            f"the mask token {config.mask_token_id} is in {count} conversations.",
            "Name an id that no text has as the recipe's mask_token_id.",
        )


# A step


def sample(
    recipe: TrainRecipe, rng: np.random.Generator, rows: Sequence[Row]
) -> dict[str, NDArray[Any]]:
    """`anchors` [B, A]: tokens of answers behind which blocks are drafted, each at most once a row;
    `kept` [B, A]: those that are there."""
    places = [np.flatnonzero(row.predicts[:-2] & row.predicts[1:-1]) + 1 for row in rows]
    width = min(recipe.section("num_anchors"), max(1, *map(len, places)))
    anchors, kept = np.ones((2, len(rows), width), np.int64)
    for index, found in enumerate(places):
        some = rng.permutation(found)[:width]
        anchors[index, : len(some)] = some
        kept[index, len(some) :] = 0
    return {"anchors": anchors, "kept": kept.astype(np.bool_)}


@dataclass(frozen=True, slots=True)
class Slots:
    """What a loss is made of: A blocks in each of B texts, and the D slots of each that draft, of
    which N are `counted` [B, A, D]: they stand for what is learned.

    `states` [B, A, D, H] are what the lm_head reads, `before` [B, A, D] the tokens before those
    that slots draft. Of the counted ones `tokens` [N] are the text's, and `final` [N, H] the base's
    states that say them.
    """

    counted: Tensor
    states: Tensor
    before: Tensor
    tokens: Tensor
    final: Tensor


def slots_of(draft: BlockDraftModule, task: Task, batch: Batch) -> Slots:
    """The slots of a batch."""
    ids, anchors, config = batch["ids"], batch["anchors"], draft.draft_config
    aux, final = task.states(ids)
    states = draft.blocks(aux, block_embeds(task, config, ids, anchors), anchors)
    before = anchors[..., None] + torch.arange(config.num_drafts, device=ids.device)
    last = before.clamp(max=ids.shape[1] - 2)
    rows = torch.arange(len(ids), device=ids.device)[:, None, None]
    counted = batch["kept"][..., None] & (before + 1 < batch["lengths"][:, None, None])
    counted = counted & batch["predicts"][rows, last]
    return Slots(
        counted,
        states[:, :, config.first_slot :],
        ids[rows, last],
        ids[rows, last + 1][counted],
        final[rows, last][counted],
    )


def loss(draft: BlockDraftModule, task: Task, batch: Batch) -> Tensor:
    """The weighted mean over all slots that stand for what is learned."""
    recipe, slots = task.recipe, slots_of(draft, task, batch)
    logits = draft.lm_head(slots.states[slots.counted]).float()  # [N, V]
    theirs = task.logits(slots.final) if recipe.loss != "ce" else logits
    each = token_losses(recipe.loss, logits, theirs, slots.tokens)
    if recipe.section("loss_objective") == "dpace":
        weights = reached_weights(recipe, logits.detach(), slots)
    else:
        weights = near_weights(recipe, slots.counted)
    return weighted_mean(task, each, weights)


def reached_weights(recipe: TrainRecipe, logits: Tensor, slots: Slots) -> Tensor:
    """D-PACE's weight of each counted slot, [N]."""
    said = logits.new_zeros(slots.counted.shape)
    said[slots.counted] = torch.exp(-F.cross_entropy(logits, slots.tokens, reduction="none"))
    return dpace_weights(said, recipe.section("dpace_alpha"), slots.counted)[slots.counted]


def near_weights(recipe: TrainRecipe, counted: Tensor) -> Tensor:
    """The weight of each counted slot, [N]: less the further it is, or 1 without a decay."""
    gamma = recipe.section("loss_decay_factor")
    slots = torch.arange(counted.shape[-1], device=counted.device)
    decay = torch.exp(-slots / gamma) if gamma else torch.ones_like(slots, dtype=torch.float32)
    return decay.expand(counted.shape)[counted]


def weighted_mean(task: Task, each: Tensor, weights: Tensor) -> Tensor:
    """The mean of N losses by their weights, those of all processes; 0 where there are none."""
    return (each * weights).sum() / task.ranks.mean(weights.sum()).clamp_min(1e-6)


def block_embeds(task: Task, config: BlockDraftConfig, ids: Tensor, anchors: Tensor) -> Tensor:
    """Embeddings [B, A, block, H]: the anchor's token, then masks."""
    tokens = torch.full((*anchors.shape, config.block_size), config.mask_token_id)
    tokens = tokens.to(ids.device)
    tokens[..., 0] = ids.gather(1, anchors)
    return task.table[tokens]


# Measuring


def blocks_behind(
    draft: BlockDraftModule, task: Task, aux: Tensor, ids: Tensor, first: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens [A] of a text [1, S], from `first` on but the last, many at once, and what the lm_head
    reads of the slots behind each that draft, [A, D, H]."""
    config = draft.draft_config
    pending = torch.arange(first, ids.shape[1] - 1, device=ids.device)
    for part in torch.split(pending, AT_ONCE):
        states = draft.blocks(aux, block_embeds(task, config, ids, part[None]), part[None])
        yield ids[0, part], states[0, :, config.first_slot :]


def drafts(draft: BlockDraftModule, task: Task, aux: Tensor, ids: Tensor, first: int) -> Tensor:
    """The best tokens of a block behind each token."""
    blocks = blocks_behind(draft, task, aux, ids, first)
    return torch.cat([draft.lm_head(states).argmax(-1) for _, states in blocks])
