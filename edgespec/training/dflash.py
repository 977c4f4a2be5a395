"""How a DFlash draft is trained: many blocks in each text, by the base's distribution or the text's
own tokens, near slots weighing more (arXiv 2602.06036) or by D-PACE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from edgespec.config import DraftConfig
from edgespec.config.fields import Fields
from edgespec.config.values import Shapes
from edgespec.errors import RequestError, UnsupportedModel
from edgespec.graphs.block_draft import named_tensors
from edgespec.methods.block_draft import BlockDraftConfig, default_outputs
from edgespec.modules.block_draft import BlockDraftModule
from edgespec.training.data import Row, Rows
from edgespec.training.losses import dpace_weights, token_losses
from edgespec.training.new_draft import architecture, layer_keys, layer_shapes
from edgespec.training.recipe import TrainRecipe
from edgespec.training.row import BaseFacts, Batch, Task, TrainRow

Tensor = torch.Tensor
USUAL_LAYERS = 5
# No UTF-8 text has the byte 0xFF: its token in byte-level BPE, and of SentencePiece's byte fallback
UNUSED_BYTES = ("ÿ", "<0xFF>")
AT_ONCE = 64  # blocks in a pass that measures


def new_config(facts: BaseFacts, recipe: TrainRecipe) -> dict[str, Any]:
    """A new draft's config.json in the layout of its authors."""
    given = architecture(recipe, ("target_layer_ids", "projector_type"))
    depth = facts.config.decoder.num_layers
    num_layers = given.get("num_hidden_layers", max(1, min(USUAL_LAYERS, depth - 3)))
    section: dict[str, Any] = {
        "mask_token_id": mask_token(facts, recipe),
        "target_layer_ids": given.get("target_layer_ids")
        or default_outputs(depth, num_layers, Fields(given, recipe.source)),
    }
    if (window := recipe.section("swa_window_size")) is not None:
        section |= {"use_swa": True, "swa_window_size": window}
    if recipe.section("draft_attention") == "causal":
        section["causal"] = True
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": recipe.section("block_size"),
        "dflash_config": section,
        "num_target_layers": depth,
        **layer_keys(facts, given, num_layers),
        "layer_types": ["full_attention"] * num_layers,
    }


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
            "Name an id that no text has as dflash.dflash_mask_token_id.",
        )
    return int(token)


def new_shapes(config: Mapping[str, Any]) -> Shapes:
    """Name -> shape of a new draft's tensors."""
    hidden, outputs = config["hidden_size"], config["dflash_config"]["target_layer_ids"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(outputs) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(config, index, hidden)
        for name in ("q_norm", "k_norm"):
            shapes[f"layers.{index}.self_attn.{name}.weight"] = (config["head_dim"],)
    return shapes


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


def loss(draft: BlockDraftModule, task: Task, batch: Batch) -> Tensor:
    """The weighted mean over all slots that stand for what is learned."""
    ids, anchors, recipe = batch["ids"], batch["anchors"], task.recipe
    config = draft.draft_config
    aux, final = task.states(ids)
    states = draft.blocks(aux, block_embeds(task, config, ids, anchors), anchors)[:, :, 1:]
    before = anchors[..., None] + torch.arange(config.block_size - 1, device=ids.device)
    last = before.clamp(max=ids.shape[1] - 2)
    rows = torch.arange(len(ids), device=ids.device)[:, None, None]
    counted = batch["kept"][..., None] & (before + 1 < batch["lengths"][:, None, None])
    counted = counted & batch["predicts"][rows, last]  # [B, A, D]
    logits = draft.lm_head(states[counted]).float()  # [N, V]
    tokens = ids[rows, last + 1][counted]
    theirs = task.logits(final[rows, last][counted]) if recipe.loss != "ce" else logits
    each = token_losses(recipe.loss, logits, theirs, tokens)
    weights = slot_weights(recipe, logits.detach(), tokens, counted)
    return (each * weights).sum() / task.ranks.mean(weights.sum()).clamp_min(1e-6)


def slot_weights(recipe: TrainRecipe, logits: Tensor, tokens: Tensor, counted: Tensor) -> Tensor:
    """The weight of each counted slot, [N]."""
    if recipe.section("loss_objective") == "dpace":
        said = logits.new_zeros(counted.shape)
        said[counted] = torch.exp(-F.cross_entropy(logits, tokens, reduction="none"))
        return dpace_weights(said, recipe.section("dpace_alpha"), counted)[counted]
    gamma = recipe.section("loss_decay_factor")
    slots = torch.arange(counted.shape[-1], device=logits.device)
    decay = torch.exp(-slots / gamma) if gamma else torch.ones_like(slots, dtype=torch.float32)
    return decay.expand(counted.shape)[counted]


def block_embeds(task: Task, config: BlockDraftConfig, ids: Tensor, anchors: Tensor) -> Tensor:
    """Embeddings [B, A, block, H]: the anchor's token, then masks."""
    tokens = torch.full((*anchors.shape, config.block_size), config.mask_token_id)
    tokens = tokens.to(ids.device)
    tokens[..., 0] = ids.gather(1, anchors)
    return task.table[tokens]


def drafts(draft: BlockDraftModule, task: Task, aux: Tensor, ids: Tensor, first: int) -> Tensor:
    """The best tokens of a block behind each token, many blocks at once."""
    found = []
    pending = torch.arange(first, ids.shape[1] - 1, device=ids.device)
    for part in torch.split(pending, AT_ONCE):
        embeds = block_embeds(task, draft.draft_config, ids, part[None])
        found.append(draft.lm_head(draft.blocks(aux, embeds, part[None])[0, :, 1:]).argmax(-1))
    return torch.cat(found)


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
            "Name an id that no text has as dflash.dflash_mask_token_id.",
        )


ROW = TrainRow(
    config=new_config,
    shapes=new_shapes,
    names=named_tensors,  # type: ignore[arg-type]
    module=BlockDraftModule,  # type: ignore[arg-type]
    loss=loss,
    drafts=drafts,
    sample=sample,
    check=check,
)
