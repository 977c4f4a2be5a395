"""Which layers of the base a draft reads. Everywhere inside, an index is one of Hugging Face's
`hidden_states`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from edgespec.config.values import AuxLayerConvention, DraftConfig
from edgespec.errors import PairingError

REMEDY = (
    "Pass `aux_layers` with the hidden_states indices that the draft was trained on, such as"
    " 2,16,29."
)


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The default aux layers (arXiv 2503.01840) as hidden_states indices: 2, L//2, L-3."""
    return (2, num_layers // 2, num_layers - 3)


def normalize_aux_layers(
    ids: Sequence[int], num_layers: int, convention: Literal["hs", "output"]
) -> tuple[int, ...]:
    """Layer ids of either convention as hidden_states indices of a base with `num_layers` layers.

    "output" counts layers from 0 and means what comes out of them: hs index - 1. The index
    `num_layers` means the last layer's output before the final norm (not Hugging Face's last
    entry). Raises PairingError for ids that are not in 1..num_layers or not strictly ascending.
    """
    aux_layers = tuple(ids) if convention == "hs" else tuple(i + 1 for i in ids)
    if not all(1 <= layer <= num_layers for layer in aux_layers):
        raise PairingError(
            f"aux layers {list(ids)}, read as hidden_states indices {list(aux_layers)}: not all in"
            f" 1..{num_layers}, and the base has {num_layers} layers.",
            REMEDY,
        )
    if any(low >= high for low, high in pairwise(aux_layers)):
        raise PairingError(
            f"aux layers {list(ids)}, read as hidden_states indices {list(aux_layers)}: not"
            f" strictly ascending (the base has {num_layers} layers).",
            REMEDY,
        )
    return aux_layers


def resolve_aux_layers(
    draft: DraftConfig, num_layers: int, override: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Which hidden_states indices of a base with `num_layers` layers the draft reads, ascending.

    `override` are hidden_states indices and win; otherwise the draft's own ids, otherwise the
    default. Raises PairingError where ids do not fit the base or the draft, or can be read in two
    ways.
    """
    if override is not None:
        aux_layers = normalize_aux_layers(override, num_layers, "hs")
    elif draft.aux_layer_ids is None:
        aux_layers = normalize_aux_layers(default_aux_layers(num_layers), num_layers, "hs")
    else:
        raw = (
            tuple(layer - 1 for layer in draft.aux_layer_ids)
            if draft.aux_layer_convention == "output"
            else draft.aux_layer_ids
        )
        aux_layers = normalize_aux_layers(
            raw, num_layers, _convention(raw, draft.aux_layer_convention, num_layers)
        )
    if len(aux_layers) != draft.num_aux_layers:
        raise PairingError(
            f"{len(aux_layers)} aux layers {list(aux_layers)}, but the draft's fc takes"
            f" {draft.num_aux_layers} of width {draft.target_hidden_size}.",
            REMEDY,
        )
    return aux_layers


def _convention(
    ids: tuple[int, ...], suggested: AuxLayerConvention, num_layers: int
) -> Literal["hs", "output"]:
    """How ids count: the default is known, then the range decides, then the format."""
    if suggested == "hs":
        return "hs"
    default = default_aux_layers(num_layers)
    if ids == default:
        return "hs"
    if ids == tuple(layer - 1 for layer in default) or 0 in ids or suggested == "output":
        return "output"
    if num_layers in ids:
        return "hs"
    raise PairingError(
        f"the draft names the layers {list(ids)} and does not say how it counts: as hidden_states"
        f" indices they are {list(ids)}, as layer outputs {[i + 1 for i in ids]}.",
        "Pass `aux_layers` with the one list of the two that the draft was trained on.",
    )
