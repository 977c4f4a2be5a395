"""How an EAGLE-3 draft is trained: by the training-time test (arXiv 2503.01840, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from edgespec.config.values import Shapes
from edgespec.errors import RequestError
from edgespec.graphs.eagle3 import named_tensors
from edgespec.methods.aux_layers import default_aux_layers
from edgespec.methods.eagle3 import POST_NORM_KEY
from edgespec.modules.eagle3 import Eagle3, Unrolled
from edgespec.training.eagle3_modelopt import modelopt_loss
from edgespec.training.losses import token_losses
from edgespec.training.new_draft import architecture, layer_keys, layer_shapes
from edgespec.training.recipe import TrainRecipe
from edgespec.training.row import BaseFacts, Batch, Task, TrainRow

Tensor = torch.Tensor
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
SWITCHES = ("norm_before_residual", "fc_norm", "norm_output")
USUAL = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}


def new_config(facts: BaseFacts, recipe: TrainRecipe) -> dict[str, Any]:
    """A new draft's config.json in ModelOpt's layout. Its switches that would make another graph
    are refused where the draft is read."""
    given = architecture(recipe, (*SWITCHES, *USUAL, AUX_KEY, "draft_vocab_size"))
    depth, vocab = facts.config.decoder.num_layers, facts.config.vocab_size
    usual = sorted({min(max(layer - 1, 0), depth - 1) for layer in default_aux_layers(depth)})
    draft_vocab = given.get("draft_vocab_size", vocab)
    if type(draft_vocab) is not int or not 1 <= draft_vocab <= vocab:
        raise RequestError(
            f"{recipe.source}: draft_vocab_size {draft_vocab}: the base has {vocab} tokens.",
            f"Write a number of 1..{vocab}.",
        )
    config = layer_keys(facts, given, given.get("num_hidden_layers", 1))
    inner = {AUX_KEY: given.get(AUX_KEY) or usual}
    inner |= {key: given.get(key, value) for key, value in USUAL.items()}
    if given.get("norm_output"):
        inner[POST_NORM_KEY] = True
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **config,
        "draft_vocab_size": draft_vocab,
        "norm_before_residual": bool(given.get("norm_before_residual", False)),
        "fc_norm": bool(given.get("fc_norm", False)),
        "eagle_config": inner,
    }


def new_shapes(config: Mapping[str, Any]) -> Shapes:
    """Name -> shape of a new draft's tensors."""
    hidden, aux_layers = config["hidden_size"], len(config["eagle_config"][AUX_KEY])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, aux_layers * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
        "layers.0.hidden_norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(config, index, hidden if index else 2 * hidden)
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(aux_layers)}
    return shapes


def loss(draft: Eagle3, task: Task, batch: Batch) -> Tensor:
    """The sum over unrolled steps, each weighing less than the one before, of the mean loss of what
    is learned and the draft's vocabulary has."""
    ids, predicts = batch["ids"], batch["predicts"]
    aux, final = task.states(ids)
    wanted = predicts.clone()
    wanted[:, 0] = False  # no chain predicts what follows the first token
    if task.recipe.loss == "ce":  # and the text does not say what follows its last
        wanted[torch.arange(len(ids), device=ids.device), batch["lengths"] - 1] = False
    logits, tokens = task.logits(final[wanted]), ids.roll(-1, 1)[wanted]  # [N, V], [N]
    if task.draft_ids is not None:
        known, tokens = in_draft(task, logits, tokens)
        logits = logits[:, task.draft_ids][known]
        tokens = tokens[known]
        wanted[wanted.clone()] = known
    place = torch.zeros_like(ids)
    place[wanted] = torch.arange(len(logits), device=ids.device)
    unrolled, total = Unrolled(draft, aux[:, :-1]), logits.new_zeros(())
    num_steps = min(task.recipe.section("ttt_steps"), ids.shape[1] - 1)
    counts = torch.stack([wanted[:, 1 + step :].sum() for step in range(num_steps)])
    counts = task.ranks.mean(counts.float()).clamp_min(1e-6)
    for step in range(num_steps):
        states = unrolled.step(task.table[ids[:, 1 + step :]])
        learned = wanted[:, 1 + step :]
        rows = place[:, 1 + step :][learned]
        each = token_losses(
            task.recipe.loss, draft.lm_head(states[learned]).float(), logits[rows], tokens[rows]
        )
        decay: float = task.recipe.section("loss_decay_factor") ** step
        total = total + decay * each.sum() / counts[step]
    return total


def in_draft(task: Task, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Which of N tokens the draft's vocabulary has, by what the base says or, of the text's own, by
    the text; and their places in it."""
    assert task.draft_ids is not None
    places = torch.full((logits.shape[-1],), -1, device=logits.device)
    places[task.draft_ids] = torch.arange(len(task.draft_ids), device=logits.device)
    named = tokens if task.recipe.loss == "ce" else logits.argmax(-1)
    return places[named] >= 0, places[tokens]


def drafts(draft: Eagle3, task: Task, aux: Tensor, ids: Tensor, first: int) -> Tensor:
    """Greedy chains behind each token, all at once."""
    unrolled, said, found = Unrolled(draft, aux[:, :-1]), ids[:, 1:], []
    for _ in range(task.recipe["validation.max_draft_len"]):
        said = draft.lm_head(unrolled.step(task.table[said])).argmax(-1)
        said = said if task.draft_ids is None else task.draft_ids[said]
        found.append(said[0, first - 1 :])
    return torch.stack(found, dim=-1)


ROW = TrainRow(
    config=new_config,
    shapes=new_shapes,
    names=named_tensors,  # type: ignore[arg-type]
    module=Eagle3,  # type: ignore[arg-type]
    loss=loss,
    drafts=drafts,
    modelopt=modelopt_loss,
)
