"""How the MTP head of a base is trained: what a new one is, and its rows of the table (see `chains`
and `in_base`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.mtp import LAYER, ROOT, layer_config, mtp_head, mtp_tensors
from edgespec.checkpoint.names import stored_name, text_stack
from edgespec.config import AttentionSpec, DraftConfig, ModelConfig
from edgespec.config.values import Shapes
from edgespec.errors import UnsupportedModel
from edgespec.families import parse_model_config
from edgespec.methods.mtp import NAME
from edgespec.modules.mtp import MtpModule
from edgespec.training.chains import drafts, loss
from edgespec.training.files import tensor_of
from edgespec.training.recipe import TrainRecipe
from edgespec.training.row import BaseFacts, TrainRow


def new_config(facts: BaseFacts, recipe: TrainRecipe) -> dict[str, Any]:
    """The base's config.json with a head of one layer. Raises UnsupportedModel for a family whose
    head this version does not know."""
    raw, declared = dict(facts.checkpoint.config), {"mtp_num_hidden_layers": 1}
    if isinstance(raw.get("text_config"), dict):
        raw["text_config"] = {**raw["text_config"], **declared}
    else:
        raw |= declared
    if not parse_model_config(raw, facts.checkpoint.config_source).mtp_layers:
        raise UnsupportedModel(
            f"{facts.checkpoint.place}: bases of this family have no MTP head.",
            "Take a Qwen3.5 base, or train a draft of another method.",
        )
    return raw


def head_config(raw: Mapping[str, Any], shapes: Shapes, source: str) -> DraftConfig:
    """The head as a draft that reads the base's last state."""
    model = parse_model_config(raw, source)
    hidden = model.decoder.hidden_size
    return DraftConfig(
        method=NAME, layout="base", decoder=layer_config(model), vocab_size=model.vocab_size,
        draft_vocab_size=model.vocab_size, target_hidden_size=hidden, num_aux_layers=1,
        aux_layer_ids=None, own_embedding=False, own_head=False,
    )  # fmt: skip


def new_shapes(config: Mapping[str, Any]) -> Shapes:
    """Own name -> shape of the head's tensors."""
    shapes = mtp_tensors(parse_model_config(config, "config.json"))
    return {name.removeprefix(ROOT): shape for name, shape in shapes.items()}


def names(checkpoint: Checkpoint, config: DraftConfig) -> tuple[Checkpoint, dict[str, str]]:
    """The checkpoint, and own name -> name in it of the head's tensors. Raises UnsupportedModel for
    heads of other forms, and CheckpointError for a damaged one."""
    head = mtp_head(checkpoint, parse_model_config(checkpoint.config, checkpoint.config_source))
    return checkpoint, {name.removeprefix(ROOT): name for name in head}


def begin(head: MtpModule, base: Any, checkpoint: Checkpoint, model: ModelConfig) -> None:
    """A new head begins as the base's last layer of full attention, and its last norm."""
    layers, stack = model.decoder.layers, text_stack(checkpoint)
    last = max(i for i, layer in enumerate(layers) if isinstance(layer.mixer, AttentionSpec))
    own = LAYER.removeprefix(ROOT)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if name.startswith(own):
                there = f"model.layers.{last}{name.removeprefix(own)}"
            elif name == "norm.weight":
                there = "model.norm.weight"
            else:
                continue
            weight.copy_(tensor_of(checkpoint, stored_name(there, stack)))


ROW = TrainRow(
    config=new_config,
    shapes=new_shapes,
    names=names,
    parse=head_config,
    module=MtpModule,
    begin=begin,
    loss=loss,
    drafts=drafts,
    images=True,
)
