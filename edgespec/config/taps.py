"""Which layers of the base a draft reads. Everywhere inside, an index is one of Hugging Face's `hidden_states`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from edgespec.config.values import DraftConfig, TapConvention
from edgespec.errors import PairingError

_TAPS_REMEDY = "Pass --aux-layers with the hidden_states indices that the draft was trained on, such as 2,16,29."


def default_tap_ids(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's default taps as hidden_states indices: 2, L//2, L-3."""
    return (2, num_layers // 2, num_layers - 3)


def normalise_taps(ids: Sequence[int], num_layers: int, convention: Literal["hs", "output"]) -> tuple[int, ...]:
    """Tap ids of either convention as hidden_states indices of a base with `num_layers` layers.

    "output" counts layers from 0 and means what comes out of them: hs index - 1. The index `num_layers` means the last
    layer's output before the final norm (not Hugging Face's last entry). Raises PairingError for ids that are not in
    1..num_layers or not strictly ascending.
    """
    taps = tuple(ids) if convention == "hs" else tuple(i + 1 for i in ids)
    if not all(1 <= tap <= num_layers for tap in taps):
        raise PairingError(
            f"tap ids {list(ids)} read as hidden_states indices {list(taps)}: not all in 1..{num_layers}, "
            f"and the base has {num_layers} layers.",
            _TAPS_REMEDY,
        )
    if any(low >= high for low, high in pairwise(taps)):
        raise PairingError(
            f"tap ids {list(ids)} read as hidden_states indices {list(taps)}: not strictly ascending "
            f"(the base has {num_layers} layers).",
            _TAPS_REMEDY,
        )
    return taps


def resolve_taps(draft: DraftConfig, num_layers: int, override: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Which hidden_states indices of a base with `num_layers` layers the draft reads, ascending.

    `override` are hidden_states indices and win; otherwise the draft's own ids, otherwise EAGLE-3's default.
    Raises PairingError where ids do not fit the base or the draft, or can be read in two ways.
    """
    if override is not None:
        taps = normalise_taps(override, num_layers, "hs")
    elif draft.tap_ids is None:
        taps = normalise_taps(default_tap_ids(num_layers), num_layers, "hs")
    else:
        raw = tuple(tap - 1 for tap in draft.tap_ids) if draft.tap_convention == "output" else draft.tap_ids
        taps = normalise_taps(raw, num_layers, _convention(raw, draft.tap_convention, num_layers))
    if len(taps) != draft.num_taps:
        raise PairingError(
            f"{len(taps)} tapped layers {list(taps)}, but the draft's fc takes {draft.num_taps} of width "
            f"{draft.target_hidden_size}.",
            _TAPS_REMEDY,
        )
    return taps


def _convention(ids: tuple[int, ...], suggested: TapConvention, num_layers: int) -> Literal["hs", "output"]:
    """How ids count: a default tells by itself, then the range, then the format."""
    if suggested == "hs":
        return "hs"
    default = default_tap_ids(num_layers)
    if ids == default:
        return "hs"
    if ids == tuple(tap - 1 for tap in default) or 0 in ids or suggested == "output":
        return "output"
    if num_layers in ids:
        return "hs"
    raise PairingError(
        f"the draft names the layers {list(ids)} and does not say how it counts: as hidden_states indices they are "
        f"{list(ids)}, as layer outputs {[i + 1 for i in ids]}.",
        "Pass --aux-layers with the one list of the two that the draft was trained on.",
    )
