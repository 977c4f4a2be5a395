"""The EAGLE-3 draft of a model that NVIDIA ModelOpt converted and somebody trained, as a directory
that engines read: sizes and RoPE as they were trained, stop tokens of the base, and no YaRN.

Engines norm a draft's state by `hidden_norm` alone, ModelOpt 0.47 by `input_layernorm` before it:
freeze the weight of `eagle_module.layers[0].input_layernorm` at one, and both are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from edgespec.artifacts import atomic
from edgespec.artifacts.outputs import refuse_overwriting
from edgespec.checkpoint.detect import detect, text_section
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.errors import UnsupportedModel
from edgespec.methods.draft_layers import base_keys
from edgespec.training.eagle3 import AUX_KEY, new_config, new_shapes
from edgespec.training.eagle3_keys import TRAINABLE
from edgespec.training.files import DraftFiles
from edgespec.training.job import base_model, named_base
from edgespec.training.new_draft import LAYER_KEYS
from edgespec.training.recipe import read_recipe
from edgespec.training.row import BaseFacts


def write_draft(model: Any, base_dir: str, out: Path) -> None:
    """Writes the draft of a model that `mtsp.convert` made of the base in `base_dir`.

    Raises UnsupportedModel for a model that has no such draft, and OutputError for a directory that
    is not empty.
    """
    module = getattr(model, "eagle_module", None)
    if module is None or not getattr(model.eagle_config, "use_aux_hidden_state", False):
        raise UnsupportedModel(
            "the model has no draft that reads aux hidden states.",
            'Convert it by mtsp.convert(model, [("eagle", ...)]) with use_aux_hidden_state.',
        )
    refuse_overwriting(out, (base_dir,))
    atomic.refuse_occupied(out)
    base = open_checkpoint(base_dir)
    facts = BaseFacts(base, base_model(base), text_section(base), None)
    kind = {"recipe_type": TRAINABLE.recipe_type}
    section = {"eagle_architecture_config": sizes_of(model.eagle_config)}
    recipe = read_recipe({"metadata": kind, TRAINABLE.section: section}, "ModelOpt's model")
    config = new_config(facts, recipe)
    config |= base_keys(config, named_base(base, base_dir))
    own = module.state_dict()
    own.setdefault("lm_head.weight", model.lm_head.weight)
    beside = {"d2t": own["d2t"]} if "d2t" in own else {}
    names = {name: name for name in new_shapes(config)}
    with atomic.writing(out), atomic.staged_directory(out) as staging:
        DraftFiles(config, names, beside).write(staging, own, getattr(torch, facts.config.dtype))
        detect(Checkpoint(staging))
        atomic.sync_directory(staging)


def sizes_of(config: Any) -> dict[str, Any]:
    """A converted draft's sizes, RoPE and aux layers, as a recipe says them."""
    said = config.to_dict()
    rope = dict(said.get("rope_parameters") or said.get("rope_scaling") or {})
    found = {key: said[key] for key in LAYER_KEYS if said.get(key) is not None}
    found.pop("rope_scaling", None)
    found["rope_theta"] = rope.pop("rope_theta", found.get("rope_theta"))
    if rope.get("rope_type", "default") != "default":
        found["rope_scaling"] = rope
    return found | {
        "draft_vocab_size": config.draft_vocab_size,
        AUX_KEY: [*config.eagle_aux_hidden_state_layer_ids],
    }
