"""How an EAGLE-1 draft is trained: it says the base's next state, by smooth L1, and through the
base's lm_head its next token (arXiv 2401.15077, section 3.2), unrolled over its own states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from edgespec.config.values import Shapes
from edgespec.graphs.eagle1 import named_tensors
from edgespec.modules.eagle1 import Eagle1
from edgespec.training import chains
from edgespec.training.new_draft import architecture, layer_keys, layer_shapes
from edgespec.training.recipe import TrainRecipe
from edgespec.training.row import BaseFacts, Batch, Task, TrainRow

Tensor = torch.Tensor
TOKEN_WEIGHT = 0.1  # of the loss by tokens beside that by states, as published
# Norms that published drafts do not have, and what makes the architecture this one
SWITCHES = ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm")


def new_config(facts: BaseFacts, recipe: TrainRecipe) -> dict[str, Any]:
    """A new draft's config.json in ModelOpt's layout. Its switches that would make another graph
    are refused where the draft is read."""
    given = architecture(recipe, (*SWITCHES, "bias"))
    return {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        **layer_keys(facts, given, given.get("num_hidden_layers", 1)),
        "bias": bool(given.get("bias", True)),
        "eagle_config": {key: bool(given.get(key, False)) for key in SWITCHES},
    }


def new_shapes(config: Mapping[str, Any]) -> Shapes:
    """Name -> shape of a new draft's tensors."""
    hidden, inner = config["hidden_size"], config["eagle_config"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
    if config["bias"]:
        shapes["fc.bias"] = (hidden,)
    for index in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(config, index, hidden)
    if not inner["use_input_layernorm_in_first_layer"]:
        del shapes["layers.0.input_layernorm.weight"]
    if inner["use_last_layernorm"]:
        shapes["norm.weight"] = (hidden,)
    return shapes


def loss(draft: Eagle1, task: Task, batch: Batch) -> Tensor:
    """That of chains, with what the draft's states are off the base's."""

    def with_states(each: Tensor, states: Tensor, finals: Tensor) -> Tensor:
        return TOKEN_WEIGHT * each + F.smooth_l1_loss(states, finals, reduction="none").mean(-1)

    distilled = task.recipe.section("hidden_state_distillation")
    return chains.loss(draft, task, batch, with_states if distilled else None)


ROW = TrainRow(
    config=new_config,
    shapes=new_shapes,
    names=named_tensors,  # type: ignore[arg-type]
    module=Eagle1,  # type: ignore[arg-type]
    loss=loss,
    drafts=chains.drafts,
    begin=lambda draft, base, config: None,  # there is nothing of its base in it
)
