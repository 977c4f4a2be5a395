"""Ways in which the base's hidden states could be meant: as a draft states them, and what is easily
mistaken for it."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.methods import resolve_aux_layers
from edgespec.pairing.check_result import Share
from edgespec.pairing.pair import Pair

AS_STATED = "as stated"
WITH_IMAGE_ROWS = "with rows of images in place of the image token"


@dataclass(frozen=True, slots=True)
class Reading:
    """hidden_states indices, or with none the state behind the last norm. With `image_rows` the
    draft reads in slots of images what the base reads there, else the image token."""

    name: str
    aux_layers: tuple[int, ...] = ()
    image_rows: bool = False


def shifted_readings(pair: Pair) -> tuple[Reading, ...]:
    """The aux layers as the draft states them, and one layer lower and higher."""
    _, config = pair.drafted()
    num_layers = pair.model.decoder.num_layers
    stated = resolve_aux_layers(config, num_layers, pair.aux_layers)
    shifted = {
        "with aux layers one lower": tuple(layer - 1 for layer in stated),
        "with aux layers one higher": tuple(layer + 1 for layer in stated),
    }
    others = [
        Reading(name, aux_layers)
        for name, aux_layers in shifted.items()
        if aux_layers[0] >= 1 and aux_layers[-1] <= num_layers
    ]
    return Reading(AS_STATED, stated), *others


def final_readings(pair: Pair) -> tuple[Reading, ...]:
    """The state after the base's last norm, and the one before it."""
    last = pair.model.decoder.num_layers
    return Reading(AS_STATED), Reading("from before the base's last norm", (last,))


def listed(layers: tuple[int, ...], between: str = ", ") -> str:
    """Layer numbers in words."""
    return between.join(map(str, layers))


def pass_aux_layers(better: Share) -> str:
    """How to have another reading, where --aux-layers may name it."""
    layers = listed(better.aux_layers, ",")
    return f"Pass `aux_layers` {layers} to the exports of base and draft."
