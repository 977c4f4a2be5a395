"""How an EAGLE-3 draft is trained: what a new one is, and its rows of the table (see `chains`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.config.values import Shapes
from edgespec.errors import RequestError
from edgespec.graphs.eagle3 import named_tensors
from edgespec.methods.aux_layers import default_aux_layers
from edgespec.methods.eagle3 import POST_NORM_KEY
from edgespec.modules.eagle3 import Eagle3
from edgespec.training.chains import drafts, loss
from edgespec.training.eagle3_modelopt import modelopt_loss
from edgespec.training.new_draft import architecture, layer_keys, layer_shapes
from edgespec.training.recipe import TrainRecipe
from edgespec.training.row import BaseFacts, TrainRow

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


ROW = TrainRow(
    config=new_config,
    shapes=new_shapes,
    names=named_tensors,  # type: ignore[arg-type]
    module=Eagle3,  # type: ignore[arg-type]
    loss=loss,
    drafts=drafts,
    modelopt=modelopt_loss,
)
