"""EAGLE-3 (arXiv 2503.01840) on its way out: the aux layers that a base emits, and the draft."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgespec.errors import PairingError
from edgespec.export.component import Component
from edgespec.export.draft import (
    draft_component,
    draft_notes,
    hidden_states,
    pair_config,
    vocabulary_map,
)
from edgespec.export.request import ExportRequest
from edgespec.export.row import ComponentRow, Emitted
from edgespec.methods.aux_layers import (
    default_aux_layers,
    normalize_aux_layers,
    resolve_aux_layers,
)
from edgespec.methods.eagle3 import NAME, Eagle3Spec

__all__ = ["COMPONENTS", "NAME"]


def emits(request: ExportRequest) -> Emitted:
    """The layers of --aux-layers, or EAGLE-3's default. Raises PairingError for layers that the
    base has not."""
    num_layers = request.target().config.decoder.num_layers
    asked = request.options.aux_layers or default_aux_layers(num_layers)
    layers = normalize_aux_layers(asked, num_layers, "hs")
    note = f"aux layers: {hidden_states(layers)}"
    return Emitted(aux_layers=layers, spec=Eagle3Spec(aux_layer_ids=layers), note=note)


def draft(request: ExportRequest) -> Component:
    """The draft's component. Raises PairingError where its aux layers cannot be known."""
    drafted = request.drafted()
    config, layers = drafted.config, aux_layers(request)
    first = f"EAGLE-3 draft, {config.layout} layout"
    default = "the draft names none; EAGLE-3's default for the base's depth, checked at build"
    read = hidden_states(layers) if layers else default
    d2t = vocabulary_map(drafted)
    return draft_component(
        request,
        "Eagle3",
        pair_config(request, layers),
        d2t=np.zeros(config.draft_vocab_size, np.int32) if d2t is None else d2t,
        notes=tuple(draft_notes(request, first, read)),
    )


def aux_layers(request: ExportRequest) -> tuple[int, ...] | None:
    """The aux layers as far as they can be known here: without the base's depth, a draft's default
    stays open. Raises PairingError where the draft's ids can be read in two ways."""
    config, asked = request.drafted().config, request.options.aux_layers
    if request.base is not None:
        return resolve_aux_layers(config, request.base.config.decoder.num_layers, asked)
    if asked:
        count, named = config.num_aux_layers, ",".join(map(str, asked))
        if len(asked) != count or list(asked) != sorted(set(asked)):
            message = f"`aux_layers` {named}: the draft reads {count} aux layers"
            raise PairingError(message, f"Give {count} ascending hidden_states indices.")
        return asked
    if config.aux_layer_ids is None and config.num_aux_layers != len(default_aux_layers(0)):
        message = f"the draft reads {config.num_aux_layers} aux layers and does not say which"
        raise PairingError(message, "Pass `aux_layers` with their hidden_states indices.")
    if config.aux_layer_ids is None or config.aux_layer_convention == "hs":
        return config.aux_layer_ids
    message = (
        f"the draft names its aux layers {list(config.aux_layer_ids)} in a numbering that only its"
        " base's depth can settle"
    )
    raise PairingError(
        message, "Pass `base_model_dir`, or `aux_layers` with hidden_states indices."
    )


def recorded(request: ExportRequest) -> dict[str, Any]:
    """The options that the manifest keeps: whether the base of EAGLE-3 was asked for."""
    return {"eagle_base": request.options.base_for == NAME}


COMPONENTS = ComponentRow(emits=emits, draft=draft, recorded=recorded)
